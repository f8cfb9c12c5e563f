"""Values of options on the command line: written out, or refused in one sentence."""

from typing import Literal

import pytest

from rollmill.cli.main import main
from rollmill.cli.values import Option, check_values
from rollmill.core.errors import UsageError

OPTIONS = {
    "steps": Option(int, takes_many=False),
    "most-steps": Option(int | None, takes_many=False),
    "rate": Option(float, takes_many=False),
    "schedule": Option(float | str, takes_many=False),
    "sizes": Option(tuple[int, ...], takes_many=True),
    "shapes": Option(tuple[tuple[int, int], ...], takes_many=True),
    "place": Option(Literal["here", "there"] | None, takes_many=False),
    "name": Option(str, takes_many=False),
}


@pytest.mark.parametrize(
    ("words", "checked"),
    [
        ("--steps 1e6", "--steps 1000000"),
        ("--steps=1e6", "--steps=1000000"),
        ("--steps 1_000", "--steps 1000"),
        ("--steps -3", "--steps -3"),
        ("--most_steps 2.0", "--most_steps 2"),
        ("--most-steps None", "--most-steps None"),
        ("--rate 1e-3", "--rate 1e-3"),
        ("--rate inf", "--rate inf"),
        ("--schedule linear:1:0", "--schedule linear:1:0"),
        ("--sizes 64 1e2 --rate 1", "--sizes 64 100 --rate 1"),
        ("--sizes --rate 1", "--sizes --rate 1"),
        ("--shapes 1 2 3 4", "--shapes 1 2 3 4"),
        ("--place here", "--place here"),
        ("--place None", "--place None"),
        ("--name 1e6", "--name 1e6"),
    ],
)
def test_integers_are_written_out_and_all_else_is_left(words, checked):
    assert check_values(words.split(), OPTIONS).words == checked.split()


def test_words_that_belong_to_no_option_are_positional():
    found = check_values(["ppo", "--steps", "3", "--quiet", "env", "--sizes", "1", "2"], OPTIONS)
    assert found.positional == ["ppo", "env"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--steps many", r"--steps many has to be an integer\.$"),
        ("--steps 1.5", r"--steps 1\.5 has to be an integer\.$"),
        ("--steps inf", r"--steps inf has to be an integer\.$"),
        ("--steps nan", r"--steps nan has to be an integer\.$"),
        ("--steps 500k", r"--steps 500k has to be an integer\. hint: 500000\.$"),
        ("--steps=1.5M", r"--steps 1\.5M has to be an integer\. hint: 1500000\.$"),
        ("--steps k", r"--steps k has to be an integer\.$"),
        ("--rate fast", r"--rate fast has to be a number\.$"),
        ("--sizes 64 wide", r"--sizes wide has to be an integer\.$"),
        ("--place her", r"unknown --place 'her'\. Did you mean here"),
        ("--steps", r"--steps needs a value\.$"),
        ("--place", r"--place needs a value: here, there\.$"),
        ("--steps --rate 1", r"--steps needs a value\.$"),
    ],
)
def test_a_value_that_is_none_is_refused(words, message):
    with pytest.raises(UsageError, match=message):
        check_values(words.split(), OPTIONS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train ppo CartPole-v1 --total-timesteps 1e-3", "--total-timesteps 1e-3 has to be an integer."),
        ("train ppo CartPole-v1 --fusion maybe", "unknown --fusion 'maybe'. Known: auto, full, off, rollout."),
        ("train ppo", "rollmill train ppo needs ENVIRONMENT. `rollmill train ppo --help` describes it."),
        ("evaluate", "rollmill evaluate needs RUN."),
        ("profile compare a b c", "rollmill profile compare has no use for 'c'."),
        ("profile compare a", "rollmill profile compare needs AFTER."),
    ],
)
def test_an_error_is_one_sentence_of_the_command(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert printed.err.startswith(f"rollmill: {message}") and printed.err.count("\n") == 1

"""Values of options on the command line: written out, or refused in one sentence."""

from typing import Any, Literal

import pytest

from rollmill.cli.main import main
from rollmill.cli.values import Option, check_values
from rollmill.core.errors import UsageError

OPTIONS = {
    "--steps": Option(int),
    "--most-steps": Option(int | None),
    "--rate": Option(float),
    "--schedule": Option(float | str),
    "--sizes": Option(tuple[int, ...], None),
    "--list": Option(list[int], None),
    "--shapes": Option(tuple[tuple[int, int], ...], None),
    "--pair": Option(tuple[int, int], 2),
    "--place": Option(Literal["here", "there"] | None),
    "--level": Option(Literal[1, 2]),
    "--until": Option(float | Literal["never"] | None),
    "--at-most": Option(int | Literal["all"]),
    "--name": Option(str),
    "--other": Option(Any),
    "-s": Option(int),
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
        ("--other 1e6", "--other 1e6"),
        ("--list 1e2 3", "--list 100 3"),
        ("--pair 1e2 3", "--pair 100 3"),
        ("--level 2", "--level 2"),
        ("--until never", "--until never"),
        ("--until 3", "--until 3"),
        ("--at-most all", "--at-most all"),
        ("--at-most 1e3", "--at-most 1000"),
        ("-s 1e3", "-s 1000"),
        ("--steps 9007199254740993.0", "--steps 9007199254740993"),
    ],
)
def test_integers_are_written_out_and_all_else_is_left(words, checked):
    assert check_values(words.split(), OPTIONS).words == checked.split()


def test_words_that_belong_to_no_option_are_positional():
    words = ["ppo", "--steps", "3", "--quiet", "-v", "env", "--pair", "1", "2", "-s", "4", "--sizes", "1", "2"]
    found = check_values(words, OPTIONS)
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
        ("--steps 1.0005k", r"--steps 1\.0005k has to be an integer\.$"),
        ("--steps 1e99", r"--steps 1e99 has to be an integer\.$"),
        ("--steps=", r"--steps needs a value: an integer\.$"),
        ("--pair 1", r"--pair needs a value: an integer\.$"),
        ("-s many", r"-s many has to be an integer\.$"),
        ("--level 3", r"unknown --level '3'\. Known: 1, 2\.$"),
        ("--until later", r"--until later has to be a number or never\.$"),
        ("--until", r"--until needs a value: a number or never\.$"),
        ("--at-most 1.5", r"--at-most 1\.5 has to be an integer or all\.$"),
        ("--rate fast", r"--rate fast has to be a number\.$"),
        ("--sizes 64 wide", r"--sizes wide has to be an integer\.$"),
        ("--place her", r"unknown --place 'her'\. Did you mean here"),
        ("--steps", r"--steps needs a value: an integer\.$"),
        ("--place", r"--place needs a value: here, there\.$"),
        ("--steps --rate 1", r"--steps needs a value: an integer\.$"),
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
        ("doctor a b", "rollmill doctor has no use for 'b'."),
        ("train ppo CartPole-v1 --network.convolutions 1", "Error parsing --network.convolutions: "),
        ("train ppo CartPole-v1 --quiet=true", "Unrecognized options: true. `rollmill train ppo --help`"),
    ],
)
def test_an_error_is_one_sentence_of_the_command(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert printed.err.startswith(f"rollmill: {message}") and printed.err.count("\n") == 1

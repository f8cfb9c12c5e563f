"""Values of options on the command line: read with their types, or refused in one sentence."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from rollmill.cli.main import main
from rollmill.cli.parsing import parse_given, parse_known, positional_words
from rollmill.core.options import Arg
from wordings import raises


@dataclass(frozen=True)
class Inner:
    size: int = 3
    deep: bool = False


@dataclass(frozen=True)
class Options:
    steps: int = 0
    most_steps: int | None = 5
    rate: float = 0.0
    schedule: float | str = 0.0
    sizes: tuple[int, ...] = ()
    numbers: list[int] = field(default_factory=list)
    shapes: tuple[tuple[int, int], ...] = ()
    pair: tuple[int, int] = (0, 0)
    place: Literal["here", "there"] | None = "there"
    level: Literal[1, 2] = 1
    until: float | Literal["never"] | None = None
    at_most: int | Literal["all"] = 1
    name: str = ""
    other: Any = None
    file: Path | None = None
    truth: bool | None = None
    flag: bool = True
    table: dict[str, int] = field(default_factory=dict)
    inner: Inner = Inner()
    merged: Annotated[Inner, Arg(name="")] = Inner()
    words: Annotated[tuple[str, ...], Arg(name="word", repeated=True)] = ()


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("--steps 1e6", {"steps": 1_000_000}),
        ("--steps=1e6", {"steps": 1_000_000}),
        ("--steps 1_000", {"steps": 1000}),
        ("--steps -3", {"steps": -3}),
        ("--most_steps 2.0", {"most-steps": 2}),
        ("--most-steps None", {"most-steps": None}),
        ("--rate 1e-3", {"rate": 1e-3}),
        ("--rate inf", {"rate": float("inf")}),
        ("--rate 2", {"rate": 2.0}),
        ("--schedule linear:1:0", {"schedule": "linear:1:0"}),
        ("--schedule 1e-3", {"schedule": 1e-3}),
        ("--sizes 64 1e2 --rate 1", {"sizes": (64, 100), "rate": 1.0}),
        ("--sizes --rate 1", {"sizes": (), "rate": 1.0}),
        ("--shapes 1 2 3 4", {"shapes": ((1, 2), (3, 4))}),
        ("--place here", {"place": "here"}),
        ("--place None", {"place": None}),
        ("--name 1e6", {"name": "1e6"}),
        ("--name None", {"name": "None"}),
        ("--other 1e6", {"other": "1e6"}),
        ("--numbers 1e2 3", {"numbers": [100, 3]}),
        ("--pair 1e2 3", {"pair": (100, 3)}),
        ("--level 2", {"level": 2}),
        ("--until never", {"until": "never"}),
        ("--until 3", {"until": 3.0}),
        ("--at-most all", {"at-most": "all"}),
        ("--at-most 1e3", {"at-most": 1000}),
        ("--file a/b", {"file": Path("a/b")}),
        ("--truth", {"truth": True}),
        ("--no-truth", {"truth": False}),
        ('--table {"a":1}', {"table": {"a": 1}}),
        ("--no-flag --inner.size 4 --inner.deep", {"flag": False, "inner.size": 4, "inner.deep": True}),
        ("--inner.no-deep --size 9 --no-deep", {"inner.deep": False, "size": 9, "deep": False}),
        ("--word a --word b=c", {"word": ("a", "b=c")}),
        ("--steps 1 --steps 2", {"steps": 2}),
        ("--steps 9007199254740993.0", {"steps": 9007199254740993}),
    ],
)
def test_words_become_values_of_their_types(words, given):
    parsed = parse_given(Options, words.split(), prog="it")
    assert parsed.given == given
    assert {name: type(value) for name, value in parsed.given.items()} == {n: type(v) for n, v in given.items()}


def test_what_is_given_stands_in_place_of_defaults():
    parsed = parse_given(Options, ["--inner.size", "4", "--no-flag", "--size", "9"], prog="it").options
    assert parsed == Options(inner=Inner(size=4), flag=False, merged=Inner(size=9))


def test_words_that_belong_to_no_option_are_positional():
    words = ["ppo", "--steps", "3", "--flag", "--unknown", "env", "--pair", "1", "2", "--sizes", "1", "2"]
    assert positional_words(Options, words, prog="it") == ["ppo", "env"]
    assert parse_known(Options, words, prog="it").given == {
        "steps": 3,
        "flag": True,
        "pair": (1, 2),
        "sizes": (1, 2),
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--steps many", ("expected-option", "--steps", "many", "an integer")),
        ("--steps 1.5", ("expected-option", "--steps", "1.5", "an integer")),
        ("--steps inf", ("expected-option", "--steps", "inf", "an integer")),
        ("--steps nan", ("expected-option", "--steps", "nan", "an integer")),
        ("--steps 500k", ("expected-option", "--steps", "500k", "an integer", "hint: 500000.")),
        ("--steps=1.5M", ("expected-option", "--steps", "1.5M", "an integer", "hint: 1500000.")),
        ("--steps k", ("expected-option", "--steps", "k", "an integer")),
        ("--steps 1.0005k", ("expected-option", "--steps", "1.0005k", "an integer")),
        ("--steps 1e99", ("expected-option", "--steps", "1e99", "an integer")),
        ("--steps=", ("needs-value", "--steps", ": an integer")),
        ("--pair 1", ("needs-value", "--pair", ": an integer")),
        ("--shapes 1 2 3", ("takes-values-at-time-and", "--shapes", "2", "3")),
        ("--level 3", ("unknown-name", "--level", "'3'", "Known: 1, 2.")),
        ("--until later", ("expected-option", "--until", "later", "a number or never")),
        ("--until", ("needs-value", "--until", ": a number or never")),
        ("--at-most 1.5", ("expected-option", "--at-most", "1.5", "an integer or all")),
        ("--rate fast", ("expected-option", "--rate", "fast", "a number")),
        ("--sizes 64 wide", ("expected-option", "--sizes", "wide", "an integer")),
        ("--place her", ("unknown-name", "--place", "'her'", "Did you mean here")),
        ("--steps", ("needs-value", "--steps", ": an integer")),
        ("--place", ("needs-value", "--place", ": here or there")),
        ("--steps --rate 1", ("needs-value", "--steps", ": an integer")),
        ("--flag=yes", ("is-on-or-off-and", "--flag", "yes")),
        ("--table {a}", ("expected-option", "--table", "{a}", "an object")),
        ("-s 3", ("unknown-option-of-command", "-s")),
        ("--no-steps", ("unknown-option-of-command", "--no-steps")),
        ("more", ("has-no-use-for-hint", "it", "'more'")),
    ],
)
def test_a_value_that_is_none_is_refused(words, message):
    with raises(*message):
        parse_given(Options, words.split(), prog="it")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train ppo CartPole-v1 --total-timesteps 1e-3", "--total-timesteps 1e-3 must be an integer."),
        ("train ppo CartPole-v1 --fusion maybe", "unknown --fusion 'maybe'. Known: auto, full, off, rollout."),
        (
            "train ppo",
            "rollmill train ppo needs ENVIRONMENT. hint: `rollmill train ppo --help` describes the arguments.",
        ),
        ("evaluate", "rollmill evaluate needs RUN."),
        ("profile compare a b c", "rollmill profile compare does not accept the argument 'c'."),
        ("profile compare a", "rollmill profile compare needs AFTER."),
        ("doctor a b", "rollmill doctor does not accept the argument 'b'."),
        (
            "train ppo CartPole-v1 --network.convolutions 1",
            "--network.convolutions takes 3 values, got 1.",
        ),
        (
            "train ppo CartPole-v1 --quiet=true",
            "--quiet is a switch and takes no value, got true. hint: write --quiet.",
        ),
        (
            "train ppo CartPole-v1 --norm-adv False",
            "--norm-adv is a switch and takes no value, got False. hint: write --no-norm-adv.",
        ),
        (
            "train ppo CartPole-v1 --no-norm-adv false",
            "--no-norm-adv is a switch and takes no value, got false. hint: write --norm-adv.",
        ),
        (
            "train ppo CartPole-v1 --norm-adv=1",
            "--norm-adv is a switch and takes no value, got 1. hint: write --norm-adv or --no-norm-adv.",
        ),
        ("resume run --trust=false", "--trust is a switch and takes no value, got false. hint: leave it out."),
        (
            "resume run --total-timesteps 9",
            "unknown option --total-timesteps. --set total_timesteps=VALUE changes",
        ),
        (
            "train CartPole-v1 ppo --seed 1",
            "the algorithm comes before the environment: rollmill train ppo CartPole-v1",
        ),
        (
            "train ppo CartPole-v1 --env-id CartPole-v1",
            "unknown option --env-id. The environment follows the algorithm",
        ),
        ("sweep ppo CartPole-v1 --device cpu", "unknown option --device. JAX uses a GPU if there is one."),
        ("evaluate run --device cpu", "unknown option --device. `rollmill evaluate --help` lists the options."),
    ],
)
def test_an_error_is_one_sentence_of_the_command(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert printed.err.startswith(f"rollmill: {message}") and printed.err.count("\n") == 1

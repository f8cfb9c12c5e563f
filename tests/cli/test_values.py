"""Values of options on the command line: read with their types, or refused in one sentence."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from rollmill.cli.main import main
from rollmill.cli.parsing import parse_given, parse_known, positional_words
from rollmill.core.errors import UsageError
from rollmill.core.options import Arg


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
        ("--truth true", {"truth": True}),
        ("--truth none", {"truth": None}),
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
        ("--steps many", r"--steps many must be an integer\.$"),
        ("--steps 1.5", r"--steps 1\.5 must be an integer\.$"),
        ("--steps inf", r"--steps inf must be an integer\.$"),
        ("--steps nan", r"--steps nan must be an integer\.$"),
        ("--steps 500k", r"--steps 500k must be an integer\. hint: 500000\.$"),
        ("--steps=1.5M", r"--steps 1\.5M must be an integer\. hint: 1500000\.$"),
        ("--steps k", r"--steps k must be an integer\.$"),
        ("--steps 1.0005k", r"--steps 1\.0005k must be an integer\.$"),
        ("--steps 1e99", r"--steps 1e99 must be an integer\.$"),
        ("--steps=", r"--steps needs a value: an integer\.$"),
        ("--pair 1", r"--pair needs a value: an integer\.$"),
        ("--shapes 1 2 3", r"--shapes takes 2 values at a time, and 3 were given\.$"),
        ("--level 3", r"unknown --level '3'\. Known: 1, 2\.$"),
        ("--until later", r"--until later must be a number or never\.$"),
        ("--until", r"--until needs a value: a number or never\.$"),
        ("--at-most 1.5", r"--at-most 1\.5 must be an integer or all\.$"),
        ("--rate fast", r"--rate fast must be a number\.$"),
        ("--sizes 64 wide", r"--sizes wide must be an integer\.$"),
        ("--place her", r"unknown --place 'her'\. Did you mean here"),
        ("--truth maybe", r"--truth maybe must be true or false\.$"),
        ("--steps", r"--steps needs a value: an integer\.$"),
        ("--place", r"--place needs a value: here or there\.$"),
        ("--steps --rate 1", r"--steps needs a value: an integer\.$"),
        ("--flag=yes", r"--flag is on or off, and takes no value\. hint: leave out =yes\.$"),
        ("--table {a}", r"--table \{a\} must be an object"),
        ("-s 3", r"unknown option -s\."),
        ("--no-steps", r"unknown option --no-steps\."),
        ("more", r"it has no use for 'more'"),
    ],
)
def test_a_value_that_is_none_is_refused(words, message):
    with pytest.raises(UsageError, match=message):
        parse_given(Options, words.split(), prog="it")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train ppo CartPole-v1 --total-timesteps 1e-3", "--total-timesteps 1e-3 must be an integer."),
        ("train ppo CartPole-v1 --fusion maybe", "unknown --fusion 'maybe'. Known: auto, full, off, rollout."),
        ("train ppo", "rollmill train ppo needs ENVIRONMENT. `rollmill train ppo --help` describes it."),
        ("evaluate", "rollmill evaluate needs RUN."),
        ("profile compare a b c", "rollmill profile compare has no use for 'c'."),
        ("profile compare a", "rollmill profile compare needs AFTER."),
        ("doctor a b", "rollmill doctor has no use for 'b'."),
        (
            "train ppo CartPole-v1 --network.convolutions 1",
            "--network.convolutions takes 3 values at a time, and 1 were given.",
        ),
        ("train ppo CartPole-v1 --quiet=true", "--quiet is on or off, and takes no value. hint: leave out =true."),
    ],
)
def test_an_error_is_one_sentence_of_the_command(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert printed.err.startswith(f"rollmill: {message}") and printed.err.count("\n") == 1

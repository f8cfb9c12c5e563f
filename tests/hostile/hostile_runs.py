"""Run directories and plans that are damaged, edited, foreign or malicious; a table of what becomes of each.

`python tests/hostile/hostile_runs.py` tries all of them and prints counts, and the suite tries a sample. Every
case starts from a copy of one healthy run, changes it, and calls commands as the command line does, in this
process. Each has to end with the exit code and the sentence of the case, without a traceback, without importing
what the run names, and without touching a file outside of the run. Memory is measured too: the most that one
case takes above the healthy readings and the cases before it.
"""

import contextlib
import io
import json
import os
import re
import resource
import shutil
import struct
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import rollmill
from rollmill.cli.main import _exit_code as command

MIB = 2**20


class Case(NamedTuple):
    """A change of a healthy run, and the sentence in which commands say so."""

    kind: str
    name: str
    change: Callable[[Path], None]
    message: str
    commands: tuple[tuple[str, ...], ...] = (("doctor",), ("resume", "--quiet"), ("evaluate", "--episodes", "1"))
    code: int = 2


DOCTOR, RESUME, EVALUATE = Case._field_defaults["commands"]
OPEN = (RESUME, EVALUATE)

DOCUMENTS = {
    "empty": (b"", "it is not valid JSON (input data was truncated)"),
    "cut": (b'{"graph": {"alg', "it is not valid JSON (input data was truncated)"),
    "not-unicode": (b"\xff\xfe{}", "JSON is malformed"),
    "surrogate": (b'{"graph": "\\ud800"}', "it is not valid JSON"),
    "nan": (b'{"graph": NaN}', "JSON is malformed: invalid character"),
    "trailing": (b"{} {}", "JSON is malformed: trailing characters"),
    "list": (b"[1]", "expected a JSON object, got [1]"),
    "text": (b'"x"', 'expected a JSON object, got "x"'),
    "null": (b"null", "expected a JSON object, got null"),
    "deep": (b'{"a":' * 10**5 + b"1" + b"}" * 10**5, "nested deeper than 32 levels"),
    "deep-list": (b'{"a":' + b"[" * 200 + b"]" * 200 + b"}", "nested deeper than 32 levels"),
    "large": (b'{"a": "' + b"x" * (3 * MIB) + b'"}', "exceed the limit of 2,097,152"),
    "65-bits": (b'{"graph": 99999999999999999999}', "does not fit into 64 bits"),
    "huge-number": (b'{"graph": ' + b"9" * 5000 + b"}", "out of range"),
    "huge-float": (b'{"graph": 1e999}', "out of range"),
    "zeros": (b"\0" * 1000, "JSON is malformed"),
}


# --- changes of a run -----------------------------------------------------------------------------------


def edit(file: str, *path: str, to: Any) -> Callable[[Path], None]:
    """Gives an entry of a JSON file another value."""

    def change(run: Path) -> None:
        value = json.loads((run / file).read_text())
        part = value
        for name in path[:-1]:
            part = part[name]
        part[path[-1]] = to
        (run / file).write_text(json.dumps(value))

    return change


def drop(file: str, *path: str) -> Callable[[Path], None]:
    """Deletes an entry of a JSON file."""

    def change(run: Path) -> None:
        value = json.loads((run / file).read_text())
        part = value
        for name in path[:-1]:
            part = part[name]
        del part[path[-1]]
        (run / file).write_text(json.dumps(value))

    return change


def put(file: str, content: bytes) -> Callable[[Path], None]:
    """Replaces the content of a file."""
    return lambda run: (run / file).write_bytes(content) and None


def link(name: str, *, folder: bool = False, hard: bool = False) -> Callable[[Path], None]:
    """Puts a link to something outside of the run in the place of a file or folder."""

    def change(run: Path) -> None:
        target, place = run.parent / "outside" / ("folder" if folder else "precious.txt"), run / name
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        place.unlink(missing_ok=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.link(target, place) if hard else place.symlink_to(target)

    return change


def pipe(name: str) -> Callable[[Path], None]:
    """Puts a pipe, whose opening would wait for ever, in the place of a file."""

    def change(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)

    return change


def folder_at(name: str) -> Callable[[Path], None]:
    """Puts a folder in the place of a file."""

    def change(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).mkdir()

    return change


def arrays(content: bytes, size: int) -> Callable[[Path], None]:
    """Replaces the arrays of all checkpoints by a header, in a file of a size that is mostly a hole."""

    def change(run: Path) -> None:
        for checkpoint in (run / "checkpoints").iterdir():
            with (checkpoint / "state.safetensors").open("wb") as file:
                file.write(struct.pack("<Q", len(content)) + content)
                file.truncate(size)

    return change


def each_checkpoint(change: Callable[[Path], None]) -> Callable[[Path], None]:
    """Makes the same change in every checkpoint."""
    return lambda run: [change(checkpoint) for checkpoint in (run / "checkpoints").iterdir()] and None


# --- the cases ------------------------------------------------------------------------------------------


def cases() -> Iterator[Case]:
    """All cases."""
    yield from _documents()
    yield from _types()
    yield from _settings()
    yield from _links()
    yield from _checkpoint_cases()
    yield from _imports()
    yield from _edited()
    yield from _records()
    yield from _plans()


def _documents() -> Iterator[Case]:
    for name, (content, message) in DOCUMENTS.items():
        yield Case(
            "config is no JSON",
            name,
            put("config.json", content),
            f"config.json cannot be read: .*{re.escape(message)}",
        )
        yield Case(
            "summary is no JSON",
            name,
            put("summary.json", content),
            f"summary.json cannot be read: .*{re.escape(message)}",
            (DOCTOR, RESUME),
        )
        broken = (
            each_checkpoint(put("record.json", content))
            if name != "large"
            else each_checkpoint(put("record.json", b" " * (17 * MIB)))
        )
        expected = message if name != "large" else "exceed the limit of 16,777,216"
        yield Case(
            "checkpoint's record is no JSON", name, broken, f"record.json cannot be read: .*{re.escape(expected)}"
        )


INTEGERS = ("num_envs", "num_steps", "total_timesteps", "update_epochs", "num_minibatches")
NUMBERS = ("learning_rate", "gamma", "gae_lambda", "clip_coef", "ent_coef", "vf_coef", "max_grad_norm")
SWITCHES = ("anneal_lr", "clip_vloss", "norm_adv", "normalize_observations", "normalize_rewards")
WRONG = {
    "an integer": ("8", 8.5, None, [8], True, {}),
    "a number": ("x", None, [0.1], True, "nan"),
    "true or false": ("no", 0, 1.0, None, []),
}


def _types() -> Iterator[Case]:
    for names, expected in ((INTEGERS, "an integer"), (NUMBERS, "a number"), (SWITCHES, "true or false")):
        for name in names:
            for value in WRONG[expected]:
                if (name, value) == ("normalize_observations", None):
                    continue  # Rollmill chooses by the environment
                message = f"config.json: graph.config.{name}={re.escape(json.dumps(value))} must be {expected}"
                change = edit("config.json", "graph", "config", name, to=value)
                yield Case("a hyperparameter of another type", f"{name}={value!r}", change, message)
    options = {"seed": "an integer", "num_seeds": "an integer", "devices": "an integer", "keep_last": "an integer",
               "checkpoint_seconds": "a number", "tensorboard": "true or false",
               "hang_seconds": "a number"}  # fmt: skip
    for name, expected in options.items():
        for value in WRONG[expected]:
            message = f"config.json: options.{name}={re.escape(json.dumps(value))} must be {expected}"
            yield Case(
                "an option of another type",
                f"{name}={value!r}",
                edit("config.json", "options", name, to=value),
                message,
            )


def _settings() -> Iterator[Case]:  # noqa: C901
    def config(
        name: str, change: Callable[[Path], None], message: str, commands: Any = None, code: int = 2
    ) -> Case:
        return Case("a configuration of another form", name, change, message, commands or (DOCTOR, *OPEN), code)

    for name in ("graph", "options", "imports"):
        yield config(f"no {name}", drop("config.json", name), f"config.json has no {name}")
    for name in ("algorithm", "environment", "config"):
        yield config(f"no graph.{name}", drop("config.json", "graph", name), f"graph.{name} is missing")
    for name, value, message in (
        ("empty graph", {}, "graph.algorithm is missing"),
        ("graph is text", "ppo", 'graph="ppo" must be an object'),
        ("graph is null", None, "graph=null must be an object"),
    ):
        yield config(name, edit("config.json", "graph", to=value), message)
    for field, value in (
        ("algorithm", 3),
        ("environment", None),
        ("environment", ["a"]),
        ("config", []),
        ("custom", "x"),
        ("fingerprint", 3),
    ):
        yield config(
            f"graph.{field}={value!r}",
            edit("config.json", "graph", field, to=value),
            f"graph.{field}={re.escape(json.dumps(value))} must be",
        )
    for value in ("module", [3], None, {}):
        yield config(
            f"imports={value!r}",
            edit("config.json", "imports", to=value),
            r"config.json: imports(\[0\])?=.* must be ",
        )
    unknown = edit("config.json", "graph", "config", "learning_rat", to=1.0)
    yield config(
        "unknown hyperparameter",
        unknown,
        r"graph.config.learning_rat is unknown. Did you mean learning_rate or ",
    )
    controls = edit("config.json", "graph", "config", "\x1b[2J\n", to=1.0)
    yield config("a name that clears terminals", controls, r'graph.config."\\u001b\[2J\\n" is unknown')
    yield config(
        "unknown option",
        edit("config.json", "options", "sed", to=1),
        r"options.sed is unknown. Did you mean seed or num_seeds\?",
    )
    yield config(
        "network is text",
        edit("config.json", "graph", "config", "network", to="mlp"),
        'graph.config.network="mlp" must be an object',
    )
    yield config(
        "torso",
        edit("config.json", "graph", "config", "network", "torso", to="transformer"),
        "graph.config.network.torso=.* must be ",
    )
    yield config(
        "sizes",
        edit("config.json", "graph", "config", "network", "hidden_sizes", to=[8, "8"]),
        r"hidden_sizes\[1\]=\"8\"",
    )
    for name, value in (("num_seeds", 2**31), ("devices", 10**9), ("unroll", 10**9), ("workers", 10**12)):
        yield config(
            f"{name}={value}", edit("config.json", "options", name, to=value), f"{name}={value} must be at most"
        )
    for value in (
        3,
        [],
        "x",
        {"device": 1},
        {"device": "d", "rollouts": "x"},
        {"device": "d", "rollouts": [2**40]},
    ):
        yield config(f"launches={value!r}", edit("config.json", "launches", to=value), "config.json: launches")
    for value in (3, [{}], [{"iteration": "x"}], {"a": 1}):
        yield config(f"changes={value!r}", edit("config.json", "changes", to=value), "config.json: changes")
    for value, message in (
        ([], r"config.json: plan=\[\] must be an object or null"),
        ({}, "config.json: plan: .*version is missing"),
        ({"version": 9, "distribution": "a", "place": "program", "groups": []}, "has version 9"),
        ({"version": 1, "distribution": "a", "place": "moon", "groups": []}, "unknown place 'moon'"),
        ({"version": 1, "distribution": "a", "place": "program", "groups": [{}]}, r"groups\[0\].name is missing"),
    ):
        yield config(
            f"plan={value!r}", edit("config.json", "plan", to=value), message, (RESUME,) if value != [] else None
        )
    for field, value in (("algorithm", "ppoo"), ("environment", "CartPole-v9"), ("environment", "evil:x")):
        yield config(
            f"{field}={value}",
            edit("config.json", "graph", field, to=value),
            "unknown (algorithm|environment)",
            OPEN,
        )


def _links() -> Iterator[Case]:
    for name in ("config.json", "summary.json", "metrics.jsonl"):
        commands = {"config.json": (DOCTOR, *OPEN), "summary.json": (DOCTOR, RESUME), "metrics.jsonl": (DOCTOR,)}[
            name
        ]
        yield Case("links", f"{name}", link(name), f"{name} is a link, and links inside a run", commands)
        yield Case("links", f"{name} is a pipe", pipe(name), f"{name} is a pipe, a socket or a device", commands)
        yield Case("links", f"{name} is a folder", folder_at(name), f"{name} is a folder", commands)
    yield Case("links", ".lock", link(".lock"), r"\.lock is a link", (RESUME,))
    yield Case("links", ".lock, hard", link(".lock", hard=True), r"\.lock has another hard link", (RESUME,))
    yield Case("links", ".lock is a pipe", pipe(".lock"), r"\.lock is a pipe", (RESUME,))
    yield Case("links", "checkpoints", link("checkpoints", folder=True), "checkpoints is a link", (DOCTOR, *OPEN))
    yield Case(
        "links",
        "checkpoints/9 is a link",
        link("checkpoints/9", folder=True),
        "checkpoints/9 is not a folder",
        (RESUME,),
    )
    for file in ("record.json", "state.safetensors"):
        change = each_checkpoint(
            lambda checkpoint, file=file: (
                (checkpoint / file).unlink()
                or (checkpoint / file).symlink_to(checkpoint.parents[2] / "outside" / "precious.txt")
            )
        )
        yield Case("links", f"checkpoints/*/{file}", change, f"{file} is a link")
    go_on = (("resume", "--quiet", "--set", "total_timesteps=192"),)
    for name in (".metrics.jsonl.tmp", ".summary.json.tmp", ".config.json.tmp", "checkpoints/.writing-3"):
        change = link(name, folder="writing" in name)
        yield Case("links that are replaced", name, change, "^$", go_on, 0)
    for name, folder in (("metrics.jsonl", False), ("tensorboard", True)):
        yield Case(
            "links that are refused before training", name, link(name, folder=folder), f"{name} is a link", go_on
        )


def _header(**entries: Any) -> bytes:
    return json.dumps(entries).encode()


def _checkpoint_cases() -> Iterator[Case]:  # noqa: C901
    eight = {"dtype": "F32", "shape": [2**31], "data_offsets": [0, 2**33]}
    forms = {
        "8 GiB announced in 1 MB": (
            _header(a=eight),
            MIB,
            "some arrays of the checkpoint are missing|gaps or overlaps|bytes of arrays",
        ),
        "8 GiB with a hole": (_header(a=eight), 2**33 + 100, "some arrays of the checkpoint are missing"),
        "header is a list": (b"[]", MIB, r"expected a JSON object, got \[\]"),
        "header is deep": (b'{"a":' * 1000 + b"1" + b"}" * 1000, MIB, "nested deeper"),
        "header is text": (b"hello", MIB, "JSON is malformed|no JSON"),
        "no arrays": (b"{}", MIB, "some arrays of the checkpoint are missing"),
    }
    for name, (content, size, message) in forms.items():
        yield Case("arrays that are none", name, arrays(content, size), message)
    for name, content in (
        ("empty", b""),
        ("three bytes", b"abc"),
        ("header of 2**60", struct.pack("<Q", 2**60)),
        ("header of 4 GiB", struct.pack("<Q", 2**32) + b"{}"),
    ):
        change = each_checkpoint(put("state.safetensors", content))
        yield Case("arrays that are none", name, change, "ends before its header|announces a header")
    for name in ("record.json", "state.safetensors"):
        yield Case(
            "checkpoints in parts",
            f"no {name}",
            each_checkpoint(lambda c, name=name: (c / name).unlink()),
            "FileNotFoundError|No such file",
        )
    cut = each_checkpoint(
        lambda c: os.truncate(c / "state.safetensors", (c / "state.safetensors").stat().st_size - 10)
    )
    yield Case("checkpoints in parts", "cut by ten bytes", cut, "bytes(,| of arrays,) expected")
    longer = each_checkpoint(
        lambda c: os.truncate(c / "state.safetensors", (c / "state.safetensors").stat().st_size + 10)
    )
    yield Case("checkpoints in parts", "longer by ten bytes", longer, "bytes(,| of arrays,) expected")

    def flip(checkpoint: Path) -> None:
        content = bytearray((checkpoint / "state.safetensors").read_bytes())
        content[-5] ^= 1
        (checkpoint / "state.safetensors").write_bytes(content)

    yield Case("checkpoints in parts", "one bit", each_checkpoint(flip), "not match (its|their) digest")
    for field, value in (
        ("iteration", "2"),
        ("iteration", None),
        ("leaves", []),
        ("leaves", {"a": 3}),
        ("score", "best"),
        ("metadata", 3),
        ("sha256", 3),
    ):
        change = each_checkpoint(edit("record.json", field, to=value))
        yield Case("a record of another form", f"{field}={value!r}", change, f"record.json: {field}.*=.*must be")
    resealed = each_checkpoint(edit("record.json", "score", to=17.0))
    yield Case(
        "a record of another form", "edited", resealed, "the record of the checkpoint does not match its digest"
    )
    for name in ("25", "999", "0"):

        def rename(run: Path, name: str = name) -> None:
            shutil.rmtree(run / "checkpoints" / "1")
            (run / "checkpoints" / "2").rename(run / "checkpoints" / name)

        yield Case("renamed checkpoints", name, rename, f"(checkpoint {name} in .*|it )contains iteration 2")

    def copy_over(run: Path) -> None:
        shutil.rmtree(run / "checkpoints" / "2")
        shutil.copytree(run / "checkpoints" / "1", run / "checkpoints" / "2")

    yield Case("renamed checkpoints", "1 over 2", copy_over, "contains iteration 1")


def _imports() -> Iterator[Case]:
    named = "names modules that would be imported: 'evil_module'"
    environment = edit("config.json", "graph", "environment", to="gymnasium:evil_module:Evil-v0")
    yield Case("code of others", "environment", environment, named, OPEN)
    dotted = edit("config.json", "graph", "environment", to="gymnasium:evil_module.inner:Evil-v0")
    yield Case(
        "code of others", "environment in a package", dotted, "would be imported: 'evil_module.inner'", OPEN
    )
    imports = edit("config.json", "imports", to=["evil_module"])
    yield Case("code of others", "imports", imports, named, OPEN)

    def policy(run: Path) -> None:
        edit("config.json", "plan", to=None)(run)
        edit("config.json", "options", "distribution", to="evil_module:policy")(run)

    yield Case("code of others", "distribution", policy, named, (RESUME,))
    system = edit("config.json", "options", "distribution", to="os:system")
    again = ("resume", "--quiet", "--actors", "2")
    yield Case("code of others", "distribution, with --actors", system, "would be imported: 'os'", (again,))


def _edited() -> Iterator[Case]:
    values = {"learning_rate": 0.5, "gamma": 0.5, "clip_coef": 0.5, "ent_coef": 0.5, "update_epochs": 3,
              "gae_lambda": 0.5, "total_timesteps": 1280, "vf_coef": 0.9, "num_envs": 16, "num_steps": 16,
              "num_minibatches": 2, "max_grad_norm": "inf", "normalize_rewards": True}  # fmt: skip
    for name, value in values.items():
        change = edit("config.json", "graph", "config", name, to=value)
        message = f"not the configuration of checkpoint [12]: config.{name} is {re.escape(json.dumps(value))} now"
        yield Case("edited configurations", name, change, message)
    for name, value in (("seed", 3), ("numerics", "float32")):
        message = f"not the configuration of checkpoint [12]: {name} is {re.escape(json.dumps(value))} now"
        yield Case("edited configurations", name, edit("config.json", "options", name, to=value), message)
    activation = edit("config.json", "graph", "config", "network", "activation", to="relu")
    yield Case(
        "edited configurations", "activation", activation, 'config.network.activation is "relu" now and was "tanh"'
    )


def _records() -> Iterator[Case]:
    wrong = [
        *(("status", "done"), ("status", None), ("iterations", "2"), ("seconds", None), ("seconds", "fast")),
        *(("steps_per_second", []), ("final_return", "x"), ("total_env_steps", 1.5), ("compile_seconds", {})),
    ]
    for field, value in wrong:
        message = f"summary.json: {field}={re.escape(json.dumps(value))} must be .*move it away"
        yield Case(
            "a summary of another form",
            f"{field}={value!r}",
            edit("summary.json", field, to=value),
            message,
            (DOCTOR, RESUME),
        )
    for field in ("status", "iterations", "seconds"):
        yield Case(
            "a summary of another form",
            f"no {field}",
            drop("summary.json", field),
            f"summary.json: {field} is missing",
            (DOCTOR, RESUME),
        )
    lines = {
        "text": (b'{"iteration": "1", "env_steps": 64}', 'line 1: iteration="1" must be an integer'),
        "null": (b'{"iteration": 1, "env_steps": null}', "line 1: env_steps=null"),
        "65 bits": (b'{"iteration": 99999999999999999999, "env_steps": 1}', "does not fit into 64 bits"),
        "deep": (b"[" * 10**5, "line 1 cannot be read: "),
        "list": (b"[1, 2]", r"expected a JSON object, got \[1, 2\]"),
        "nan": (b'{"iteration": 1, "env_steps": NaN}', "JSON is malformed"),
        "a line of 3 MiB": (b'{"a": "' + b"x" * 3 * MIB + b'"}', "line 1 exceeds the limit of 1,048,576 bytes"),
    }
    for name, (line, message) in lines.items():
        good = b'{"iteration": 2, "env_steps": 128}\n'
        yield Case("metrics of another form", name, put("metrics.jsonl", line + b"\n" + good), message, (DOCTOR,))
    no_run = "does not exist|is not the directory of a run"
    yield Case("no run", "no config.json", lambda run: (run / "config.json").unlink(), no_run)
    yield Case("no run", "no directory", lambda run: shutil.rmtree(run), no_run)


def _plans() -> Iterator[Case]:
    good = {"version": 1, "distribution": "d", "place": "processes",
            "groups": [{"name": "a", "fragments": ["environment", "policy", "gradients", "update"]}]}  # fmt: skip
    group = good["groups"][0]
    wrong: list[tuple[str, Any, str]] = [
        *(
            (f"{name}", content, "the plan .*cannot be read|the plan: .* must be an object")
            for name, (content, _) in DOCUMENTS.items()
        ),
        ("no groups", {**good, "groups": []}, "needs at least one group"),
        ("groups is text", {**good, "groups": "a"}, 'groups="a" must be a list'),
        ("version is text", {**good, "version": "1"}, 'version="1" must be an integer'),
        ("unknown field", {**good, "plaec": 1}, "plaec is unknown"),
        (
            "replicas",
            {**good, "groups": [{**group, "replicas": 1e3}]},
            "replicas=1000.0 must be an integer",
        ),
        ("no replicas", {**good, "groups": [{**group, "replicas": 0}]}, "replicas=0, which must be at least 1"),
        (
            "many replicas",
            {**good, "groups": [{**group, "replicas": 2**40}]},
            "do not divide num_shards=64 equally",
        ),
        ("a fragment twice", {**good, "groups": [group, group]}, "two groups have the name a"),
        (
            "unknown fragment",
            {**good, "groups": [{**group, "fragments": ["policy", "x"]}]},
            "unknown fragment 'x'",
        ),
        ("device", {**good, "groups": [{**group, "device": "tpu"}]}, "device=.* must be "),
    ]
    for name, value, message in wrong:
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        yield Case(
            "plans",
            name,
            put("../plan.json", content),
            message,
            (("plan", "ppo", "CartPole-v1", "--plan", "PLAN"),),
        )


# --- trying them ----------------------------------------------------------------------------------------


def healthy(root: Path) -> Path:
    """A finished run of two iterations."""
    network = rollmill.NetworkConfig(hidden_sizes=(8,))
    algorithm = rollmill.ppo(
        rollmill.make("CartPole-v1"), total_timesteps=128, num_envs=8, num_steps=8, network=network
    )
    run = rollmill.train(algorithm, run_dir=root / "healthy", quiet=True, checkpoint_iterations=1)
    shutil.rmtree(run.directory / "checkpoints" / "0", ignore_errors=True)
    return Path(run.directory)


def prepare(case: Case, source: Path, root: Path) -> Path:
    """A copy of the healthy run with the change, beside files of the user's own."""
    shutil.copytree(source, root / "run")
    (root / "outside" / "folder").mkdir(parents=True)
    for path in ("outside/precious.txt", "outside/folder/2", "outside/folder/.deleted-1"):
        (root / path).write_bytes(b"the only copy\n" * 50)
    case.change(root / "run")
    return root / "run"


def content(folder: Path) -> dict[str, bytes]:
    """Every file in a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def faults(case: Case, source: Path, root: Path) -> list[str]:
    """The faults found when the case's commands are called; empty where all is well."""
    run, found = prepare(case, source, root), []
    outside, folder = content(root / "outside"), set(os.listdir(root))
    for words in case.commands:
        found += [f"{words[0]}: {fault}" for fault in _call(case, words, run)]
    if content(root / "outside") != outside:
        found.append("files outside of the run were changed")
    if set(os.listdir(root)) != folder:
        found.append("files were made outside of the run")
    if "evil_module" in sys.modules:
        found.append("a module that the run names was imported")
    return found


def _call(case: Case, words: tuple[str, ...], run: Path) -> Iterator[str]:
    errors = io.StringIO()
    name, *options = words
    arguments = [name, *options] if "PLAN" in options else [name, str(run), *options]
    arguments = [str(run.parent / "plan.json") if word == "PLAN" else word for word in arguments]
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            code = command(arguments)
        except BaseException as error:  # what the command line would show as a traceback
            yield f"raised {type(error).__name__}: {error!s:.200}"
            return
    text = errors.getvalue()
    if code != case.code:
        yield f"exit code {code} instead of {case.code}: {text:.300}"
    if not re.search(case.message, text, re.DOTALL):
        yield f"the message is {text[:400]!r}"
    if "Traceback" in text or "\x1b" in text or len(text) > 3000:
        yield f"no sentence: {text[:300]!r}"


def main() -> int:
    """Tries all cases, and prints a table."""
    os.environ["ROLLMILL_STATE_DIR"] = tempfile.mkdtemp()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        source = healthy(root)
        fine = Case("healthy", "healthy", lambda run: None, "", code=0)
        (root / "fine").mkdir()
        assert not faults(fine, source, root / "fine"), faults(fine, source, root / "fine2")
        further = fine._replace(commands=(("resume", "--quiet", "--set", "total_timesteps=192"),))
        (root / "further").mkdir()
        assert not faults(further, source, root / "further")
        tried, wrong, most = Counter(), Counter(), (0, fine)
        for number, case in enumerate(cases()):
            place = root / str(number)
            place.mkdir()
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            found = faults(case, source, place)
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
            most = max(most, (grown, case), key=lambda pair: pair[0])
            tried[case.kind] += 1
            wrong[case.kind] += bool(found)
            for fault in found:
                print(f"{case.kind}: {case.name}: {fault}", flush=True)
            shutil.rmtree(place)
    width = max(map(len, tried))
    for kind, count in tried.items():
        print(f"{kind:<{width}}  {count:>4} cases  {count - wrong[kind]:>4} as they should")
    print(f"{'all':<{width}}  {tried.total():>4} cases  {tried.total() - wrong.total():>4} as they should")
    print(f"most memory that a case took above all before it: {most[0]} MiB ({most[1].kind}: {most[1].name})")
    return 1 if wrong.total() or most[0] > 100 else 0


if __name__ == "__main__":
    sys.exit(main())

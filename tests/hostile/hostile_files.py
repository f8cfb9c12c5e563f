"""Files of strangers: plans, profiles, caches, learning curves, options, and places of exports; all generated.

A small grammar makes them: something else in the place of a file, a damaged content, and a hostile value in each
field of a JSON document. Each case is tried in this process as the command does, or by the function that reads
the file where a command would train or measure. It ends with an exit code and a sentence: nothing outside is
written or deleted, no module that a file names is imported, nothing waits for ever, and no control character is
printed.
"""

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from hostile_trial import EVIL, MARKUP, Case

from rollmill.cli.main import _exit_code
from rollmill.policies.exporting import check_destinations, write_files

KINDS = ("link to a file", "link to a folder", "broken link", "link to itself", "endless device", "pipe", "folder")
CONTENTS = {
    "empty": b"",
    "cut": b'{"version": 1, "gr',
    "deep": b'{"a":' * 10_000,
    "deep list": b"[" * 10_000 + b"]" * 10_000,
    "NaN": b'{"version": NaN}',
    "a list": b"[1]",
    "null": b"null",
    "text": b'"evil_tool"',
    "zeros": b"\0" * 1000,
    "a huge number": b'{"version": ' + b"9" * 5000 + b"}",
    "a huge float": b'{"version": 1e999}',
    "no unicode": b"\xff\xfe{}",
    "surrogate": b'{"version": "\\ud800"}',
    "escapes": b'{"\\u001b]0;evil\\u0007": "\\u001b[31m"}',
    "raw escapes": b'{"a": "\x1b]0;evil\x07"}',
    "code": b"import evil_tool\n",
    "a pickle": b"cevil_tool\npolicy\n(tR.",
    "no object in it": b"{}",
    "endless": None,
}
"""Contents of a file; the last is a file of 8 GiB that takes no space on the disk."""
VALUES = {
    **{"null": "null", "true": "true", "zero": "0", "half": "0.5", "negative": "-1", "1e308": "1e308"},
    **{"64 bits": "9223372036854775807", "400 digits": "9" * 400, "NaN": "NaN", "text of infinity": '"inf"'},
    **{"text": '"x"', "no text": '""', "long text": f'"{"x" * 100_000}"', "surrogate": '"\\ud800"'},
    **{"escapes": '"\\u001b[31mx\\u0007\\r\\n"', "markup": f'"{MARKUP}</script>"', "module": f'"{EVIL}"'},
    **{"function": f'"{EVIL}:policy"', "environment": f'"gymnasium:{EVIL}:Id-v0"', "modules": f'["{EVIL}"]'},
    **{"up": '"../outside/thesis.txt"', "absolute": '"/etc/passwd"', "host": '"ray://evil_tool:1"'},
    **{"list": "[]", "object": "{}", "nested": "[" * 10_000 + "]" * 10_000, "escaping name": '{"\\u001b[31m": 1}'},
}
"""JSON of values that a field is given."""
HOLE = "the hole that a value is put in"


def cases() -> Iterator[Case]:
    """All cases."""
    yield from plans()
    yield from profiles()
    yield from caches()
    yield from curves()
    yield from option_files()
    yield from outputs()


# --- the grammar ------------------------------------------------------------------------------------------


def put(got: Path, outside: Path, *, file: str, kind: str) -> None:
    """Puts something else in the place of a file or a folder."""
    path = got / file
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        path.rename(path.with_name(f"{path.name}-before"))
    path.unlink(missing_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            (path / "inner").mkdir(parents=True)
        case _:
            targets = {"link to a file": outside / "thesis.txt", "link to a folder": outside / "folder"}
            targets |= {"broken link": outside / "new", "link to itself": path, "endless device": "/dev/zero"}
            path.symlink_to(targets[kind])


def fill(got: Path, outside: Path, *, file: str, content: bytes | None) -> None:
    """Gives a file another content."""
    (got / file).parent.mkdir(parents=True, exist_ok=True)
    (got / file).write_bytes(content or b"")
    if content is None:
        os.truncate(got / file, 2**33)


def edits(document: Any) -> Iterator[tuple[str, bytes]]:
    """A document with each value in each of its fields, without the field, and with an unknown one beside it.

    Of a list only the first element is changed.
    """
    for path in _paths(document, ()):
        text = json.dumps(_edited(document, path, HOLE))
        name = ".".join(map(str, path))
        for value, raw in VALUES.items():
            yield f"{value} in {name}", text.replace(json.dumps(HOLE), raw).encode()
        if path and isinstance(path[-1], str):
            beside = _edited(document, (*path[:-1], f"{path[-1]}x"), HOLE)
            yield f"beside {name}", json.dumps(beside).encode()
            yield f"without {name}", json.dumps(_without(document, path)).encode()


def _paths(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, part in parts:
        yield from _paths(part, (*path, key))


def _edited(document: Any, path: tuple[str | int, ...], value: Any) -> Any:
    if not path:
        return value
    changed = copy.copy(document)
    changed[path[0]] = _edited(changed[path[0]], path[1:], value) if len(path) > 1 else value
    return changed


def _without(document: Any, path: tuple[str | int, ...]) -> Any:
    if len(path) > 1:
        return _edited(document, path[:1], _without(document[path[0]], path[1:]))
    return {name: value for name, value in document.items() if name != path[0]}


def _in(kind: str, file: str, healthy: Callable[[Path], object], call: Callable[[Path], int | None]) -> Any:
    """Cases of a file that is something else, or has another content, in a folder that is fine otherwise."""
    make = lambda change: lambda got, outside: (healthy(got), change(got, outside))
    for what in KINDS:
        yield Case(kind, f"{what} at {file}", make(partial(put, file=file, kind=what)), call)
    for name, content in CONTENTS.items():
        yield Case(kind, f"{name} in {file}", make(partial(fill, file=file, content=content)), call)


def _edits_of(
    kind: str, file: str, healthy: Callable[[Path], object], call: Callable[[Path], int | None], document: Any
) -> Iterator[Case]:
    """Cases of a file with each value in each field."""
    for name, content in edits(document):
        make = lambda got, outside, content=content: (healthy(got), fill(got, outside, file=file, content=content))
        yield Case(kind, f"{file}: {name}", make, call)


def called(*words: str) -> Callable[[Path], int]:
    """Calls a command with words in which GOT stands for the folder."""
    return lambda got: _exit_code([word.replace("GOT", str(got)) for word in words])


# --- kinds of files ---------------------------------------------------------------------------------------

GROUP = {"name": "a", "fragments": ["environment", "policy", "gradients", "update"], "replicas": 1,
         "device": "any", "synchronous": True}  # fmt: skip
PLAN = {"version": 2, "distribution": "d", "place": "processes", "groups": [GROUP],
        "settings": {"devices": 1, "fusion": "off", "num_envs": 8}}  # fmt: skip


def _nothing(got: Path) -> None:
    """What a folder needs where the hostile file is all that is in it."""


def plans() -> Iterator[Case]:
    """Plans that `--plan` names."""
    call = called("plan", *PPO, "--plan", "GOT/plan.json", "--no-show")
    yield from _in("plans", "plan.json", _nothing, call)
    yield from _edits_of("plans", "plan.json", _nothing, call, PLAN)


def profiles() -> Iterator[Case]:
    """Profiles that are compared, as folders and as files."""
    from profiling.by_hand import profile

    document = json.loads(profile().to_json())
    healthy = lambda got: fill(got, got, file="b/profile.json", content=json.dumps(document).encode())
    for first in ("GOT/a", "GOT/a/profile.json"):
        call = called("profile", "compare", first, "GOT/b", "--output", "GOT/page.html")
        yield from _in("profiles", "a/profile.json", healthy, call)
    for process in document["processes"]:
        process["timeline"] = process["timeline"][:1]
    yield from _edits_of("profiles", "a/profile.json", healthy, call, document)


def caches() -> Iterator[Case]:
    """Files of the cache, which are read, and then written where nothing could be read."""
    from hostile_caches import CACHES

    for name, (file, document, use) in CACHES.items():
        call = partial(_with_cache, use=use, file=file)
        yield from _in(f"caches: {name}", f"cache/{file}", _nothing, call)
        yield from _edits_of(f"caches: {name}", f"cache/{file}", _nothing, call, document)
        places = product((f"cache/{Path(file).parent}", "cache"), KINDS)
        # The cache's own folder may be a link: the user named it.
        for place, what in (pair for pair in places if pair != ("cache", "link to a folder")):
            yield Case(f"caches: {name}", f"{what} at {place}", partial(put, file=place, kind=what), call)


def _with_cache(got: Path, *, use: Callable[[Path], object], file: str) -> None:
    os.environ["ROLLMILL_CACHE_DIR"] = str(got / "cache")
    use(got / "cache" / file)


CONFIG = {
    "version": 1,
    "graph": {"algorithm": "ppo", "environment": "CartPole-v1", "environment_options": {"max_steps": 20},
              "config": {"learning_rate": 0.001, "num_envs": 8, "network": {"hidden_sizes": [8]}}},
    "options": {"seed": 0, "num_seeds": 1, "distribution": "gpu-only"},
    "imports": [],
}  # fmt: skip
LINE = {"iteration": 1, "env_steps": 100, "seconds": 0.5, "episode/return": 1.0, "note": "x"}


def _run(got: Path) -> None:
    """A run whose curve can be drawn."""
    fill(got, got, file="run/config.json", content=json.dumps(CONFIG).encode())
    fill(got, got, file="run/metrics.jsonl", content=(json.dumps(LINE) + "\n").encode())


def curves() -> Iterator[Case]:
    """Runs whose learning curves are drawn."""
    call = called("plot", "GOT/run", "--output", "GOT/page.html")
    for file in ("config.json", "metrics.jsonl", "summary.json", "versions.json", "sweep.json"):
        yield from _in("curves", f"run/{file}", _run, call)
    yield from _edits_of("curves", "run/config.json", _run, call, CONFIG)
    yield from _edits_of("curves", "run/metrics.jsonl", _run, call, LINE)
    for what in KINDS:
        change = partial(put, file="run", kind=what)
        yield Case("curves", f"{what} at run", lambda got, out, change=change: (_run(got), change(got, out)), call)


PPO = ("ppo", "CartPole-v1")
COMPARE = ("profile", "compare", "GOT/b", "GOT/b")
CHECKPOINT = ("record.json", "state.safetensors")

OPTIONS = (
    *("seed", "num-envs", "learning-rate", "network.hidden-sizes", "network", "env-option", "transform", "recipe"),
    *("plan", "run-dir", "cluster", "place", "devices", "config", "quiet", "algorithm", "x", '"\\u001b[31m"'),
)
"""Options of a TOML file, which may name no module here: those of a file that the user wrote are imported."""


def option_files() -> Iterator[Case]:
    """Files that `--config` names: TOML, and the config.json of a run."""
    for file in ("options.toml", "config.json"):
        call = called("plan", *PPO, "--config", f"GOT/{file}", "--no-show")
        yield from _in("options", file, _nothing, call)
    call = called("plan", "--config", "GOT/config.json", "--no-show")
    yield from _edits_of("options", "config.json", _nothing, call, CONFIG)
    call = called("plan", *PPO, "--config", "GOT/options.toml", "--no-show")
    toml = {name: raw for name, raw in VALUES.items() if name not in ("null", "surrogate", "NaN", "object")}
    for option, (name, raw) in product(
        OPTIONS, {**toml, "nan": "nan", "table": "{a = 1}", "time": "07:32:00"}.items()
    ):
        make = partial(fill, file="options.toml", content=f"{option} = {raw}\n".encode())
        yield Case("options", f"{name} in {option}", make, call)


OUTPUTS = {
    "plot": ("page.html", called("plot", "GOT/run", "--output", "GOT/page.html")),
    "compare": ("page.html", called(*COMPARE, "--output", "GOT/page.html")),
    "plan": ("plan.json", called("plan", *PPO, "--no-show", "--output", "GOT/plan.json")),
    "export": ("policy.onnx", lambda got: _exported(got, force=False)),
    "plot, replaced": ("page.html", called("plot", "GOT/run", "--output", "GOT/page.html", "--force")),
    "compare, replaced": ("page.html", called(*COMPARE, "--output", "GOT/page.html", "--force")),
    "plan, replaced": ("plan.json", called("plan", *PPO, "--no-show", "--output", "GOT/plan.json", "--force")),
    "export, replaced": ("policy.onnx", lambda got: _exported(got, force=True)),
}


def outputs() -> Iterator[Case]:
    """Places of exports and of other files that commands write."""
    from profiling.by_hand import profile

    document = profile().to_json().encode()
    for (name, (file, call)), what in product(OUTPUTS.items(), KINDS):

        def make(got: Path, outside: Path, file: str = file, what: str = what) -> None:
            _run(got)
            fill(got, outside, file="b/profile.json", content=document)
            put(got, outside, file=file, kind=what)

        yield Case("outputs", f"{what} at {file}: {name}", make, call)


def _exported(got: Path, *, force: bool) -> None:
    paths = [got / "policy.onnx", got / "policy.json"]
    check_destinations(paths, force=force)
    write_files(dict.fromkeys(paths, b"the policy"))


def exports(run: Path) -> Iterator[Case]:
    """Exports of a trained run that was damaged, and those to hostile places."""
    copied = lambda got: shutil.copytree(run, got / "run")
    call = called("export", "GOT/run", "--format", "stablehlo", "--output", "GOT/policy.stablehlo")
    checkpoint = next((run / "checkpoints").iterdir()).name
    for file in ("config.json", *(f"checkpoints/{checkpoint}/{name}" for name in CHECKPOINT)):
        yield from _in("exports", f"run/{file}", copied, call)
    for file, what in product(("policy.stablehlo", "run/checkpoints", f"run/checkpoints/{checkpoint}"), KINDS):
        change = partial(put, file=file, kind=what)
        make = lambda got, out, change=change: (copied(got), change(got, out))
        yield Case("exports", f"{what} at {file}", make, call)

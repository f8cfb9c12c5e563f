"""Generated sweeps of strangers: every name a link, a pipe or a folder, every file damaged, code named everywhere.

Each is gone on with as the command does, up to the processes of its trials. It ends with a sentence and exit code
2, or harms nothing.
"""

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from test_foreign_sweeps import foreign

from rollmill.cli import sweep as sweep_command
from rollmill.cli.main import _exit_code as command
from rollmill.core.errors import RollmillError
from rollmill.training.request import with_types

NAMES = (
    *("sweep.json", "proposals.json", "early_stopping.json", "failures.json", "table.csv", "report.html"),
    *(".table.csv.tmp", ".failures.json.tmp", "trials", "trials/0", "trials/0.log", "trials/0/checkpoints"),
    *("trials/0/summary.json", "trials/0/metrics.jsonl", "trials/0/config.json"),
)
KINDS = ("link to a file", "link to a folder", "broken link", "pipe", "folder")
DOCUMENTS = {
    "empty": b"",
    "deep": b'{"a":' * 10_000,
    "nan": b'{"points": NaN}',
    "a list": b"[1]",
    "zeros": b"\0" * 100,
    "a huge number": b'{"num_trials": ' + b"9" * 5000 + b"}",
    "no unicode": b"\xff\xfe",
    "escapes": b'{"request": {"algorithm": "\\u001b]0;evil\\u0007"}}',
    "wrong types": b'{"request": {"algorithm": 1, "environment": [], "settings": "x"}, "axes": {}, "points": 1}',
    "negative": b'{"request":{"algorithm":"ppo","environment":"x"},"axes":[],"num_trials":-5}',
    "an earlier version": b'{"algorithm":"ppo","environment":"x","options":["--import","evil_tool"],"axes":[]}',
}
MODULES = ("evil_tool", "evil_tool.inner", "os", "\x1b[31mevil", "../evil", "/etc/passwd", "evil tool")
NAMED_IN_REQUEST = {
    "imports": lambda module: {"imports": [module]},
    "imports after another": lambda module: {"imports": ["json", module]},
    "gymnasium": lambda module: {"environment": f"gymnasium:{module}:Id-v0"},
    "pettingzoo": lambda module: {"environment": f"pettingzoo:{module}:env"},
    "brax": lambda module: {"environment": f"brax:{module}:env"},
    "policy": lambda module: {"settings": {"distribution": f"{module}:policy"}},
    "cluster": lambda module: {"settings": {"cluster": f"{module}:6379"}},
    "client server": lambda module: {"settings": {"cluster": f"ray://{module}:1"}},
}
"""Places of a request that name code: a sweep with them is refused before anything starts."""
NAMED_IN_AXIS = {
    "gymnasium": lambda module: ("environment", f"gymnasium:{module}:Id-v0"),
    "pettingzoo": lambda module: ("environment", f"pettingzoo:{module}:env"),
    "policy": lambda module: ("distribution", f"{module}:policy"),
    "cluster": lambda module: ("cluster", f"{module}:6379"),
}
SETTINGS_OF_STRANGERS = (
    *("import", "imports", "config", "--import", "import=evil_tool", "recipe", "network.name", "run_dir"),
    *("start_from", "plan", "host", "resume_if_exists", "environment_options", "evaluate_env_options", "seed"),
)
"""Settings that name no code, some of which no training has: a trial ends with a sentence, or trains."""


def put(root, name, kind, outside):
    """Something else in the place of a file or folder of the sweep."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        path.rename(root / f"{path.name}-before")
    path.unlink(missing_ok=True)
    match kind:
        case "link to a file":
            path.symlink_to(outside / "thesis.txt")
        case "link to a folder":
            path.symlink_to(outside)
        case "broken link":
            path.symlink_to(outside / "new.txt")
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()


def _with_axis(option, value, root, outside):
    """A sweep of one trial with a value of an option."""
    return foreign(root, axes=[[option, [value], 0.0, 0.0, False]], points=[[value]])


def _with_request(request, root, outside):
    return foreign(root, request=request)


class Case(NamedTuple):
    """A sweep of a stranger."""

    name: str
    make: Callable[[Path, Path], object]
    """Makes it, from its folder and a folder outside of it."""
    names_code: bool = False


def cases():
    """All sweeps."""
    for name, kind in itertools.product(NAMES, KINDS):
        yield Case(f"{kind} at {name}", lambda root, out, n=name, k=kind: put(foreign(root), n, k, out))
    for (name, content), file in itertools.product(DOCUMENTS.items(), [*NAMES[:4], "trials/0/summary.json"]):
        yield Case(f"{name} in {file}", lambda root, out, c=content, f=file: damage(foreign(root), f, c))
    for (name, request), module in itertools.product(NAMED_IN_REQUEST.items(), MODULES):
        make = partial(_with_request, request(module))
        yield Case(f"{module!r} in {name}", make, names_code=True)
    for (name, axis), module in itertools.product(NAMED_IN_AXIS.items(), MODULES):
        make = partial(_with_axis, *axis(module))
        yield Case(f"{module!r} in an axis, {name}", make, names_code=True)
    for name, module in itertools.product(SETTINGS_OF_STRANGERS, MODULES):
        yield Case(f"{name}={module!r}", partial(_with_request, {"settings": {name: module}}))
        yield Case(f"{name}={module!r} in an axis", partial(_with_axis, name, module))


def damage(root, file, content):
    """A file with another content."""
    (root / file).parent.mkdir(exist_ok=True)
    (root / file).write_bytes(content)


def touch_everything(sweep, *, metric, imports, **_):
    """All that a sweep does with its files, without starting processes."""
    for trial in sweep.trials():
        os.close(sweep.open_log(trial))
        json.dumps(trial.request.to_json())
        sweep.order(trial)
        with contextlib.suppress(RollmillError):
            with_types(trial.request)
        sweep.note_failure(trial, failed=True)
    sweep.write_table(sweep.rows(metric))
    return 0


def test_no_hostile_sweep_leaves_its_folder_or_has_code_imported(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sweep_command, "run_sweep", touch_everything)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "evil_tool.py").write_text("")
    codes, wrong = [], []
    for number, case in enumerate(cases()):
        outside = tmp_path / f"outside{number}"
        outside.mkdir()
        (outside / "thesis.txt").write_text("precious")
        case.make(tmp_path / f"got{number}", outside)
        try:
            codes.append(command(["sweep", "--resume", str(tmp_path / f"got{number}")]))
        except Exception as error:  # a traceback for the user
            wrong.append(f"{case.name}: {type(error).__name__}: {error}")
        printed = capsys.readouterr()
        if [entry.name for entry in outside.iterdir()] != ["thesis.txt"]:
            wrong.append(f"{case.name}: wrote outside")
        elif (outside / "thesis.txt").read_text() != "precious":
            wrong.append(f"{case.name}: changed a file outside")
        if "\x1b" in printed.err + printed.out or "Traceback" in printed.err:
            wrong.append(f"{case.name}: printed {printed.err!r:.80}")
        if case.names_code and codes[-1] != 2:
            wrong.append(f"{case.name}: was not refused")
    assert wrong == []
    assert "evil_tool" not in sys.modules
    assert len(codes) > 400 and set(codes) <= {0, 1, 2}

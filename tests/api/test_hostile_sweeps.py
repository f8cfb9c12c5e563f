"""Generated sweeps of strangers: every name a link, a pipe or a folder, every file damaged, code named everywhere.

Each is gone on with as the command does, up to the processes of its trials. It ends with a sentence and exit code
2, or harms nothing.
"""

import itertools
import os
import sys

from test_foreign_sweeps import OPTIONS, foreign

from rollmill.cli import sweep as sweep_command
from rollmill.cli.main import _exit_code as command
from rollmill.core.errors import RollmillError

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
    "escapes": b'{"algorithm": "\\u001b]0;evil\\u0007"}',
    "wrong types": b'{"algorithm": 1, "environment": [], "options": "x", "axes": {}, "num_trials": "1"}',
    "negative": b'{"algorithm":"ppo","environment":"x","options":[],"axes":[],"num_trials":-5}',
}
SPELLINGS = ("--import {}", "--import={}", "-- --import {}", "--seed 1 --import {}", "--import a --import {}")
POLICIES = ("--distribution {}:f", "--distribution={}:f", "--cluster {}:1", "--cluster=ray://{}:1", "--config {}")
PLACES = ("options", "algorithm", "axis", "axis and value")
MODULES = ("evil_tool", "evil_tool.inner", "os", "\x1b[31mevil", "../evil", "/etc/passwd", "evil tool")


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


def named(place, words):
    """Changes of a sweep that names code in one place."""
    match place:
        case "options":
            return {"options": [*words, *OPTIONS]}
        case "algorithm":
            return {"algorithm": words[0], "options": words[1:]}
    option, *values = [word.removeprefix("--") for word in words if word != "--"]
    if place == "axis" or not values:
        return {"axes": [[option, ["x"], 0.0, 0.0, False]], "points": [["x"]], "options": words}
    return {"axes": [[option, values[-1:], 0.0, 0.0, False]], "points": [values[-1:]]}


def cases():
    """All sweeps: a name, and a function that makes one."""
    for name, kind in itertools.product(NAMES, KINDS):
        yield f"{kind} at {name}", lambda root, out, n=name, k=kind: put(foreign(root), n, k, out)
    for (name, content), file in itertools.product(DOCUMENTS.items(), [*NAMES[:4], "trials/0/summary.json"]):
        yield f"{name} in {file}", lambda root, out, c=content, f=file: damage(foreign(root), f, c)
    forms = itertools.product(SPELLINGS + POLICIES, PLACES, MODULES)
    for form, place, module in forms:
        words = [word.replace("{}", module) for word in form.split(" ")]
        yield f"{words} as {place}", lambda root, out, p=place, w=words: foreign(root, **named(p, w))


def damage(root, file, content):
    """A file with another content."""
    (root / file).parent.mkdir(exist_ok=True)
    (root / file).write_bytes(content)


def touch_everything(sweep, *, metric, imports, **_):
    """All that a sweep does with its files, without starting processes."""
    for trial in sweep.trials():
        os.close(sweep.open_log(trial))
        sweep.command(trial)
        sweep.note_failure(trial, failed=True)
    sweep.write_table(sweep.rows(metric))
    return 0


def test_no_hostile_sweep_leaves_its_folder_or_has_code_imported(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sweep_command, "run_sweep", touch_everything)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "evil_tool.py").write_text("")
    codes, wrong = [], []
    for number, (name, make) in enumerate(cases()):
        outside = tmp_path / f"outside{number}"
        outside.mkdir()
        (outside / "thesis.txt").write_text("precious")
        make(tmp_path / f"got{number}", outside)
        try:
            codes.append(command(["sweep", "--resume", str(tmp_path / f"got{number}")]))
        except (Exception, RollmillError) as error:  # a traceback for the user
            wrong.append(f"{name}: {type(error).__name__}: {error}")
        printed = capsys.readouterr()
        if [entry.name for entry in outside.iterdir()] != ["thesis.txt"]:
            wrong.append(f"{name}: wrote outside")
        elif (outside / "thesis.txt").read_text() != "precious":
            wrong.append(f"{name}: changed a file outside")
        if "\x1b" in printed.err or "Traceback" in printed.err:
            wrong.append(f"{name}: printed {printed.err!r:.80}")
    assert wrong == []
    assert "evil_tool" not in sys.modules
    assert len(codes) > 400 and set(codes) <= {0, 1, 2} and codes.count(2) > 300

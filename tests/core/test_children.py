"""Child processes and git run nothing that lies in the working directory."""

import json
import os
import subprocess
import sys

import pytest

from rollmill.core.child_processes import python_environment, run_program, start_python
from rollmill.core.git import commit_of

ASK = "import json, os, sys; print(json.dumps([sys.path, dict(os.environ), sys.flags.safe_path]))"


def child(*words, **options):
    process = start_python(*words, stdout=subprocess.PIPE, **options)
    printed, _ = process.communicate(timeout=60)
    return json.loads(printed)


def test_the_working_directory_is_not_searched_for_modules(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("open('ran', 'w')")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    path, _, safe = child("-c", ASK)
    assert not (tmp_path / "ran").exists()
    assert safe and str(tmp_path) not in path and "" not in path


def test_folders_that_this_process_searches_come_first_and_those_of_the_user_stay(tmp_path, monkeypatch):
    of_user, of_script = str(tmp_path / "lib"), str(tmp_path / "scripts")
    monkeypatch.setenv("PYTHONPATH", of_user)
    monkeypatch.setattr(sys, "path", [of_script, of_user, *sys.path])
    given = python_environment()["PYTHONPATH"].split(os.pathsep)
    assert given[0] == of_script and given[-1] == of_user
    assert child("-c", ASK)[0][0] == of_script


def test_no_file_runs_before_a_child_and_no_prompt_after_it(monkeypatch, tmp_path):
    for name in ("PYTHONSTARTUP", "PYTHONINSPECT", "PYTHONBREAKPOINT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OWN", "kept")
    variables = child("-c", ASK)[1]
    assert not {"PYTHONSTARTUP", "PYTHONINSPECT", "PYTHONBREAKPOINT"} & variables.keys()
    assert variables["OWN"] == "kept"


def test_an_isolated_child_has_the_standard_library_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    path = child("-c", ASK, isolated=True)[0]
    assert str(tmp_path) not in path and not any("site-packages" in entry for entry in path)


def test_children_have_no_input_of_this_process():
    assert run_program("cat", capture_output=True).stdout == b""
    assert run_program("cat", input=b"given", capture_output=True).stdout == b"given"


def git(*words):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *identity, *words], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository as the working directory, with one file; what it runs leaves a file `ran` beside it."""
    folder = tmp_path / "repository"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    git("init", "-q")
    (folder / "file").write_text("1")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\ncat\n")
    program.chmod(0o755)
    return folder


def set_monitor(folder, program):
    git("config", "core.fsmonitor", program)


def set_filter(folder, program):
    git("config", "filter.evil.clean", program)
    (folder / ".gitattributes").write_text("* filter=evil\n")


def set_required_process(folder, program):
    git("config", "filter.evil.process", program)
    git("config", "filter.evil.required", "true")
    (folder / ".gitattributes").write_text("* filter=evil\n")


def set_included_filter(folder, program):
    (folder.parent / "more").write_text(f'[filter "evil"]\nclean = {program}\n')
    git("config", "include.path", str(folder.parent / "more"))
    (folder / ".gitattributes").write_text("* filter=evil\n")


def set_hook(folder, program):
    hook = folder / ".git" / "hooks" / "post-index-change"
    hook.parent.mkdir(exist_ok=True)
    hook.write_bytes((folder.parent / "program").read_bytes())
    hook.chmod(0o755)


def set_hook_elsewhere(folder, program):
    set_hook(folder, program)
    git("config", "core.hooksPath", str(folder / ".git" / "hooks"))


def set_differ(folder, program):
    git("config", "diff.external", program)
    git("config", "diff.evil.textconv", program)
    (folder / ".gitattributes").write_text("* diff=evil\n")


@pytest.mark.parametrize(
    "name",
    [
        set_monitor,
        set_filter,
        set_required_process,
        set_included_filter,
        set_hook,
        set_hook_elsewhere,
        set_differ,
    ],
)
def test_a_repository_names_programs_and_git_runs_none(repository, name):
    commit = commit_of()
    name(repository, str(repository.parent / "program"))
    (repository / "file").write_text("2")  # of the same length: git has to look into it
    assert commit_of() == f"{commit}-dirty"
    assert not (repository.parent / "ran").exists()

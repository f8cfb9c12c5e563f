"""Files, child processes and modules that are named from outside go through one door each.

What does not is listed with its reason.
"""

import ast
import functools
from pathlib import Path

import pytest

import rollmill

SOURCE = Path(rollmill.__file__).parent

OF_PATHS = {
    *("read_text", "write_text", "read_bytes", "write_bytes", "unlink", "rmdir", "mkdir", "touch"),
    *("symlink_to", "hardlink_to"),
}
"""Methods of a path that follow links on their way."""

OF_OS = {
    *(
        "open",
        "unlink",
        "remove",
        "rename",
        "replace",
        "mkdir",
        "makedirs",
        "rmdir",
        "removedirs",
        "symlink",
        "link",
    ),
    *("truncate", "chmod", "chown"),
}
OF_SHUTIL = {"rmtree", "move", "copy", "copy2", "copyfile", "copytree"}
OF_NUMPY = {"save", "savez", "load", "fromfile", "memmap", "loadtxt", "savetxt"}
STARTING = {"system", "popen", "fork", "forkpty", "execv", "execve", "execvp", "execvpe", "posix_spawn", "spawnv"}
OF_SUBPROCESS = {"Popen", "run", "call", "check_call", "check_output", "getoutput"}

FILES = {
    "core/folder.py": "the door",
    "core/temporary.py": "new folders, below the door's",
    "core/local_paths.py": "tries, by a new file without a name, whether the user's folder can be written",
    "core/machine.py": "facts of the system, in /proc and of installed packages",
    "profiling/processor_time.py": "facts of the system, in /proc and of its group of processes",
    "core/imports.py": "compares two files of a user's module",
    "core/code_identity.py": "the source of modules that are imported already",
    "gpus/claims.py": "a folder that is checked to be this user's alone",
    "gpus/memory.py": "facts of the system, in /proc",
    "cli/output.py": "the null device",
    "cli/candidate_process.py": "descriptors of its parent",
    "cli/profile.py": "tries whether a folder that the user names can be written",
    "cli/serve.py": "ends a file and a socket that the user names; a file without a name",
    "serving/address.py": "a file and a socket that the user names",
    "record/transitions.py": "a file that the user names, made in a new folder beside it",
    "pictures/files.py": "a file or a folder that the user names, made in a new folder beside it",
    "pages/page.py": "files of the package",
    "plan_search/orders.py": "a temporary file without a name",
    "programs/program_store.py": "the package's own sources, and facts of the system, in /proc",
    "runs/digest_cache.py": "the package's own sources, and lists of the files of installed packages",
    "runs/trust.py": "the user's own folder for state",
    "plan_search/process.py": "output of its own child, in a temporary folder",
    "plan_search/step_waits.py": "facts of the system, in /proc",
    "fusion/explanation.py": "a new temporary file",
    "channels/shm/memory.py": "a temporary file without a name",
    "channels/transport/addresses.py": "its own socket, in a new temporary folder",
    "processes/cluster/joining.py": "Ray's own file, which says where its cluster is",
    "processes/cluster/output_forwarding.py": "a descriptor of its own",
    "gpus/mps.py": "a folder that is checked to be this user's alone",
    "gpus/mps_owner.py": "the same folder; it imports nothing of ours",
    "processes/fork_server.py": "a file without a name",
    "training/video_log.py": "a picture in a new folder",
    "processes/logs.py": "the end of a log, of which one line is shown",
    "processes/main.py": "the null device",
    "core/process_tree.py": "facts of the system, in /proc",
    "processes/threads.py": "a pulse, which is no file",
    "processes/worker.py": "a pulse, which is no file",
    "workers/replica/memory_watch.py": "facts of the system, in /proc",
    "processes/stacks.py": "a temporary file without a name",
    "programs/peer_memory.py": "facts of the system, in /proc",
    "record/run_directory.py": "new folders beside a run that is created",
    "cli/board.py": "a page in a new temporary folder",
    "hooks/csv_log.py": "a descriptor of the door's",
}

PROCESSES = {
    "core/child_processes.py": "the door",
    "processes/fork_server.py": "forks, and becomes what the door says",
    "processes/forks.py": "forks what the door would start, with the same variables",
    "gpus/mps_owner.py": "starts a program of the system, and imports nothing of ours",
}

IMPORTS = {
    "core/imports.py": "the door",
    "core/registry.py": "modules that installed packages offer",
    "core/lazy_names.py": "the package's own modules",
    "cli/main.py": "the package's own modules",
    "cli/help_search.py": "the package's own modules",
    "cli/completion.py": "the package's own modules",
    "envs/registry.py": "the package's own modules",
    "envs/adapters/__init__.py": "packages that adapters name",
    "envs/adapters/pettingzoo.py": "modules that PettingZoo's own registry names",
    "hooks/trackers.py": "a package that the hook names",
    "pictures/files.py": "a package that the module names",
    "policies/exporting/onnx.py": "a package that the module names",
    "processes/fork_server.py": "modules that the coordinator names, a parent that is trusted",
    "processes/forks.py": "modules that the command names",
    "processes/jobs.py": "a function that the coordinator names, which has proved to know the token",
    "workers/run_spec.py": "a function that the coordinator names, which has proved to know the token",
    "fusion/backends/triton/compile_file.py": "a kernel's source, which this user's process has just written",
}


@functools.cache
def calls(file):
    """All calls in a file."""
    return [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]


def owner_of(call):
    """The names before the dot and after it: `os.open` as (`os`, `open`); a bare name as ("", name)."""
    match call.func:
        case ast.Name(name):
            return "", name
        case ast.Attribute(ast.Name(owner), name):
            return owner, name
        case ast.Attribute(_, name):
            return "?", name
    return "?", ""


def has_mode(call):
    """True for `path.open("rb")`, which no other method of that name takes."""
    texts = [part.value for part in call.args[:1] if isinstance(part, ast.Constant)]
    return any(isinstance(text, str) and set(text) <= set("rwabxt+") for text in texts)


def opens_a_file(call):
    owner, name = owner_of(call)
    return (
        (owner, name) == ("", "open")
        or (owner == "os" and name in OF_OS)
        or (owner == "shutil" and name in OF_SHUTIL)
        or (owner in ("np", "numpy") and name in OF_NUMPY)
        or owner == "tempfile"
        or (owner not in ("os", "") and name in OF_PATHS)
        or (owner not in ("os", "") and name == "open" and has_mode(call))
    )


def starts_a_process(call):
    owner, name = owner_of(call)
    return (owner == "subprocess" and name in OF_SUBPROCESS) or (owner == "os" and name in STARTING)


def imports_by_name(call):
    owner, name = owner_of(call)
    known = name in ("import_module", "__import__", "exec", "eval", "run_module", "run_path", "exec_module")
    constant = bool(call.args) and isinstance(call.args[0], ast.Constant)
    return known and owner in ("", "importlib", "runpy", "?") and not constant


@pytest.mark.parametrize(
    ("kind", "allowed"),
    [(opens_a_file, FILES), (starts_a_process, PROCESSES), (imports_by_name, IMPORTS)],
    ids=["files", "processes", "imports"],
)
def test_what_does_not_use_a_door_is_listed(kind, allowed):
    found = {}
    for file in sorted(SOURCE.rglob("*.py")):
        name = str(file.relative_to(SOURCE))
        if lines := [f"line {call.lineno}: {ast.unparse(call)[:60]}" for call in calls(file) if kind(call)]:
            found[name] = lines
    assert {name: lines for name, lines in found.items() if name not in allowed} == {}
    assert set(allowed) - set(found) == set(), "listed without need"


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (opens_a_file, "open(path)"),
        (opens_a_file, "folder.path.open('ab')"),
        (opens_a_file, "Path(a).write_text(b)"),
        (opens_a_file, "(a / b).unlink(missing_ok=True)"),
        (opens_a_file, "shutil.rmtree(run.root)"),
        (opens_a_file, "os.replace(a, b)"),
        (opens_a_file, "np.load(file)"),
        (starts_a_process, "subprocess.Popen([sys.executable])"),
        (starts_a_process, "os.execve(a, b, c)"),
        (imports_by_name, "importlib.import_module(name)"),
        (imports_by_name, "__import__(name)"),
        (imports_by_name, "eval(text)"),
    ],
)
def test_a_call_that_uses_no_door_is_noticed(kind, source):
    assert kind(ast.parse(source).body[0].value)


@pytest.mark.parametrize(
    "source", ["RunDirectory.open(root)", "importlib.import_module('ray')", "name.replace('a', 'b')"]
)
def test_other_calls_of_such_names_are_not(source):
    call = ast.parse(source).body[0].value
    assert not any(kind(call) for kind in (opens_a_file, starts_a_process, imports_by_name))

"""Workers prove that they run the driver's code, or are refused; modules of the user travel to them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import worker_jobs
from worker_jobs import all_events, job

from rollmill.core import code_identity
from rollmill.core.code_identity import CodeIdentity, code_from_json, digest_of, digests_of, own_code
from rollmill.core.errors import UnfitHost
from rollmill.processes import handshake as handshake_module
from rollmill.processes.clocks import Clock
from rollmill.processes.cluster.launcher import failed_start
from rollmill.processes.cluster.modules import missing_here, modules_to_send, unpack
from rollmill.processes.events import Lost
from rollmill.processes.local_launcher import LocalLauncher
from rollmill.processes.supervisor import Supervisor
from rollmill.record.run_directory import RunDirectory
from rollmill.workers.loaded_code import LoadedCode
from rollmill.workers.protocol import Loaded
from rollmill.workers.run_spec import GraphRecipe
from wordings import raises

VERSIONS = {"python": "3.11.7", "jax": "0.10.2", "triton": None}


def code(source="a" * 64, **versions):
    return CodeIdentity(source, VERSIONS | versions)


def test_a_digest_is_of_names_and_contents_of_source_files(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "inner" / "b.py").write_text("y = 2\n")
    before = digest_of(tmp_path)
    (tmp_path / "a.txt").write_text("no source")
    assert digest_of(tmp_path) == before
    (tmp_path / "inner" / "b.py").rename(tmp_path / "inner" / "c.py")
    renamed = digest_of(tmp_path)
    (tmp_path / "a.py").write_text("x = 2\n")
    assert len({before, renamed, digest_of(tmp_path)}) == 3


def test_differences_are_told_with_both_values():
    assert code().differences(code()) == []
    assert code().differences(code(python="3.11.9", triton="3.9.0")) == []  # no numbers follow from them
    assert code().differences(code("b" * 64, python="3.12.1", jax="0.11.0")) == [
        "python 3.11.7 here, 3.12.1 there",
        "jax 0.10.2 here, 0.11.0 there",
        f"source of rollmill {'a' * 16} here, {'b' * 16} there",
    ]


def test_an_identity_survives_its_json():
    assert code_from_json(json.loads(json.dumps(own_code()._asdict()))) == own_code()
    assert code_from_json(None) is None and code_from_json({"source": 3, "versions": {}}) is None


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        (None, "is an older version, which does not identify its code"),
        (code("b" * 64), rf"source of rollmill {'a' * 16} here, {'b' * 16} there"),
    ],
)
def test_a_worker_with_other_code_is_lost_for_good_and_the_reason_has_both_hashes(monkeypatch, theirs, why):
    """The driver's own code is made another one; the worker, a fresh process, tells its true one."""
    monkeypatch.setattr(handshake_module, "own_code", lambda: code())
    read = handshake_module.code_from_json
    monkeypatch.setattr(handshake_module, "code_from_json", lambda fields: theirs if read(fields) else None)
    with (
        LocalLauncher() as launcher,
        Supervisor([job(worker_jobs.greet)], launcher=launcher, display=lambda line: None) as supervisor,
    ):
        supervisor.start()
        (lost,) = all_events(supervisor)
    assert isinstance(lost, Lost) and isinstance(lost.final, UnfitHost)
    assert lost.final.exit_code == 2
    assert why in str(lost.final)


def test_a_worker_with_the_same_code_is_taken_in():
    with (
        LocalLauncher(fork=False) as launcher,
        Supervisor([job(worker_jobs.greet)], launcher=launcher, display=lambda line: None) as supervisor,
    ):
        supervisor.start()
        assert [type(event).__name__ for event in all_events(supervisor)] == ["Started", "Received", "Finished"]


# --- what replicas have loaded ---------------------------------------------------------------------------


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module of the user that imports another one, from a folder of its own."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "my_parts.py").write_text("import my_helpers\nVALUE = my_helpers.VALUE\n")
    (folder / "my_helpers.py").write_text("VALUE = 7\n")
    monkeypatch.syspath_prepend(folder)
    import my_parts

    yield folder
    for name in ("my_parts", "my_helpers"):
        del sys.modules[name]
    assert my_parts.VALUE == 7


def loaded(**changes):
    fields = {"modules": digests_of(["my_parts"]), "fingerprint": "f" * 64} | changes
    return Loaded(host="far", pid=7, platform="cpu", code=own_code()._asdict(), **fields)


def check(run, **changes):
    spec = SimpleNamespace(graph=GraphRecipe("", {"fingerprint": "f" * 64}, ("my_parts",)), platform="cpu")
    LoadedCode(spec, run).check("actor/1", loaded(**changes), Clock(5, 6, 7))


def test_what_a_replica_has_loaded_is_recorded_and_compared(tmp_path, mine):
    run = RunDirectory.create(tmp_path / "run", config={}, versions={})
    check(run)
    check(run, fingerprint=None)
    record = json.loads((tmp_path / "run" / "workers.json").read_text())["actor/1"]
    assert record["clock"] == {"ahead_ns": 5, "wall_ahead_ns": 6, "round_trip_ns": 7}
    assert (record["host"], record["modules"]) == ("far", digests_of(["my_parts"]))
    assert record["code"]["versions"]["jax"] == own_code().versions["jax"]
    ours = digests_of(["my_parts"])["my_parts"][:16]
    message = rf"actor/1 on far runs different code from the driver: source of my_parts {ours} here, 0{{16}} there"
    with pytest.raises(UnfitHost, match=message):
        check(run, modules={"my_parts": "0" * 64})
    with raises(
        "on-has-other-code-than", "fingerprint of the graph ffffffffffffffff here, eeeeeeeeeeeeeeee there"
    ):
        check(run, fingerprint="e" * 64)


def test_on_another_platform_fingerprints_are_not_compared(tmp_path, mine):
    run = RunDirectory.create(tmp_path / "run", config={}, versions={})
    spec = SimpleNamespace(graph=GraphRecipe("", {"fingerprint": "f" * 64}), platform="gpu")
    LoadedCode(spec, run).check("actor/1", loaded(fingerprint="e" * 64), Clock())


def test_modules_travel_with_those_beside_them_and_installed_ones_do_not(tmp_path, mine, monkeypatch):
    sent = modules_to_send(["my_parts", "numpy", "json"])
    assert sent.digests == digests_of(["my_parts", "my_helpers"])
    assert missing_here(sent) == []
    (mine / "my_helpers.py").write_text("VALUE = 8\n")  # another host has another one
    assert missing_here(sent) == ["my_helpers"]
    command = (
        "import sys, json; from rollmill.processes.cluster.modules import SentModules, missing_here, unpack\n"
        "sent = SentModules(json.loads(sys.argv[1]), open(sys.argv[2], 'rb').read())\n"
        "missing = missing_here(sent); folder = unpack(sent, missing).path; import my_parts\n"
        "print(missing, my_parts.VALUE, oct(folder.stat().st_mode & 0o777), folder)"
    )
    (tmp_path / "sent").write_bytes(sent.archive)
    arguments = [json.dumps(sent.digests), str(tmp_path / "sent")]
    environment = os.environ | {
        "ROLLMILL_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(map(str, sys.path[1:])),
    }
    environment["PYTHONPATH"] = environment["PYTHONPATH"].replace(str(mine), "")
    process = [sys.executable, "-P", "-c", command, *arguments]
    done = subprocess.run(process, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("['my_parts', 'my_helpers'] 7 0o700 "), done.stdout
    assert Path(done.stdout.split()[-1]).parent == tmp_path / "temporary"  # which the next process empties


def test_packages_travel_with_their_data_without_links_and_not_beyond_the_limit(tmp_path, monkeypatch):
    package = tmp_path / "my_package"
    (package / "__pycache__").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "levels.json").write_text("[1]")
    (package / "secret").symlink_to("/etc/hostname")
    monkeypatch.syspath_prepend(tmp_path)
    sent = modules_to_send(["my_package.envs"])
    folder = unpack(sent, ["my_package"]).path
    sys.path.remove(str(folder))
    assert sorted(path.name for path in (folder / "my_package").iterdir()) == ["__init__.py", "levels.json"]
    monkeypatch.setattr("rollmill.processes.cluster.modules.MAX_BYTES", 2)
    assert modules_to_send(["my_package.envs"]).digests == {}


def test_rollmill_missing_on_a_host_is_told_with_the_host():
    missing = (
        "The actor died unexpectedly before finishing this task.\n\tip: 10.0.0.2\nWorker exit detail: "
        'Traceback (most recent call last):\n  File "x.py", line 1\n'
        "Traceback (most recent call last):\nModuleNotFoundError: No module named 'rollmill'\n"
    )
    assert failed_start(missing).startswith("rollmill is not installed on 10.0.0.2: ModuleNotFoundError")
    other = 'ray::Worker.work() (pid=95, ip=10.0.0.2, actor_id=1)\n  File "w.py", line 9\nTypeError: takes 7'
    assert failed_start(other) == (
        "the rollmill on 10.0.0.2 cannot start, possibly because it is another version: TypeError: takes 7"
    )
    assert failed_start("The actor never ran - it was cancelled before it started running.") == ""
    assert code_identity.PACKAGE.name == "rollmill"

"""A command that trains what Rollmill defines recalls digests of it; nothing else is recalled."""

import subprocess
import sys
from types import ModuleType

import pytest

import rollmill
from rollmill.dataflow import get_traces, trace_digests
from rollmill.runs import digest_cache as recalled_digests
from rollmill.runs.digest_cache import _has_code
from rollmill.runs.specification import describe

SIZES = {"num_envs": 2, "num_steps": 4, "num_minibatches": 1, "update_epochs": 1, "total_timesteps": 8}
NETWORK = rollmill.NetworkConfig(hidden_sizes=(4,))


@pytest.fixture
def digests(tmp_path, monkeypatch):
    """Returns the folder of stored digests in a process that takes itself for the command's."""
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(recalled_digests, "_foreign_modules", lambda: [("jax", 1, 2)])
    return tmp_path / "digests"


def described(environment="CartPole-v1", **options):
    """Returns a description, all digests, and whether an iteration was traced for them."""
    graph = rollmill.ppo(environment, network=NETWORK, **{**SIZES, **options})
    return describe(graph), trace_digests(graph), "iterate" in vars(get_traces(graph))


def test_digests_of_the_same_names_are_recalled_without_a_trace(digests):
    *traced, did_trace = described()
    *recalled, traced_again = described()
    assert recalled == traced and (did_trace, traced_again) == (True, False)
    assert len(list(digests.iterdir())) == 1


def test_other_settings_sources_or_modules_are_traced(digests, monkeypatch):
    described()
    assert described(norm_adv=False)[2]
    with monkeypatch.context() as changed:
        changed.setattr(recalled_digests, "_digest_own_sources", lambda: "other")
        assert described()[2]
    with monkeypatch.context() as changed:
        changed.setattr(recalled_digests, "_foreign_modules", lambda: [("jax", 1, 3)])
        assert described()[2]
    assert not described()[2]


def test_a_damaged_file_is_traced_again(digests):
    before = described()
    for content in (b"{", b"[]", b'{"fingerprint": 1}', b""):
        for file in digests.iterdir():
            file.write_bytes(content)
        assert described() == before


def test_a_part_of_the_users_own_is_traced(digests):
    cartpole = rollmill.make("CartPole-v1")
    own = cartpole._replace(step=lambda *args: cartpole.step(*args))
    assert described(own)[2]
    assert not digests.exists()


MODULES = "from rollmill.runs import digest_cache as r; print(len(list(r._foreign_modules())) > 100)"


@pytest.mark.parametrize(("script", "expected"), [("rollmill", "True"), ("training.py", "_Untold")])
def test_only_a_process_of_the_command_knows_its_modules(script, expected, tmp_path):
    (tmp_path / script).write_text(MODULES)
    done = subprocess.run([sys.executable, tmp_path / script], capture_output=True, text=True, timeout=120)
    assert expected in done.stdout + done.stderr


def test_a_module_of_the_users_own_makes_a_process_unknown(tmp_path):
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "rollmill").write_text(f"import mine; {MODULES}")
    done = subprocess.run([sys.executable, tmp_path / "rollmill"], capture_output=True, text=True, timeout=120)
    assert "_Untold" in done.stderr


def test_modules_of_a_folder_with_installed_packages_are_known(tmp_path, monkeypatch):
    """Installers put packages into any folder, as `pip install --target` does."""
    (tmp_path / "mine.py").write_text("")
    mine = ModuleType("mine")
    mine.__file__ = str(tmp_path / "mine.py")
    main = ModuleType("__main__")
    main.__file__ = "/bin/rollmill"
    monkeypatch.setattr(sys, "modules", {"__main__": main, "mine": mine})
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(recalled_digests._Untold):
        list(recalled_digests._foreign_modules())
    (tmp_path / "other-1.0.dist-info").mkdir()
    (tmp_path / "other-1.0.dist-info/RECORD").write_text("other.py,,\n")
    recalled_digests._read_recorded.cache_clear()
    with pytest.raises(recalled_digests._Untold):  # code of the user's own beside an installed package
        list(recalled_digests._foreign_modules())
    (tmp_path / "other-1.0.dist-info/RECORD").write_text("other.py,,\nmine.py,sha256=x,0\n")
    recalled_digests._read_recorded.cache_clear()
    assert [name for name, *_ in recalled_digests._foreign_modules()] == ["mine"]


def test_only_modules_without_a_file_and_with_functions_may_hold_code_of_the_users_own():
    made = ModuleType("made")
    assert not _has_code("made", made)
    exec("def function(): pass", vars(made))
    assert _has_code("made", made)
    assert not any(_has_code(name, sys.modules[name]) for name in ("sys", "jaxlib._jax.jax_jit"))

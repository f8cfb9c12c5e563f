"""The compilation cache that workers of a host share."""

import subprocess
import sys

import jax
import pytest

import rollmill
from rollmill.programs.cache import cache_directory

HALF_WRITTEN = """
import os
import warnings

import jax

from rollmill.programs.cache import enable_compilation_cache
from rollmill.programs.cache import cache_directory

warnings.simplefilter("error")
enable_compilation_cache()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


@jax.jit
def doubled(x):
    return 2 * x


assert doubled(21) == 42
entries = list(cache_directory().glob("*-cache"))
assert entries
for entry in entries:
    os.truncate(entry, entry.stat().st_size // 2)
jax.clear_caches()
assert doubled(21) == 42
"""


def test_an_entry_that_is_half_written_is_compiled_once_more(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    subprocess.run([sys.executable, "-c", HALF_WRITTEN], check=True, timeout=120)


TWICE = """
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np

from rollmill.programs import program_store
from rollmill.programs.cache import cache_directory, enable_compilation_cache, kept_out_of_cache
from rollmill.programs.program_store import ProgramStore, StorableProgram

enable_compilation_cache()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
program_store.MIN_COMPILE_SECONDS = 0.0
matrix = jax.ShapeDtypeStruct((3, 3), np.float32)


def compiled(name, function, store):
    make = StorableProgram(name, function, [matrix], lambda: matrix, {})
    store = ProgramStore(store, jax.devices()[0])
    store.compile(make, make.lower(store.name))
    assert store.has(make) == (name == "stored")


with kept_out_of_cache():
    thread = threading.Thread(target=compiled, args=("other_thread", jnp.sin, None))
    thread.start()
    thread.join()
compiled("stored", jnp.cos, "name")
compiled("refused", jnp.linalg.cholesky, "name")
compiled("nameless", jnp.tan, None)
folder = jax.config.jax_compilation_cache_dir
print(*sorted(file.name.split("-")[0] for file in type(cache_directory())(folder).glob("jit_*-cache")))
"""


@pytest.mark.parametrize("is_own", [True, False], ids=["own folder", "configured folder"])
def test_a_program_that_is_stored_is_not_stored_by_jax_as_well(is_own, tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    if not is_own:
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "configured"))
    done = subprocess.run([sys.executable, "-c", TWICE], check=True, timeout=120, capture_output=True, text=True)
    expected = ["jit_nameless", "jit_other_thread", "jit_refused_name"]
    assert done.stdout.split() == sorted(expected + ["jit_stored_name"] * (not is_own))


RENAMED = """
import os

import jax

from rollmill.core.operations import operation_scope
from rollmill.programs.cache import enable_compilation_cache, names_in_cache

enable_compilation_cache()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def text(name):
    def step(x):
        with operation_scope(name):
            return 2 * x

    return jax.jit(step).lower(21).compile().as_text()


assert "operation:before" in text("before")
assert "operation:after" not in text("after"), "the cache needs no help any more"
settings = dict(os.environ)
with names_in_cache():
    assert "operation:after" in text("after")
    enable_compilation_cache()  # as a worker does, which is told by its environment
    assert "operation:last" in text("last")
assert dict(os.environ) == settings
assert "operation:other" not in text("other")
"""


def test_a_program_whose_operations_have_other_names_is_not_taken_from_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    subprocess.run([sys.executable, "-c", RENAMED], check=True, timeout=120)


@pytest.mark.slow
def test_a_training_with_workers_takes_its_programs_from_the_cache(tmp_path):
    """Also where workers are threads of this process, as with environments that are Python objects."""
    setting = "jax_compilation_cache_dir"
    before = jax.config.values[setting]
    env = rollmill.make("gymnasium:CartPole-v1")
    algorithm = rollmill.ppo(env, total_timesteps=8, num_envs=2, num_steps=4, num_minibatches=1, update_epochs=1)
    jax.config.update(setting, None)
    try:
        rollmill.train(algorithm, run_dir=tmp_path / "run", tensorboard=False, quiet=True)
        assert jax.config.values[setting] == str(cache_directory())
    finally:
        jax.config.update(setting, before)


OTHER_NUMBERS = """
import sys
from collections import Counter

import jax

import rollmill
from rollmill.programs import program_store
from rollmill.programs.cache import enable_compilation_cache
from rollmill.programs.compiler_options import start_options

enable_compilation_cache()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
program_store.MIN_COMPILE_SECONDS = 0.0
start_options()  # XLA refuses options that its version does not know, once in each process
events = Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event.rpartition("/")[2]]))


def compiled(seed, iterations, gravity, **numbers):
    events.clear()
    env = rollmill.make("CartPole-v1", gravity=gravity)
    sizes = {"num_envs": 4, "num_steps": 8, "num_minibatches": 2, "total_timesteps": 32 * iterations}
    network = rollmill.NetworkConfig(hidden_sizes=(4,))
    rollmill.train(rollmill.ppo(env, network=network, **sizes, **numbers), seed=seed, quiet=True)
    return events["compile_requests_use_cache"], events["compile_requests_use_cache"] - events["cache_hits"]


asked, missed = compiled(0, 2, 12, vf_coef="linear:1:0.5")
assert missed == (asked if sys.argv[1] == "first" else 0), (asked, missed)
assert asked > 1 or sys.argv[1] != "first", asked
numbers = {"learning_rate": 1e-3, "gamma": 0.9, "ent_coef": 0.1, "clip_coef": 0.3}
asked, missed = compiled(1, 3, 3.7, vf_coef="linear:0.5:0.2", **numbers)
assert missed == 0, (asked, missed)
"""


@pytest.mark.slow
def test_another_seed_length_number_or_parameter_compiles_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    for process in ("first", "second"):
        subprocess.run([sys.executable, "-c", OTHER_NUMBERS, process], check=True, timeout=240, cwd=tmp_path)

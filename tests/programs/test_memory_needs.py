"""The bytes that a training needs on a GPU, before it compiles and after."""

from types import SimpleNamespace

import jax
import pytest

import rollmill
from rollmill.core.errors import DeviceMemoryError
from rollmill.gpus import device_errors
from rollmill.processes.worker import _failure
from rollmill.programs import memory_needs
from rollmill.programs.memory_needs import claim_before_compiling, claim_compiled, least_bytes
from rollmill.record.json_files import disk_is_full
from rollmill.training import preparing

GPU = SimpleNamespace(platform="gpu", memory_stats=lambda: {"pool_bytes": 700, "bytes_in_use": 200})


def bytes_of(num_envs, num_steps, **options):
    graph = rollmill.ppo("CartPole-v1", num_envs=num_envs, num_steps=num_steps, num_minibatches=1)
    return least_bytes(graph, **({"seeds": (0,), "devices": 1} | options))


def test_the_least_need_grows_with_the_trajectory_and_the_states():
    small, longer, wider = bytes_of(64, 8), bytes_of(64, 16), bytes_of(128, 8)
    per_step = (longer - small) / (64 * 8)
    # Observation and final observation, 16 bytes each; the action, rewards and flags; log-probability and value.
    assert 40 <= per_step <= 120
    states = (wider - small - 64 * 8 * per_step) / 64
    # Twice the state of an environment: its physics, observation and mask, and the statistics of its episode.
    assert 2 * 32 <= states <= 2 * 200
    halved = bytes_of(64, 8, devices=2)
    assert small / 2 < halved < small  # weights are whole on each device
    assert bytes_of(64, 8, seeds=(0, 1)) == pytest.approx(2 * small, rel=0.01)


@pytest.fixture
def claimed(monkeypatch):
    made = []
    monkeypatch.setattr(memory_needs, "takes_as_needed", lambda: True)
    monkeypatch.setattr(
        memory_needs, "claim_memory", lambda need, *, what, devices: made.append((need, what, devices))
    )
    return made


def test_a_claim_names_the_sizes(claimed):
    graph = rollmill.ppo("CartPole-v1", num_envs=64, num_steps=8, num_minibatches=1)
    claim_before_compiling(graph, seeds=(0,), devices=[GPU])
    assert claimed == [(bytes_of(64, 8), "a run with num_envs x num_steps = 64 x 8 needs", 1)]
    claim_before_compiling(graph, seeds=(0,), devices=[SimpleNamespace(platform="cpu")])
    assert len(claimed) == 1


def test_a_compiled_training_claims_what_xla_tells_and_what_it_has_not_taken_already(claimed):
    memory = SimpleNamespace(
        argument_size_in_bytes=1000, output_size_in_bytes=900, alias_size_in_bytes=600, temp_size_in_bytes=5000
    )
    step = SimpleNamespace(memory_analysis=lambda: memory)
    program = SimpleNamespace(devices=[GPU, GPU], step=step, copies_state=False)
    claim_compiled(rollmill.ppo("CartPole-v1", num_envs=64, num_steps=8, num_minibatches=1), program)
    # 1000 + 5000 + (900 - 600), less the 700 - 200 that this process holds and does not use.
    assert claimed == [(5800, "a run with num_envs x num_steps = 64 x 8 needs", 2)]


def test_what_does_not_fit_is_refused_before_anything_is_compiled(monkeypatch, tmp_path):
    def refuse(graph, *, seeds, devices):
        raise DeviceMemoryError("processes hold it")

    monkeypatch.setattr(preparing, "claim_before_compiling", refuse)
    monkeypatch.setattr(preparing, "lower", lambda *arguments, **options: pytest.fail("it compiles"))
    graph = rollmill.ppo("CartPole-v1", num_envs=4, num_steps=8, num_minibatches=1, total_timesteps=64)
    with pytest.raises(DeviceMemoryError, match="processes hold it"):
        rollmill.train(graph, run_dir=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def out_of_memory():
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes.")


def test_a_worker_without_memory_ends_the_training_in_a_sentence(monkeypatch, capsys):
    monkeypatch.setattr(device_errors, "ask_gpu_memory", lambda: ())
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        out_of_memory()
    told = _failure(caught.value)
    assert (
        told.fields["final"] == "DeviceMemoryError"
        and "does not have enough memory (RESOURCE" in told.fields["text"]
    )
    assert capsys.readouterr().err == ""  # no traceback: the coordinator says it


def test_a_full_device_is_no_full_disk(monkeypatch):
    monkeypatch.setattr(device_errors, "ask_gpu_memory", lambda: ())
    full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes.")
    assert not disk_is_full(full) and disk_is_full(ValueError("RESOURCE_EXHAUSTED: Error writing: No space left"))

"""Iterations compute in the memory of a large state, and nothing is lost by it: checkpoints, faults, stops."""

import gc
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

import rollmill
from rollmill.core.errors import NonFiniteError
from rollmill.hooks import Checkpoint, MetricsLogged, Stop
from rollmill.policies.loading import restore_run
from rollmill.programs import compiled, states
from rollmill.programs.compiled import lower
from rollmill.programs.dispatch import dispatch_ahead
from rollmill.runs.options import RunOptions
from rollmill.training.placing import choose_plan
from wordings import raises

ENVS, ITERATIONS = 4, 12
LIMIT = 40.0
OPTIONS = {"quiet": True, "tensorboard": False, "fusion": "off"}
TINY = rollmill.NetworkConfig(hidden_sizes=(2,))


def environment(size=1, *, bad_at=None):
    """Counts its steps in each of `size` numbers; one reward is NaN, in environment 2, at the step `bad_at`."""

    def observe(state):
        return jnp.sin(state[:1])

    def reset(key, which):
        state = jnp.zeros(size, jnp.float32)
        return observe(state), state

    def step(key, state, action, which):
        state, no = state + 1.0, jnp.asarray(False)
        reward = jnp.cos(state[0])
        if bad_at is not None:
            reward = reward + jnp.sqrt(jnp.where((state[0] == bad_at) & (which == 2.0), -1.0, 0.0))
        return rollmill.Timestep(observe(state), state, reward, no, state[0] >= LIMIT, {})

    box = spaces.Box(-1, 1, (1,), np.float32)
    return rollmill.Environment("Counting-v0", reset, step, box, spaces.Discrete(2), jnp.float32(0))


def graph(size=1, *, bad_at=None, num_envs=ENVS, **sizes):
    env = environment(size, bad_at=bad_at)
    small = {
        "num_steps": 4,
        "num_minibatches": 1,
        "update_epochs": 1,
        "total_timesteps": num_envs * 4 * ITERATIONS,
    }
    return rollmill.ppo(
        env, params=jnp.arange(num_envs, dtype=jnp.float32), num_envs=num_envs, network=TINY, **{**small, **sizes}
    )


@pytest.fixture
def large(monkeypatch):
    """Every state counts as a large one."""
    monkeypatch.setattr(states, "LARGE_STATE_BYTES", 0)


@pytest.fixture
def in_place(monkeypatch):
    """Iterations overwrite small states, too, of which windows keep copies, as on GPUs."""
    monkeypatch.setattr(compiled, "IN_PLACE", ("cpu", "gpu"))


@pytest.fixture(params=["large", "in_place"])
def overwritten(request):
    """Every state is overwritten, with a copy of it or without."""
    request.getfixturevalue(request.param)


def ages(state):
    """The environment's own numbers, the largest leaf of the collector's environment."""
    return max(jax.tree.leaves(state.collector.environment), key=lambda leaf: leaf.ndim)


def test_a_large_state_is_there_once():
    """64 environments of 1 MiB: 64 MiB. Iterations take no second state beside it, and neither do windows."""
    program = lower(graph(2**18, num_envs=64, total_timesteps=64 * 4 * 6))
    state_bytes = 64 * 2**20
    memory = program.step.memory_analysis()
    assert program.donates_state and memory.alias_size_in_bytes >= state_bytes
    gc.collect()
    others = sum(array.nbytes for array in jax.live_arrays())
    live = []
    for window in dispatch_ahead(program, program.start(), first=0, until=6, keeps=lambda iteration: False):
        live.append(sum(array.nbytes for array in jax.live_arrays()) - others)
        last = window
    assert len(live) > 2 and max(live) <= 1.3 * state_bytes  # it was 3 times the state
    np.testing.assert_array_equal(ages(last.after)[:, 0], np.full(64, 6 * 4, np.float32))


@pytest.mark.slow
def test_a_small_state_is_not_touched():
    program = lower(graph())
    state = program.start()
    program.advance(state)
    assert not program.donates_state and not ages(state).is_deleted()


def test_windows_keep_copies_of_a_state_that_is_overwritten(in_place):
    program = lower(graph())
    assert program.donates_state and not program.loses_state
    windows = list(dispatch_ahead(program, program.start(), first=0, until=6))
    assert len(windows) > 2 and all(window.kept for window in windows)
    for window in windows:
        for iteration, state in ((window.first, window.before), (window.last, window.after)):
            np.testing.assert_array_equal(ages(state)[:, 0], np.full(ENVS, 4.0 * iteration))


def checkpoints_of(run):
    return {
        int(path.name): (path / "state.safetensors").read_bytes() for path in run.directory.glob("checkpoints/*")
    }


@pytest.fixture(scope="module")
def undonated(tmp_path_factory):
    every = {"checkpoint_iterations": 1, "keep_last": ITERATIONS + 1}
    return rollmill.train(graph(), run_dir=tmp_path_factory.mktemp("small") / "run", **every, **OPTIONS)


@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint_iterations": 5},
        {"checkpoint_seconds": 0.0},
        {"checkpoint_iterations": 4, "evaluate_every": 48, "evaluate_episodes": 1},
    ],
    ids=["iterations", "time", "evaluations"],
)
@pytest.mark.slow
def test_checkpoints_are_those_of_a_state_that_is_not_reused(overwritten, tmp_path, undonated, options):
    run = rollmill.train(graph(), run_dir=tmp_path / "run", keep_last=ITERATIONS + 1, **options, **OPTIONS)
    assert run.summary["weights_sha256"] == undonated.summary["weights_sha256"]
    mine, right = checkpoints_of(run), checkpoints_of(undonated)
    assert {0, ITERATIONS} < mine.keys() and all(mine[n] == right[n] for n in mine)
    if every := options.get("checkpoint_iterations"):
        assert mine.keys() >= set(range(0, ITERATIONS, every))


@pytest.mark.parametrize("num_seeds", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_checkpoints_may_leave_environments_out(tmp_path, num_seeds):
    """Weights are the same until the run goes on; its environments then have taken no step."""
    options = {"checkpoint_iterations": 2, "keep_last": 9, "num_seeds": num_seeds, **OPTIONS}
    small, longer = ({"total_timesteps": ENVS * 4 * iterations} for iterations in (4, 6))
    whole, without = (
        rollmill.train(graph(**small), run_dir=tmp_path / str(kept), checkpoint_environments=kept, **options)
        for kept in (True, False)
    )
    assert whole.summary["weights_sha256"] == without.summary["weights_sha256"]
    leaves, left = (set(record_of(run, 4)["leaves"]) for run in (whole, without))
    assert left == {name for name in leaves if not name.startswith("collector.")} < leaves
    again = rollmill.resume(without.directory, algorithm=graph(**longer), changes=longer, quiet=True)
    assert again.summary["iterations"] == 6
    assert np.all(ages(restore_run(whole.directory, algorithm=graph(**small)).restored.state) == 16)
    assert np.all(ages(restore_run(without.directory, algorithm=graph(**longer)).restored.state) == 0)


def record_of(run, iteration):
    return json.loads((run.directory / f"checkpoints/{iteration}/record.json").read_text())


def test_a_replay_memory_needs_its_environments():
    with raises("checkpoint-environments-false-newest-step"):
        choose_plan(rollmill.dqn("CartPole-v1"), RunOptions(checkpoint_environments=False))


@pytest.mark.slow
def test_a_stop_and_a_wanted_checkpoint_get_a_state_that_is_there(overwritten, tmp_path, undonated):
    def hook(event):
        if isinstance(event, MetricsLogged):
            return Stop("enough") if event.iteration >= 3 else Checkpoint() if event.iteration == 1 else None
        return None

    run = rollmill.train(graph(), run_dir=tmp_path / "run", hooks=[hook], **OPTIONS)
    mine, right = checkpoints_of(run), checkpoints_of(undonated)
    assert run.summary["status"] == "stopped" and run.summary["iterations"] in mine
    assert any(0 < n < 4 for n in mine) and all(mine[n] == right[n] for n in mine)
    again = rollmill.resume(run.directory, algorithm=graph(), quiet=True)
    assert again.summary["weights_sha256"] == undonated.summary["weights_sha256"]


@pytest.mark.slow
def test_a_fault_is_found(overwritten, tmp_path):
    """Step 27 of environment 2 is the third one of iteration 7, which has steps 25 to 28."""
    bad = graph(bad_at=27.0)
    with pytest.raises(NonFiniteError, match=r"fragment 'environment' at iteration 7, step 2, environments 2\."):
        rollmill.train(bad, run_dir=tmp_path / "run", checkpoint_iterations=4, **OPTIONS)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert max(int(path.name) for path in (tmp_path / "run/checkpoints").iterdir()) == 4
    shown = rollmill.replay(tmp_path / "run", algorithm=bad)
    assert "jnp.sqrt" in shown.line and np.isnan(shown.outputs["reward"])


@pytest.mark.slow
def test_a_fault_without_a_checkpoint_is_told(large, tmp_path):
    def forget(event):
        if isinstance(event, MetricsLogged) and event.iteration == 5:
            while list((tmp_path / "run/checkpoints").glob(".*")):  # one is being written
                time.sleep(0.01)
            for path in (tmp_path / "run/checkpoints").iterdir():
                path.rename(tmp_path / f"moved-{path.name}")

    with pytest.raises(
        NonFiniteError, match="environment .* at iteration 7. .* there is no checkpoint to start from"
    ):
        rollmill.train(graph(bad_at=27.0), run_dir=tmp_path / "run", hooks=[forget], **OPTIONS)

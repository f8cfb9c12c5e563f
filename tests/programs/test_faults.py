"""A NaN is found: the fragment, the iteration, the environments, and the line that made it."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

import rollmill
from rollmill.core.errors import NonFiniteError
from rollmill.core.folder import Folder
from rollmill.programs.faults.replay import replay_fault
from wordings import raises

OPTIONS = {"quiet": True, "tensorboard": False, "checkpoint_iterations": 1}


class Counter(eqx.Module):
    """Steps since reset, over all episodes of the run; and which environment this is."""

    age: jax.Array


def environment(poison):
    """Counts its steps; `poison(age, params)` is added to the reward."""

    def observe(state):
        return jnp.sin(state.age.astype(jnp.float32))[None]

    def reset(key, params):
        state = Counter(jnp.int32(0))
        return observe(state), state

    def step(key, state, action, params):
        state = Counter(state.age + 1)
        reward = 1.0 + poison(state.age, params)
        done = jnp.zeros((), bool)
        return rollmill.Timestep(observe(state), state, reward, done, done, {})

    box = spaces.Box(-1, 1, (1,), np.float32)
    return rollmill.Environment("Poisoned-v0", reset, step, box, spaces.Discrete(2), jnp.float32(0))


def algorithm(poison, which=(2, 5), **config):
    params = jnp.zeros(8).at[jnp.array(which)].set(1.0)
    sizes = {"num_envs": 8, "num_steps": 8, "total_timesteps": 8 * 8 * 6, "num_minibatches": 2}
    return rollmill.ppo(environment(poison), params=params, **(sizes | config))


def root_of_negative(age, params):
    return jnp.sqrt(jnp.where((age == 19) & (params > 0), -1.0, 0.0))


@pytest.mark.slow
def test_a_nan_reward_names_fragment_iteration_and_environments(tmp_path):
    graph = algorithm(root_of_negative)
    with pytest.raises(
        NonFiniteError, match=r"fragment 'environment' at iteration 3, step 2, environments 2, 5\."
    ) as caught:
        rollmill.train(graph, run_dir=tmp_path / "run", **OPTIONS)
    assert f"rollmill doctor {tmp_path / 'run'}" in str(caught.value)
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [1, 2]
    kept = sorted(int(p.name) for p in (tmp_path / "run/checkpoints").iterdir())
    assert max(kept) <= 2
    shown = rollmill.replay(tmp_path / "run", algorithm=graph)
    assert "jnp.sqrt" in shown.line and "test_faults.py" in shown.line
    assert np.isnan(shown.outputs["reward"])
    assert int(jax.tree.leaves(shown.inputs["state"])[0]) == 18


@pytest.mark.slow
def test_the_failing_run_stops_at_the_same_place_when_resumed(tmp_path):
    graph = algorithm(root_of_negative)
    messages = []
    for attempt in (
        rollmill.train,
        lambda graph, run_dir, **_: rollmill.resume(run_dir, algorithm=graph, quiet=True),
    ):
        with pytest.raises(NonFiniteError) as caught:
            attempt(graph, run_dir=tmp_path / "run", **OPTIONS)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@pytest.mark.slow
def test_an_infinite_reward_that_only_the_gradients_see(tmp_path):
    huge = lambda age, params: jnp.where((age == 9) & (params > 0), 3e38, 0.0)
    unscaled = algorithm(huge, norm_adv=False, normalize_values=False)
    with pytest.raises(
        NonFiniteError, match=r"fragment 'gradients' at iteration 2, epoch 0, minibatch \d"
    ) as caught:
        rollmill.train(unscaled, run_dir=tmp_path / "run", **OPTIONS)
    shown = replay_fault(unscaled, Folder(tmp_path / "run", ("fault",)))
    assert shown.fault.fragment == "gradients" and str(shown.fault) in str(caught.value)
    assert set(shown.fault.environments) <= {2, 5}
    assert not np.isfinite(shown.outputs["losses/value"])


@pytest.mark.slow
def test_an_update_that_overflows(tmp_path):
    none = lambda age, params: jnp.float32(0)
    graph = algorithm(none, learning_rate=1e38, anneal_lr=False)
    with pytest.raises(NonFiniteError, match=r"fragment '(update|policy|gradients)' at iteration [12]"):
        rollmill.train(graph, run_dir=tmp_path / "run", **OPTIONS)


@pytest.mark.slow
def test_one_bad_seed_of_several_is_named(tmp_path):
    graph = algorithm(root_of_negative)
    with pytest.raises(NonFiniteError, match="environments 2, 5"):
        rollmill.train(graph, run_dir=tmp_path / "run", num_seeds=2, **OPTIONS)
    assert json.loads((tmp_path / "run/fault/fault.json").read_text())["seed_index"] == 0


@pytest.mark.slow
def test_finite_runs_leave_no_fault(tmp_path):
    run = rollmill.train(algorithm(lambda age, params: jnp.float32(0)), run_dir=tmp_path / "run", **OPTIONS)
    assert run.summary["status"] == "finished"
    assert not (tmp_path / "run/fault").exists()
    with raises("has-no-fault-to-replay"):
        replay_fault(algorithm(lambda age, params: jnp.float32(0)), Folder(tmp_path / "run", ("fault",)))

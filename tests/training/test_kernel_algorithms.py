"""Each algorithm with kernels in one program learns what XLA learns, in one way for a seed, killed or not."""

import shutil
from functools import partial

import jax
import numpy as np
import pytest

import rollmill
from rollmill.core.errors import FusionError
from rollmill.policies.loading import load_weights
from rollmill.record.run_directory import RunDirectory
from wordings import raises

pytest.importorskip("llvmlite", reason="llvmlite is not installed: pip install 'rollmill[fusion]'")

ENVS, STEPS, ITERATIONS = 8, 8, 6
GRU = rollmill.NetworkConfig(torso="gru", hidden_sizes=(12,), recurrent_size=36)
LSTM = rollmill.NetworkConfig(torso="lstm", hidden_sizes=(12,), recurrent_size=8)
SMALL = rollmill.NetworkConfig(hidden_sizes=(4,))
REPLAY = {"batch_size": 48, "learning_starts": 128, "buffer_size": 2_000, "gradient_steps": 3}
ALGORITHMS = {
    "dqn": (rollmill.dqn, "CartPole-v1", {**REPLAY, "prioritised": True}),
    "small-dqn": (rollmill.dqn, "CartPole-v1", {**REPLAY, "prioritised": True, "network": SMALL}),
    "pqn": (rollmill.pqn, "CartPole-v1", {"num_minibatches": 2}),
    "sac": (rollmill.sac, "Pendulum-v1", REPLAY),
    "td3": (rollmill.td3, "Pendulum-v1", REPLAY),
    "ddpg": (rollmill.ddpg, "Pendulum-v1", REPLAY),
    "impala": (rollmill.impala, "CartPole-v1", {"num_minibatches": 2}),
    "impala-gru": (rollmill.impala, "CartPole-v1", {"num_minibatches": 2, "network": GRU}),
    "gru": (rollmill.ppo, "CartPole-v1", {"num_minibatches": 2, "update_epochs": 2, "network": GRU}),
    "lstm": (rollmill.ppo, "Pendulum-v1", {"num_minibatches": 2, "network": LSTM}),
    "a3c-gru": (rollmill.a3c, "CartPole-v1", {"network": GRU}),
    "vdn": (rollmill.vdn, "TwoStepGame-v0", REPLAY),
    "qmix": (rollmill.qmix, "TwoStepGame-v0", REPLAY),
    "mappo": (rollmill.mappo, "TagGridWorld-Small-v0", {"num_minibatches": 2}),
    "ippo": (rollmill.ippo, "TagGridWorld-Small-v0", {"num_minibatches": 2}),
}
OPTIONS = {"tensorboard": False, "quiet": True, "checkpoint_iterations": 4, "keep_last": ITERATIONS}


def trained(algorithm, fusion, directory):
    make, environment, settings = ALGORITHMS[algorithm]
    steps = ENVS * STEPS * ITERATIONS
    sizes = {"num_envs": ENVS, "num_steps": STEPS, "total_timesteps": steps}
    network = rollmill.NetworkConfig(hidden_sizes=(16, 36))
    graph = make(environment, **{**sizes, "network": network, **settings})
    return rollmill.train(graph, seed=3, run_dir=directory, fusion=fusion, **OPTIONS)


def killed_midway(run, folder):
    """The run as a kill leaves it before its last checkpoint."""
    shutil.copytree(run.directory, folder)
    shutil.rmtree(folder / f"checkpoints/{ITERATIONS}")
    (folder / "summary.json").unlink()
    return folder


@pytest.mark.slow  # parts of kernels have tests of their own
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_kernels_learn_what_is_learned_without(algorithm, tmp_path):
    run = trained(algorithm, "full", tmp_path / "full")
    launches = RunDirectory.open(run.directory).read_config()["launches"]
    assert launches["rollouts"] and launches["gradients"]
    plain = trained(algorithm, "off", tmp_path / "off")
    mine, right = (load_weights(each.directory).weights for each in (run, plain))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), mine, right)
    again = rollmill.resume(killed_midway(run, tmp_path / "killed"), quiet=True)
    assert again.summary["weights_sha256"] == run.summary["weights_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "environment", "network"),
    [("r2d2", "CartPole-v1", GRU), ("rsac", "Pendulum-v1", GRU), ("rsac", "CartPole-v1", LSTM)],
)
def test_rollouts_of_stored_sequences_are_kernels_but_gradients_are_not(algorithm, environment, network, tmp_path):
    settings = {**REPLAY, "sequence_length": 16, "num_envs": ENVS, "num_steps": STEPS, "network": network}
    make = getattr(rollmill, algorithm)
    graph = make(environment, **settings, total_timesteps=ENVS * STEPS * ITERATIONS)
    run, plain = (
        rollmill.train(graph, seed=3, run_dir=tmp_path / fusion, fusion=fusion, **OPTIONS)
        for fusion in ("rollout", "off")
    )
    launches = RunDirectory.open(run.directory).read_config()["launches"]
    assert launches["rollouts"] and not launches["gradients"]
    mine, right = (load_weights(each.directory).weights for each in (run, plain))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), mine, right)
    with raises("gives-gradients-whole-minibatch-and", algorithm, kind=FusionError):
        rollmill.train(graph, run_dir=tmp_path / "full", fusion="full", **OPTIONS)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_seed_has_one_result(algorithm, tmp_path):
    one, other = (trained(algorithm, "full", tmp_path / name) for name in ("one", "other"))
    assert one.summary["weights_sha256"] == other.summary["weights_sha256"]

"""The page "Add your own", as it stands: its module is imported, trained and fused."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cli.command_server import CommandServer

PAGE = (Path(__file__).parents[2] / "docs/extending.md").read_text()
BLOCKS = re.findall(r"^```python title=\"mine.py\"\n(.*?)^```", PAGE, re.M | re.S)

FUSED = """
import jax, jax.numpy as jnp, numpy as np
import mine, rollmill
from rollmill.policies.loading import load_weights

def step(key, state, action, params):
    timestep = mine.step(key, state, action, params)
    return timestep._replace(observation=mine.softsign(timestep.observation))

env = rollmill.time_limit(mine.walk(), 20)
env = rollmill.Environment("Soft-v0", mine.reset, step, env.observation_space, env.action_space,
                           params={"goal": jnp.int32(4)})
graph = rollmill.ppo(env, num_envs=8, num_steps=8, total_timesteps=8 * 8 * 2)
weights = {}
for fusion in ("rollout", "off"):
    run = rollmill.train(graph, run_dir=fusion, fusion=fusion, quiet=True, tensorboard=False)
    weights[fusion] = load_weights(run.directory, algorithm=graph).weights
for a, b in zip(*map(jax.tree.leaves, weights.values()), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
assert "softsign" in str(jax.make_jaxpr(mine.softsign)(1.0))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("extending")
    (folder / "mine.py").write_text("\n\n".join(BLOCKS))
    return folder


@pytest.fixture(scope="module")
def rollmill(folder):
    """Runs a command in the folder of the page's module."""
    server = CommandServer(os.environ)

    def run_command(*arguments):
        done = server.run(arguments, folder, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    yield run_command
    server.close()


def run(folder, *command):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_algorithm_learns_in_the_environment(rollmill):
    printed = rollmill("train", "reinforce", "Walk-v0", "--import", "mine")
    assert float(re.search(r"final return ([\d.]+)", printed)[1]) > 0.95


@pytest.fixture(scope="module")
def printed(folder):
    """What a process prints that draws the environment, and registers the primitive's rule again."""
    return run(
        folder,
        "-c",
        "import mine, jax, rollmill.fusion, rollmill.pictures as pictures\n"
        "env = mine.walk()\n"
        "_, state = env.reset(jax.random.key(0), env.params)\n"
        "print(pictures.rasterise(env.draw(state, env.params), 120).shape)\n"
        "for build in (mine.build, mine.build_with_critic):\n"
        "    graph = build(env, mine.CriticConfig(gamma=0.75))\n"
        "    learner = graph.start_learner(jax.random.key(0))\n"
        "    outputs = graph.outputs.distribution(learner.weights, (), jax.numpy.zeros(2), ())\n"
        "    print(dict(graph.hyperparameters), learner.hyperparameters, outputs.logits.tolist())\n"
        "try: rollmill.fusion.register_rule('softsign', mine.softsign_rule)\n"
        "except rollmill.core.errors.UsageError as error: print(error)",
    )


def test_the_environment_draws_itself(printed):
    assert "(20, 120, 3)" in printed


def test_the_algorithm_has_outputs_and_holds_its_numbers(printed):
    numbers = "{'learning_rate': 0.05, 'gamma': 0.75}"
    held = "{'gamma': Array(0.75, dtype=float32), 'learning_rate': Array(0.05, dtype=float32)}"
    assert printed.count(f"{numbers} {held} [0.0, 0.0]") == 2


@pytest.mark.slow
def test_the_network_is_chosen_by_its_name(rollmill):
    sizes = ["--total-timesteps", "4096", "--num-envs", "8", "--num-steps", "32", "--env-option", "goal=3"]
    rollmill("train", "ppo", "Walk-v0", "--import", "mine", "--network", "linear", *sizes)
    listed = rollmill("list", "--import", "mine")
    assert {"linear", "reinforce", "Walk-v0"} <= set(listed.split())


@pytest.mark.slow
def test_the_distribution_policy_is_drawn_and_run(rollmill):
    options = ["reinforce", "Walk-v0", "--import", "mine", "--distribution", "mine:crosswise"]
    drawn = rollmill("plan", *options)
    assert "steps x 2" in drawn and "stages:   receive weights, collect, send trajectories" in drawn
    rollmill("train", *options, "--place", "threads", "--total-timesteps", "4096")


@pytest.mark.slow
def test_the_primitive_fuses_to_the_same_numbers(folder):
    pytest.importorskip("llvmlite", reason="llvmlite is not installed: pip install 'rollmill[fusion]'")
    run(folder, "-c", FUSED)


def test_a_primitive_has_one_rule(printed):
    assert "the primitive 'softsign' already has a rule" in printed

"""Every message on the page "Troubleshooting" is provoked here, and read as it is printed."""

import re
import shutil
import sys

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

import rollmill
from manual.snippets import ROOT
from rollmill.cli import main
from rollmill.dataflow import MeanGradients, fingerprint
from rollmill.gpus import device_errors
from rollmill.gpus.memory import GpuMemory, Holder
from rollmill.programs.devices import explain_out_of_memory
from small_ppo import small_ppo

sys.path.append(str(ROOT / "tests/training"))
import failing  # noqa: E402, F401 - beside the tests of failing environments

PAGE = (ROOT / "docs/troubleshooting.md").read_text()
QUOTED = re.findall(r"^```text\n(.*?)\n```", PAGE, re.M | re.S)
SIZES = {"num_envs": 2, "num_steps": 8, "num_minibatches": 1, "update_epochs": 1, "total_timesteps": 64}
QUIET = {"quiet": True, "tensorboard": False}
TINY = rollmill.NetworkConfig(hidden_sizes=(4,))
PLANE = spaces.Box(-1, 1, (2,), np.float32)


def own(step):
    def reset(key, params):
        state = jax.random.uniform(key, (2,))
        return state, state

    return rollmill.time_limit(rollmill.Environment("Own-v0", reset, step, PLANE, spaces.Discrete(2)), 20)


def rooting(key, state, action, params):
    state, false = jnp.abs(state - 0.05), jnp.asarray(False)
    return rollmill.Timestep(state, state, jnp.sqrt(state[0] - 0.3), false, false, {})


def branching(key, state, action, params):
    state, false = -state if state[0] > 0 else state, jnp.asarray(False)
    return rollmill.Timestep(state, state, state[0], false, false, {})


def ppo(env="CartPole-v1", **sizes):
    return rollmill.ppo(env, network=TINY, **{**SIZES, **sizes})


def train_failing(kind, folder, **options):
    graph = ppo(rollmill.make(f"gymnasium:Failing-{kind}-v0"), total_timesteps=1600)
    placed = {"distribution": "single-learner-coarse", "actors": 1, "place": "threads", "imports": ["failing"]}
    return rollmill.train(graph, run_dir=folder, **QUIET, **placed, **options)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return rollmill.train(small_ppo(), run_dir=tmp_path_factory.mktemp("trouble") / "run", **QUIET).directory


def nan(folder, trained):
    rollmill.train(ppo(own(rooting)), run_dir=folder / "nan", **QUIET)


def own_environment(folder, trained):
    rollmill.train(ppo(own(branching_free)), run_dir=folder / "own", **QUIET)
    rollmill.resume(folder / "own")


def branching_free(key, state, action, params):
    false = jnp.asarray(False)
    return rollmill.Timestep(state, state, state[0], false, false, {})


def too_many(folder, trained):
    """The allocator's answer takes minutes of compilation to get."""
    with explain_out_of_memory(ppo(num_envs=10**7, num_steps=10**4, total_timesteps=10**12).loops):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 56998800108728 bytes.")


def beside_another(folder, trained):
    """As on a GPU that another program holds."""
    holder = Holder(2**22 + 5, "trainer", 79 * 2**30)
    memory = GpuMemory("GPU 0 (NVIDIA H100)", "GPU-0", 80 * 2**30, 2**30, (holder,))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(device_errors, "ask_gpu_memory", lambda: (memory,))
        too_many(folder, trained)


def too_long_a_memory(folder, trained):
    env = rollmill.make("CartPole-v1", transforms=["frame-stack:50"])
    graph = rollmill.dqn(env, buffer_size=2 * 10**9, total_timesteps=10**6)
    rollmill.train(graph, run_dir=folder / "replay", **QUIET)


def edited(folder, trained):
    shutil.copytree(trained, folder / "run")
    file = folder / "run/config.json"
    file.write_text(file.read_text().replace('"gamma": 0.99', '"gamma": 0.9'))
    rollmill.resume(folder / "run")


def foreign(folder, trained):
    shutil.copytree(trained, folder / "copy")
    file = folder / "copy/config.json"
    file.write_text(file.read_text().replace('"CartPole-v1"', '"gymnasium:walks:Walk-v0"'))
    rollmill.load(folder / "copy")


def hanging(folder, trained):
    train_failing("Hanging", folder / "hang", hang_seconds=1.0)


def raising(folder, trained):
    train_failing("Raising", folder / "raise", max_failures=3)


def command(*words):
    return lambda folder, trained: main(list(words))


def without_gradients(folder, trained):
    graph = small_ppo()
    constant = lambda network, learner, sample, sequence: (jnp.float32(0), {})
    fingerprint(graph._replace(gradients=MeanGradients(constant, graph.gradients.network)))


PROVOKED = [
    nan,
    lambda folder, trained: rollmill.check_environment(own(rooting)),
    too_many,
    too_long_a_memory,
    beside_another,
    hanging,
    raising,
    lambda folder, trained: rollmill.check_environment(own(branching)),
    lambda folder, trained: rollmill.train(small_ppo(), run_dir=trained, **QUIET),
    lambda folder, trained: rollmill.train(small_ppo(), run_dir=trained, seed=3, resume_if_exists=True, **QUIET),
    lambda folder, trained: rollmill.resume(trained, changes={"num_envs": 4}),
    edited,
    foreign,
    own_environment,
    command("train", "ppo", "CartPole-v1", "--n-envs", "4"),
    lambda folder, trained: rollmill.make("Cartpole-v1"),
    lambda folder, trained: rollmill.ppo("CartPole-v1", num_envs=3, num_steps=5, num_minibatches=4),
    lambda folder, trained: rollmill.dqn("Pendulum-v1"),
    lambda folder, trained: rollmill.load(trained).action([0.0, 0.0]),
    lambda folder, trained: rollmill.train(
        ppo(gymnasium.make("CartPole-v1")), run_dir=folder / "full", fusion="full", **QUIET
    ),
    without_gradients,
]
"""In the order of the page."""

WHOLE = (nan, hanging, raising, own_environment)
"""Those that compile a training."""


def test_every_message_is_provoked():
    assert len(QUOTED) == len(PROVOKED)


def cases():
    for number, (quoted, provoke) in enumerate(zip(QUOTED, PROVOKED, strict=False)):
        words = re.sub(r"[^\w ]", "", quoted)[:40].strip()
        yield pytest.param(quoted, provoke, id=f"{number}-{words}", marks=[pytest.mark.slow] * (provoke in WHOLE))


@pytest.mark.parametrize(("quoted", "provoke"), list(cases()))
def test_the_message_is_printed_as_it_is_quoted(quoted, provoke, trained, tmp_path, capsys):
    with pytest.raises((rollmill.RollmillError, SystemExit)) as caught:
        provoke(tmp_path, trained)
    said = str(caught.value) if isinstance(caught.value, rollmill.RollmillError) else capsys.readouterr().err
    pattern = ".*?".join(map(re.escape, re.split(r"(?<!\[)\.\.\.", quoted)))
    assert re.fullmatch(pattern, said.removeprefix("rollmill: ").strip(), re.S), said

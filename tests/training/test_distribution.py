"""Trainings in processes: placement changes no number, and nothing is lost with what is killed, stopped or hangs.

Whatever is not in this table's fast part is in its slow one: `pytest -m slow tests/training/test_distribution.py`.
"""

import functools
import itertools
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import hanging
import jax
import numpy as np
import pytest

import rollmill
from busy_machine import scaled
from rollmill.core.errors import UsageError
from rollmill.hooks import MetricsLogged, Stop
from rollmill.policies.loading import load_weights
from rollmill.record.metrics import read_metrics
from rollmill.record.run_directory import RunDirectory
from rollmill.training import resuming, training
from wordings import raises

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc"),
    pytest.mark.usefixtures("nothing_left_running"),
]

QUIET = {"quiet": True, "tensorboard": False}
ITERATIONS = 20
SIZES = {"num_envs": 8, "num_steps": 8, "num_minibatches": 2, "update_epochs": 2, "learning_rate": 2.5e-4}
TINY = rollmill.NetworkConfig(hidden_sizes=(8,))
TINY_GRU = rollmill.NetworkConfig(torso="gru", hidden_sizes=(8,), recurrent_size=8)
COARSE, FINE = "single-learner-coarse", "single-learner-fine"

ALGORITHMS = {
    "ppo": (
        rollmill.ppo,
        "CartPole-v1",
        {"normalize_observations": True, "normalize_values": True, "max_grad_norm": "linear:0.3:0.01"},
    ),
    "mappo": (rollmill.mappo, "TagGridWorld-Small-v0", {"normalize_observations": True}),
    "ippo": (rollmill.ippo, "TagGridWorld-Small-v0", {}),
    "mappo-gru": (rollmill.mappo, "TagGridWorld-Small-v0", {"network": TINY_GRU}),
    "a pool of opponents": (
        rollmill.ippo,
        "TagGridWorld-Small-v0",
        {"pool_size": 2, "pool_every": 1, "pool_share": 0.9},
    ),
}
POLICIES = {
    "gpu-only": {"place": "processes", "learners": 2},
    "multi-learner": {"workers": 2, "learners": 2},
    COARSE: {"actors": 2},
    FINE: {"workers": 2},
    "environments": {"workers": 4, "actors": 2, "learners": 2},
    "central": {"actors": 2},
}
FAST = {("ppo", COARSE)}
TABLE = [
    pytest.param(*case, marks=() if case in FAST else pytest.mark.slow)
    for case in itertools.product(ALGORITHMS, POLICIES)
]

MARK = "ROLLMILL_TEST", secrets.token_hex(8)
IN_WORKERS = {
    **dict([MARK]),
    "JAX_PLATFORMS": "cpu",
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


LONG_SECONDS = 500.0
"""Only a test that fails waits so long."""


@pytest.fixture(scope="module", autouse=True)
def workers_environment(tmp_path_factory):
    """JAX is strict in workers too, and what one of them has compiled the next one finds."""
    with pytest.MonkeyPatch.context() as patch:
        for name, text in IN_WORKERS.items():
            patch.setenv(name, text)
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def nothing_left_running():
    """After a training, none of its processes is there any more."""
    yield
    assert all_gone()


def all_gone(seconds=5.0):
    """Whether all processes that carry this module's mark end in time, on a machine as busy as this one is."""
    deadline = time.monotonic() + scaled(seconds)
    while (left := _marked()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not left


def _marked():
    return [folder.name for folder in Path("/proc").glob("[0-9]*") if "=".join(MARK) in _environment_of(folder)]


def _environment_of(process):
    try:
        return (process / "environ").read_text(errors="replace").split("\0")  # empty once it is dead
    except OSError:
        return []


def graph_of(algorithm, iterations=ITERATIONS, env=None):
    build, name, settings = ALGORITHMS[algorithm]
    sizes = SIZES | {"total_timesteps": 64 * iterations, "network": TINY} | settings
    return build(rollmill.make(env or name), **sizes)


@pytest.fixture(scope="module")
def one_program(tmp_path_factory):
    """The weights that one program learns, by algorithm and number of iterations."""

    @functools.cache
    def weights(algorithm, iterations=ITERATIONS):
        graph = graph_of(algorithm, iterations)
        run = rollmill.train(graph, run_dir=tmp_path_factory.mktemp("one") / "run", **QUIET)
        return load_weights(run.directory).weights

    return weights


def assert_learned(run, weights):
    mine = load_weights(run.directory).weights
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), mine, weights)


def assert_whole(run, iterations):
    """Each iteration is in the log once."""
    assert run.summary["status"] == "finished" and run.exit_code == 0
    lines = read_metrics(run.directory / "metrics.jsonl")
    assert [line["iteration"] for line in lines] == list(range(1, iterations + 1))


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "policy"), TABLE)
def test_every_policy_learns_in_processes_what_one_program_does(tmp_path, one_program, algorithm, policy):
    options = {"distribution": policy, **POLICIES[policy], **QUIET}
    run = rollmill.train(graph_of(algorithm), run_dir=tmp_path / "run", **options)
    assert_whole(run, ITERATIONS)
    assert_learned(run, one_program(algorithm))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_processes_that_share_a_mesh_learn_what_one_program_does(tmp_path, one_program, algorithm):
    run = rollmill.train(graph_of(algorithm), run_dir=tmp_path / "run", place="mesh", learners=2, **QUIET)
    assert_whole(run, ITERATIONS)
    assert_learned(run, one_program(algorithm))


@pytest.mark.slow
def test_processes_of_a_mesh_compute_with_the_kernels_that_the_first_has_chosen(tmp_path):
    graph = graph_of("ppo")
    fused = {"fusion": "full", "numerics": "float32", **QUIET}
    one = rollmill.train(graph, run_dir=tmp_path / "one", **fused)
    mesh = rollmill.train(graph, run_dir=tmp_path / "mesh", place="mesh", learners=2, **fused)
    assert_whole(mesh, ITERATIONS)
    assert_learned(mesh, load_weights(one.directory).weights)
    launches = launches_of(mesh)
    assert launches["rollouts"] and launches["gradients"]


@pytest.mark.slow
def test_a_run_that_goes_on_elsewhere_keeps_its_own_launches(tmp_path):
    stop = lambda event: Stop("enough") if isinstance(event, MetricsLogged) else None
    fused = {"fusion": "full", "numerics": "float32", **QUIET}
    run = rollmill.train(graph_of("ppo", 4 * LONGER), run_dir=tmp_path / "run", hooks=[stop], **fused)
    own = launches_of(run)
    again = rollmill.resume(run.directory, place="mesh", learners=2, quiet=True)
    assert again.summary["status"] == "finished"
    assert launches_of(again) == own and own["rollouts"]


def launches_of(run):
    return RunDirectory.open(run.directory).read_config()["launches"]


# --- losses -------------------------------------------------------------------------------------------


class Watcher:
    """A display that remembers its lines, and acts once when the training has come so far."""

    def __init__(self, iteration, act):
        self.lines = []
        self._steps, self._act = iteration * 64, act

    def note(self, text):
        self.lines.append(text)

    def update(self, status):
        if status.env_steps >= self._steps and self._act is not None:
            act, self._act = self._act, None
            act(self)

    def close(self):
        pass

    def pid_of(self, name):
        found = [re.fullmatch(rf"{name} is process (\d+)", line) for line in self.lines]
        return next(int(match[1]) for match in found if match)

    def has(self, pattern):
        return any(re.fullmatch(pattern, line) for line in self.lines)


@pytest.fixture
def watched(monkeypatch):
    """Has the next training shown to a watcher that acts after this iteration."""

    def watch(iteration, act):
        watcher = Watcher(iteration, act)
        for module in (training, resuming):
            monkeypatch.setattr(module, "choose_display", lambda **_: watcher)
        return watcher

    return watch


def signals(name, number):
    return lambda watcher: os.kill(watcher.pid_of(name), number)


MIDWAY, LONG = 10, 100
"""Iterations, of which many are left when it is noticed that the former are done."""


@pytest.mark.parametrize(
    ("policy", "env", "name"),
    [
        pytest.param(COARSE, "CartPole-v1", "actor/1", marks=pytest.mark.slow),
        pytest.param(FINE, "CartPole-v1", "environment/1", marks=pytest.mark.slow),
        (FINE, "gymnasium:CartPole-v1", "environment/0"),
        pytest.param("environments", "gymnasium:CartPole-v1", "environment/3", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_what_collects_is_replaced_and_the_training_goes_on(tmp_path, watched, policy, env, name):
    watcher = watched(MIDWAY, signals(name, signal.SIGKILL))
    graph = graph_of("ppo", LONG, env)
    run = rollmill.train(graph, run_dir=tmp_path / "run", distribution=policy, **POLICIES[policy])
    assert_whole(run, LONG)
    assert watcher.has(rf"{name} was lost: killed by SIGKILL.*")
    assert watcher.has(f"{name} was replaced; training continues")
    assert not watcher.has("all workers restart .*")


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        pytest.param(COARSE, "learner/0", marks=pytest.mark.slow),
        pytest.param("gpu-only", "all/1", marks=pytest.mark.slow),
        pytest.param("multi-learner", "learner/1", marks=pytest.mark.slow),
        pytest.param("environments", "policy/0", marks=pytest.mark.slow),
        pytest.param("central", "update/0", marks=pytest.mark.slow),
    ],
)
def test_without_one_that_computes_in_step_all_begin_again(tmp_path, watched, one_program, policy, name):
    """From the last whole state, so that nothing shows in what is learned."""
    watcher = watched(MIDWAY, signals(name, signal.SIGKILL))
    options = {"distribution": policy, "checkpoint_iterations": 5, "tensorboard": False, **POLICIES[policy]}
    run = rollmill.train(graph_of("ppo", LONG), run_dir=tmp_path / "run", **options)
    assert_whole(run, LONG)
    assert watcher.has(rf"{name} was lost: killed by SIGKILL.*")
    assert watcher.has(r"all workers restart after iteration \d+")
    assert_learned(run, one_program("ppo", LONG))


@pytest.mark.slow
def test_a_killed_coordinator_leaves_a_run_that_goes_on_and_nothing_else(tmp_path, one_program):
    process = start_command(tmp_path / "run", iterations=LONG)
    wait_for(process, lambda: (tmp_path / "run/.lock").exists() and (tmp_path / "run/config.json").exists())
    with pytest.raises(UsageError, match=f"process {process.pid} is writing to"):
        rollmill.resume(tmp_path / "run", quiet=True)
    with raises("choose-another-run-dir", f"process {process.pid} is writing to"):
        rollmill.train(graph_of("ppo"), run_dir=tmp_path / "run", **QUIET)
    kill_midway(process, tmp_path / "run")
    run = rollmill.resume(tmp_path / "run", quiet=True)
    assert_whole(run, LONG)
    assert_learned(run, one_program("ppo", LONG))


@pytest.mark.slow
def test_a_killed_coordinator_of_host_environments_too(tmp_path):
    options = ["--distribution", FINE, "--workers", "2"]
    process = start_command(tmp_path / "run", env="gymnasium:CartPole-v1", iterations=LONG, options=options)
    kill_midway(process, tmp_path / "run")
    assert_whole(rollmill.resume(tmp_path / "run", quiet=True), LONG)


def start_command(run, *, iterations, env="CartPole-v1", options=("--distribution", COARSE)):
    """`graph_of("ppo", iterations, env)` by the command line, in a process group of its own."""
    sizes = {"total_timesteps": 64 * iterations, **SIZES}
    settings = [word for name, value in sizes.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    settings += ["--normalize-observations", "--normalize-values", "--max-grad-norm", "linear:0.3:0.01"]
    settings += ["--network.hidden-sizes", "8"]
    settings += ["--checkpoint-iterations", "5", "--no-tensorboard", "--run-dir", str(run), *options]
    command = [sys.executable, "-m", "rollmill", "train", "ppo", env, *settings]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)


def wait_for(process, happens, seconds=LONG_SECONDS):
    deadline = time.monotonic() + seconds
    while not happens():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"nothing within {seconds} s"
        time.sleep(0.005)


def is_midway(run):
    """Whether there is a checkpoint after the first one, and so many iterations are logged."""
    log = run / "metrics.jsonl"
    saved = [path for path in (run / "checkpoints").glob("[0-9]*") if path.name != "0"]
    return bool(saved) and log.read_bytes().count(b"\n") >= MIDWAY


def kill_midway(process, run):
    wait_for(process, lambda: is_midway(run))
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "the run ended before it could be killed"
    assert all_gone()


# --- stopping and going on ----------------------------------------------------------------------------


@pytest.mark.slow
def test_schedules_and_a_curriculum_are_exact_across_a_kill(tmp_path):
    options = ("--ent-coef", "linear:0.02:0", "--clip-coef", "cosine:0.3:0.1")
    options += ("--env-option", "gravity=linear:9.8:20", "--env-option", "pole_mass=uniform:0.05:0.3")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    process = start_command(whole, iterations=LONGER, options=options)
    told = process.communicate(timeout=LONG_SECONDS)
    assert process.returncode == 0, told
    kill_midway(start_command(killed, iterations=LONGER, options=options), killed)
    rollmill.resume(killed, quiet=True)
    ends = [json.loads((run / "summary.json").read_text())["weights_sha256"] for run in (whole, killed)]
    assert ends[0] == ends[1]
    lines = [json.loads(line) for line in (killed / "metrics.jsonl").read_text().splitlines()]
    gravities = [9.8 + 10.2 * number / LONGER for number in range(LONGER)]
    assert [line["schedules/gravity"] for line in lines] == pytest.approx(gravities, rel=1e-5)


LONGER = 250
"""Iterations of about a millisecond: not all of them are done while this process waits for a processor."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "placement",
    [
        {"distribution": "gpu-only"},
        pytest.param({"distribution": "gpu-only", "place": "mesh", "learners": 2}, marks=pytest.mark.slow),
        pytest.param({"distribution": "central"}, marks=pytest.mark.slow),
        pytest.param({"distribution": "environments", "workers": 4}, marks=pytest.mark.slow),
    ],
)
def test_a_stopped_run_goes_on_under_another_policy(tmp_path, watched, one_program, placement):
    watched(MIDWAY, lambda watcher: os.kill(os.getpid(), signal.SIGTERM))
    graph = graph_of("ppo", LONGER)
    run = rollmill.train(graph, run_dir=tmp_path / "run", distribution=COARSE, tensorboard=False)
    stopped = run.summary["iterations"]
    assert run.exit_code == 143 and run.summary["status"] == "stopped"
    assert MIDWAY <= stopped < LONGER
    assert read_metrics(run.directory / "metrics.jsonl")[-1]["iteration"] == stopped
    assert all_gone()
    again = watched(0, None)
    run = rollmill.resume(tmp_path / "run", **placement)
    assert again.has(f"resumed from iteration {stopped}"), again.lines
    assert_whole(run, LONGER)
    assert_learned(run, one_program("ppo", LONGER))


@pytest.mark.slow
def test_ctrl_c_ends_a_training_in_order(tmp_path):
    """The terminal sends SIGINT to workers and coordinator alike."""
    process = start_command(tmp_path / "run", iterations=100_000)
    wait_for(process, lambda: is_midway(tmp_path / "run"))
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=LONG_SECONDS)
    assert process.returncode == 130, errors
    assert "stopped by SIGINT after iteration" in errors and "was lost" not in errors
    last = RunDirectory.open(tmp_path / "run").read_summary()["iterations"]
    assert (tmp_path / f"run/checkpoints/{last}").exists()


@pytest.mark.slow
@pytest.mark.parametrize("policy", [COARSE, "environments", "central"])
def test_asynchronous_trainings_stop_and_go_on(tmp_path, watched, policy):
    watched(MIDWAY, lambda watcher: os.kill(os.getpid(), signal.SIGTERM))
    options = {"distribution": policy, "asynchronous": True, "tensorboard": False}
    algorithm = rollmill.a3c if policy == "central" else rollmill.impala
    sizes = {"num_envs": 8, "num_steps": 8, "total_timesteps": 64 * 1000, "network": TINY}
    run = rollmill.train(algorithm(rollmill.make("CartPole-v1"), **sizes), run_dir=tmp_path / "run", **options)
    assert run.exit_code == 143 and MIDWAY <= run.summary["iterations"] < 1000
    again = watched(0, None)
    run = rollmill.resume(tmp_path / "run")
    assert again.has(r"resumed from iteration [1-9]\d*")
    assert_whole(run, 1000)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["actor/0", "learner/0"])
def test_no_rollout_is_more_than_one_iteration_old_though_its_only_actor_or_the_learner_dies(
    tmp_path, watched, name
):
    watcher = watched(MIDWAY, signals(name, signal.SIGKILL))
    graph = rollmill.impala("CartPole-v1", num_envs=8, num_steps=8, total_timesteps=64 * LONG, network=TINY)
    options = {"distribution": COARSE, "actors": 1, "asynchronous": True, "checkpoint_iterations": 5}
    run = rollmill.train(graph, run_dir=tmp_path / "run", tensorboard=False, **options)
    assert_whole(run, LONG)
    assert watcher.has(rf"{name} was lost: killed by SIGKILL.*")
    lags = [line["policy_lag/max"] for line in read_metrics(run.directory / "metrics.jsonl")]
    assert max(lags) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "policy"), [(rollmill.impala, COARSE), (rollmill.a3c, "central")])
def test_asynchronous_trainings_balance_the_pole(tmp_path, algorithm, policy):
    """The weights of workers are some updates old. The settings are those of the recipes."""
    placement = {"distribution": policy, "actors": 2, "asynchronous": True}
    raw, corrected = {"norm_adv": False, "normalize_values": False}, {"rms_eps": 1e-7, "rms_bias_correction": True}
    settings = raw if algorithm is rollmill.a3c else corrected
    for seed in range(2):
        graph = algorithm("CartPole-v1", **settings)
        run = rollmill.train(graph, seed=seed, run_dir=tmp_path / str(seed), **placement, **QUIET)
        assert run.summary["final_return"] > 400, seed


# --- hanging ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "consequence"),
    [
        ("actor/1", "actor/1 was replaced; training continues"),
        pytest.param("learner/0", r"all workers restart after iteration \d+", marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_is_stopped_hangs_and_is_replaced(tmp_path, watched, name, consequence):
    watcher = watched(MIDWAY, signals(name, signal.SIGSTOP))
    run = rollmill.train(graph_of("ppo", LONG), run_dir=tmp_path / "run", distribution=COARSE, tensorboard=False)
    assert_whole(run, LONG)
    assert watcher.has(rf"{name} hangs since \d+ s stopped by a signal.*"), watcher.lines
    assert watcher.has(consequence)


@pytest.mark.slow
def test_an_environment_that_hangs_is_told_with_its_line_and_replaced(tmp_path, watched, monkeypatch):
    monkeypatch.setenv(hanging.FILE, str(tmp_path / "hung"))
    watcher = watched(0, None)
    graph = graph_of("ppo", LONG, "gymnasium:Hanging-v0")
    options = {"distribution": FINE, "hang_seconds": 3.0, "tensorboard": False}
    run = rollmill.train(graph, run_dir=tmp_path / "run", imports=["hanging"], **options)
    assert_whole(run, LONG)
    line = r"environment/\d hangs since \d+ s stepping environments; .*/hanging\.py:\d+ in .*"
    assert watcher.has(line), watcher.lines
    assert watcher.has(r"environment/\d was replaced; training continues")

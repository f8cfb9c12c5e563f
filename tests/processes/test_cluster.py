"""Workers that a Ray cluster of two nodes places: what becomes of them, and what they leave behind."""

import functools
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import cluster_jobs
import jax
import numpy as np
import pytest
import worker_jobs
from cluster_jobs import descendants, job
from worker_jobs import all_events, gone_within, several, until

import rollmill
from rollmill.core.errors import UsageError
from rollmill.dataflow import Group, Partition
from rollmill.policies.loading import load_weights
from rollmill.processes.cluster import launcher as launcher_module
from rollmill.processes.cluster.capacity import Demand, demands_of
from rollmill.processes.cluster.joining import connect_to_ray
from rollmill.processes.cluster.launcher import RayLauncher
from rollmill.processes.events import Finished, Hung, Lost, Received, Started
from rollmill.processes.supervisor import Supervisor
from rollmill.record.run_directory import RunDirectory
from rollmill.runs.options import RunOptions
from rollmill.runs.specification import describe
from rollmill.training.placing import choose_plan
from rollmill.training.preparing import run_spec
from rollmill.workers.launch import launch
from rollmill.workers.reports import MetricsRows, Notice, RolledBack, Saved

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'rollmill[cluster]'")
SECONDS = 120.0
"""For what takes three on an idle machine."""

NODE = {"num_cpus": 4, "object_store_memory": 80_000_000}
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")


@pytest.fixture(scope="module")
def ray_nodes():
    """Two nodes on this machine, with which this process is connected."""
    from ray.cluster_utils import Cluster

    head = {**NODE, "include_dashboard": False, "_system_config": {"prestart_worker_first_driver": False}}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    nodes.add_node(**NODE)
    ray.init(address=nodes.address, log_to_driver=False, logging_level="error")
    yield nodes
    ray.shutdown()
    pids = descendants(os.getpid())
    nodes.shutdown()
    assert gone_within(pids, 10.0)


@pytest.fixture(scope="module")
def ray_cluster(ray_nodes):
    with connect_to_ray("ray", workers=2) as cluster:
        yield cluster


@pytest.fixture
def supervise(ray_cluster):
    """Starts a supervisor of some jobs, which is closed at the end."""
    started = []

    def start(*jobs, show=lambda line: None, **options):
        launcher = RayLauncher(ray_cluster, show=show)
        options = {"display": show, "heartbeat_seconds": 0.2, "address": f"tcp:{ray_cluster.host}:0"} | options
        supervisor = Supervisor(jobs, launcher=launcher, **options)
        started.append((supervisor, launcher))
        supervisor.start()
        return supervisor

    yield start
    for supervisor, launcher in started:
        supervisor.close(grace_seconds=0.0)
        launcher.close()


@pytest.mark.slow
def test_workers_are_named_spread_over_nodes_and_heard(supervise, tmp_path):
    lines = []
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}
    jobs = [job(cluster_jobs.tells_node, replica, environment=environment) for replica in range(2)]
    supervisor = supervise(*jobs, show=lines.append, log_folder=tmp_path)
    told = several(supervisor, "node", 2, SECONDS)
    assert len({message.fields["node"] for message in told}) == 2
    assert {message.fields["devices"] for message in told} == {3}
    names = {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}
    assert {"rollmill-run-actor-0", "rollmill-run-actor-1"} <= names
    supervisor.send("actor", "go")
    events = all_events(supervisor)
    assert {event.job for event in events if isinstance(event, Finished)} == set(jobs)
    assert gone_within([message.fields["pid"] for message in told], 1.0)
    assert f"actor/0 was placed on {ray.util.get_node_ip_address()}" in lines
    assert "[actor/1] hello from actor/1" in lines
    assert "hello from actor/1" in (tmp_path / "actor-1.log").read_text()


@pytest.mark.slow
def test_a_killed_worker_is_lost_at_once_with_its_children_and_can_be_replaced(supervise):
    supervisor = supervise(job(cluster_jobs.has_a_child), job(cluster_jobs.crashes_when_told, 1))
    child = until(supervisor, "child", SECONDS).fields
    supervisor.send("actor/1", "go")
    os.kill(child["pid"], signal.SIGKILL)
    first, second = several(supervisor, Lost, 2, SECONDS)
    lost = {event.job.replica: event for event in (first, second)}
    assert "Ray says: Worker unexpectedly exits" in lost[0].reason
    assert gone_within([child["child"]], 2.0)
    assert re.search(r'Ray says: .*\(File ".*cluster_jobs\.py", line \d+ in crashes_when_told\)', lost[1].reason)

    again = supervisor.replace(lost[0].job)
    assert again.attempt == 1
    assert until(supervisor, Started, SECONDS).job == again


@pytest.mark.slow
def test_a_stopped_and_a_stuck_worker_are_hung_and_end_when_replaced(supervise):
    supervisor = supervise(job(worker_jobs.obeys), job(worker_jobs.holds_the_interpreter, 1), hang_seconds=3.0)
    several(supervisor, Started, 2, SECONDS)
    time.sleep(0.6)  # until they have been seen at work
    pids = {name: worker.handle.stream.origin.pid for name, worker in supervisor._workers.items()}
    os.kill(pids["actor/0"], signal.SIGSTOP)
    hung = {event.job.name: event.where for event in several(supervisor, Hung, 2)}
    assert hung["actor/0"].startswith("stopped by a signal")
    assert re.search(r'worker_jobs\.py", line \d+ in holds_the_interpreter', hung["actor/1"])
    for name, pid in pids.items():
        supervisor.replace(name)
        assert gone_within([pid], 3.0)


@pytest.mark.slow
def test_a_worker_is_lost_with_its_node_and_replaced_on_another(supervise, ray_nodes):
    supervisor = supervise(*[job(cluster_jobs.tells_node, replica) for replica in range(2)])
    told = several(supervisor, "node", 2, SECONDS)
    doomed = next(node for node in ray_nodes.worker_nodes)
    ray_nodes.remove_node(doomed, allow_graceful=False)
    supervisor.replace(until(supervisor, Lost, SECONDS).job)
    again, deadline = None, time.monotonic() + SECONDS
    while again is None and time.monotonic() < deadline:
        for event in supervisor.events(0.5):
            if isinstance(event, Lost):  # Ray had placed it on the dead node again, not knowing of its death yet
                supervisor.replace(event.job)
            elif isinstance(event, Received):
                again = event.message.fields["node"]
    assert again in {message.fields["node"] for message in told} - {doomed.node_id}
    ray_nodes.add_node(**NODE)
    ray_nodes.wait_for_nodes(SECONDS)  # until Ray notices the death: it would place the next test's actors there


@pytest.mark.slow
def test_a_job_that_half_fits_holds_nothing(ray_cluster):
    """Other work holds six of eight cores; three workers wait together, and come together."""

    class Other:
        pass

    others = [ray.remote(Other).options(num_cpus=1).remote() for _ in range(6)]
    wait_for_cores(2)
    jobs = [job(cluster_jobs.tells_node, replica) for replica in range(3)]
    launcher = RayLauncher(ray_cluster, jobs=jobs)
    supervisor = Supervisor(jobs, launcher=launcher, heartbeat_seconds=0.2, address=f"tcp:{ray_cluster.host}:0")
    try:
        supervisor.start()
        assert not [event for _ in range(8) for event in supervisor.events(0.5) if isinstance(event, Started)]
        assert ray.available_resources()["CPU"] == 2
        for other in others:
            ray.kill(other)
        assert len(several(supervisor, "node", 3, SECONDS)) == 3
    finally:
        supervisor.close(grace_seconds=0.0)
        launcher.close()
    wait_for_cores(8)


def wait_for_cores(count):
    """Waits until so many cores of the cluster are free."""
    deadline = time.monotonic() + SECONDS
    while ray.available_resources().get("CPU", 0.0) != count:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_kill_9_of_the_coordinator_leaves_nothing_running(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-c", "import cluster_jobs; cluster_jobs.coordinate_on_ray()"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        ours, all_of_them = ([int(pid) for pid in process.stdout.readline().split()] for _ in range(2))
        assert len(ours) == 4 and set(ours) < set(all_of_them)
        process.kill()
    assert gone_within(ours, 5.0)
    assert gone_within(all_of_them, 20.0)  # agents of Ray would look for its head for a minute


def test_an_unknown_cluster_is_refused_with_a_way_out():
    message = r"cluster='raj' is not valid, expected ray, auto, ray://HOST:PORT or HOST:PORT"
    with pytest.raises(UsageError, match=message), connect_to_ray("raj", workers=1):
        pass


def test_what_workers_ask_for():
    groups = (
        Group("actor", ("environment", "policy"), 3, device="cpu"),
        Group("learner", ("gradients", "update"), 2),
    )
    partition = Partition("any", groups)
    cpu, gpu = Demand(), Demand(gpus=1.0)
    assert demands_of(partition, {"CPU": 8.0}) == {"actor": cpu, "learner": cpu}
    assert demands_of(partition, {"CPU": 8.0, "GPU": 1.0}) == {"actor": cpu, "learner": cpu}
    assert demands_of(partition, {"CPU": 8.0, "GPU": 2.0}) == {"actor": cpu, "learner": gpu}
    only = Partition("only", (groups[0], groups[1]._replace(device="gpu")))
    assert demands_of(only, {"CPU": 8.0})["learner"] == gpu
    assert str(gpu) == "1 CPU and 1 GPU"


# --- training --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def little_optimisation():
    """XLA does not optimise, in this process and in workers: programs that run for a moment cost less."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        yield


ITERATIONS = 20
ALGORITHMS = {
    "ppo": (rollmill.ppo, "CartPole-v1"),
    "mappo": (rollmill.mappo, "TagGridWorld-Small-v0"),
    "ippo": (rollmill.ippo, "TagGridWorld-Small-v0"),
}
POLICIES = {
    "gpu-only": {"learners": 2},
    "multi-learner": {"learners": 2},
    "single-learner-coarse": {},
    "single-learner-fine": {},
    "environments": {},
    "central": {},
}


def small(iterations, algorithm="ppo"):
    sizes = {"num_envs": 4, "num_steps": 8, "num_minibatches": 2, "update_epochs": 2}
    network = rollmill.NetworkConfig(hidden_sizes=(8,))
    build, env = ALGORITHMS[algorithm]
    return build(rollmill.make(env), **sizes, network=network, total_timesteps=4 * 8 * iterations)


@pytest.fixture(scope="module")
def weights_of_one_program(tmp_path_factory):
    """By algorithm."""

    @functools.cache
    def weights(algorithm):
        folder, graph = tmp_path_factory.mktemp("one") / "run", small(ITERATIONS, algorithm)
        return load_weights(rollmill.train(graph, run_dir=folder, quiet=True, tensorboard=False).directory).weights

    return weights


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "policy"), list(itertools.product(ALGORITHMS, POLICIES)))
def test_placement_by_ray_changes_no_weight(ray_cluster, weights_of_one_program, tmp_path, algorithm, policy):
    options = {"distribution": policy, "quiet": True, "tensorboard": False, **POLICIES[policy]}
    run = rollmill.train(small(ITERATIONS, algorithm), run_dir=tmp_path / "run", cluster="ray", **options)
    assert run.summary["status"] == "finished"
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=1e-5),
        load_weights(run.directory).weights,
        weights_of_one_program(algorithm),
    )
    assert not [actor for actor in ray.util.list_named_actors(all_namespaces=True)]


class Told:
    """A display that remembers."""

    def __init__(self):
        self.lines = []

    def note(self, text):
        self.lines.append(text)

    def update(self, status):
        pass

    def close(self):
        pass

    def pid_of(self, name):
        found = [re.fullmatch(rf"{name} is process (\d+)", line) for line in self.lines]
        return next(int(match[1]) for match in found if match)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("distribution", "name"), [("single-learner-coarse", "actor/1"), ("single-learner-fine", "environment/0")]
)
def test_a_killed_actor_is_replaced_and_training_goes_on(ray_cluster, tmp_path, distribution, name):
    graph, display = small(60), Told()
    options = RunOptions(distribution=distribution, cluster="ray", checkpoint_iterations=60)
    plan = choose_plan(graph, options)
    run = RunDirectory.create(tmp_path / "run", config={}, versions={})
    last, killed = 0, False
    spec = run_spec(plan, options, described=describe(graph), imports=())
    with launch(graph, spec, run, begin_with=None, show=display.note) as (coordinator, _):
        for told in coordinator.run():
            display.lines += [told.text] if isinstance(told, Notice) else []
            last = told.first + 1 if isinstance(told, MetricsRows) else last
            if last >= 5 and not killed:
                os.kill(display.pid_of(name), signal.SIGKILL)
                killed = True
    print(*display.lines, sep="\n")
    assert f"{name} was replaced; training continues" in display.lines
    assert last == 60


@pytest.mark.slow
def test_a_node_that_is_drained_is_left_after_a_checkpoint(ray_nodes, ray_cluster, tmp_path, monkeypatch):
    """Both learners begin again from the state that was saved for it, on the node that is left."""
    monkeypatch.setattr(launcher_module, "POLL_SECONDS", 0.2)
    graph = small(100_000)
    options = RunOptions(distribution="multi-learner", learners=2, cluster="ray")
    run = RunDirectory.create(tmp_path / "run", config={}, versions={})
    spec = run_spec(choose_plan(graph, options), options, described=describe(graph), imports=())
    reports, doomed, kinds = [], None, []
    goes_on = lambda: RolledBack in kinds and MetricsRows in kinds[kinds.index(RolledBack) :]
    with launch(graph, spec, run, begin_with=None, show=Told().note) as (coordinator, _):
        for report in coordinator.run(goes_on):
            reports.append(report)
            kinds.append(type(report))
            if isinstance(report, MetricsRows) and doomed is None:
                doomed = drain_a_node(ray_nodes)
    ray_nodes.remove_node(doomed, allow_graceful=False)
    ray_nodes.add_node(**NODE)
    notes = [report for report in reports if isinstance(report, Notice) and "Ray drains its node" in report.text]
    assert [note.wants_checkpoint for note in notes if note.text.startswith("learner")] == [True]
    assert not any(note.wants_checkpoint for note in notes if note.text.startswith("environment"))
    saved = [report.iteration for report in reports if isinstance(report, Saved)]
    assert [report.iteration for report in reports if isinstance(report, RolledBack)] == saved[:1]
    assert len(saved) == 2 and saved[1] > saved[0]


def drain_a_node(ray_nodes):
    """Drains the node beside the head, as for a preemption in five minutes."""
    (doomed,) = ray_nodes.worker_nodes
    gcs, preemption = ray._private.worker.global_worker.gcs_client, 2
    accepted, why = gcs.drain_node(doomed.node_id, preemption, "test", int((time.time() + 300) * 1000))
    assert accepted, why
    return doomed


@pytest.mark.slow
@pytest.mark.parametrize("distribution", ["single-learner-fine", "central"])
def test_a_training_that_is_stopped_ends_with_the_state_of_its_last_row(ray_cluster, tmp_path, distribution):
    graph = small(400)
    options = RunOptions(distribution=distribution, cluster="ray")
    plan = choose_plan(graph, options)
    run = RunDirectory.create(tmp_path / "run", config={}, versions={})
    rows, saved = [], []
    spec = run_spec(plan, options, described=describe(graph), imports=())
    with launch(graph, spec, run, begin_with=None, show=Told().note) as (coordinator, _):
        for told in coordinator.run(lambda: len(rows) >= 5):
            rows.extend(told.rows if isinstance(told, MetricsRows) else [])
            saved.extend([told.iteration] if isinstance(told, Saved) else [])
    assert 5 <= len(rows) < 400
    assert saved == [len(rows)]

"""The coordinator against scripted workers: what it says to whom, and what it tells."""

import time

import equinox as eqx
import jax
import numpy as np
import pytest

import rollmill
from rollmill.core.errors import DeviceMemoryError, EnvironmentFailed, NonFiniteError
from rollmill.core.machine import visible_gpus
from rollmill.dataflow import FRAGMENTS, Group, Partition, replica_environments
from rollmill.planning.distribution import find_distribution
from rollmill.planning.placement import Counts
from rollmill.planning.plan import Plan
from rollmill.processes.events import Audible, Finished, Hung, Lost, Received, Silent, Started
from rollmill.processes.jobs import Job
from rollmill.processes.messages import WorkerMessage
from rollmill.processes.supervision import ALL
from rollmill.programs.states import state_shapes
from rollmill.workers.coordination import coordinator as module, recovery as losses
from rollmill.workers.coordination.coordinator import Coordinator
from rollmill.workers.coordination.jobs import jobs_of
from rollmill.workers.replica.snapshots import share_of
from rollmill.workers.reports import LaunchesChosen, LostWorker, MetricsRows, Notice, RolledBack, Saved, StartedUp
from rollmill.workers.run_spec import GraphRecipe, RunSpec, Tolerances
from wordings import raises

GRAPH = rollmill.ppo(
    rollmill.make("CartPole-v1"),
    num_envs=4,
    num_steps=4,
    num_minibatches=2,
    total_timesteps=4 * 4 * 100,
    network=rollmill.NetworkConfig(hidden_sizes=(2,)),
)
SHAPES = state_shapes(GRAPH)
COARSE = find_distribution("single-learner-coarse")(Counts(actors=2))
CENTRAL = find_distribution("central")(Counts(actors=2, asynchronous=True))


def numbered_state(number):
    """A state all of whose numbers are this one, but that environments have their indices."""

    def leaf(shape):
        if jax.dtypes.issubdtype(shape.dtype, jax.dtypes.prng_key):
            return jax.random.key(number)
        return np.full(shape.shape, number, shape.dtype)

    index, iteration = np.arange(4, dtype=np.int32), np.int32(number)
    where = lambda state: (state.collector.index, state.iteration)
    return eqx.tree_at(where, jax.tree.map(leaf, SHAPES), (index, iteration))


class Scripted:
    """`Supervision` that does nothing; what happens is a script, which may look at what was sent."""

    def __init__(self, jobs, script):
        self._jobs = {job.name: job for job in jobs}
        self._script = script(self)
        self.sent = []
        self.notes = {}

    @property
    def jobs(self):
        return tuple(self._jobs.values())

    def start(self):
        self.sent.append("started")

    def events(self, timeout=None):
        return next(self._script)  # a script that ends early fails its test

    def send(self, to, kind, fields=None, arrays=None):
        name = to.name if isinstance(to, Job) else to
        self.sent.append((name, kind, dict(fields or {}), dict(arrays or {})))

    def replace(self, job):
        old = self._jobs[job.name]
        self._jobs[job.name] = Job(
            old.name, old.group, old.replica, old.entry, old.settings, old.environment, old.attempt + 1
        )
        self.sent.append(("replaced", job.name))
        return self._jobs[job.name]

    def doing(self):
        return {job.name: self.notes.get(job.name, "waiting for weights") for job in self.jobs}

    def stop(self, to, *, grace_seconds=5.0):
        self.sent.append(("stopped", to if isinstance(to, str) else to.name))

    def close(self, *, grace_seconds=5.0):
        raise AssertionError

    def take(self, kind=None):
        """Messages sent since the last time, or those of one kind: to whom, fields, names of arrays."""
        sent, self.sent = self.sent, []
        if kind is None:
            return sent
        return [(to, fields, arrays) for to, what, fields, arrays in filter(_is_message, sent) if what == kind]

    # --- events ---------------------------------------------------------------------------------------

    def row(self, n, job="learner/0", **metrics):
        """Iteration n's metrics, counted from 0."""
        return self.says(job, "IterationMetrics", {"first": n, "rows": [{"losses/total": 0.5, **metrics}]})

    def says(self, job, kind, fields, arrays=None):
        return Received(self._jobs[job], WorkerMessage(kind, fields, arrays or {}))

    def part(self, job, state):
        """Its part of a state."""
        name, _, replica = job.partition("/")
        learner = name in ("learner", "update")
        index = replica_environments(4, 1 if learner else 2, int(replica))
        arrays = share_of(state, index, learner=True, environments=True)
        room = "learner." if learner else "collector."
        mine = {name: array for name, array in arrays.items() if name.startswith(room)}
        return self.says(job, "SnapshotPart", {"iteration": int(state.iteration), "lowest": index.start}, mine)

    def parts(self, state):
        return [self.part(job.name, state) for job in self.jobs]

    def meet(self, address):
        """A mesh begins only once its first process has told where they meet."""
        yield [self.says("all/1", "Process", {"pid": 2})]
        assert not [message for message in filter(_is_message, self.sent) if message[1] == "Begin"]
        yield [self.says("all/0", "Process", {"pid": 1, "rendezvous_address": address})]

    def parts_of_mesh(self, state):
        """Those of two processes with all fragments."""
        first, second = (self.part(name, state) for name in ("all/0", "all/1"))
        first.message.arrays.update(share_of(state, range(4), learner=True, environments=False))
        return [first, second]

    def is_at_work(self, job):
        """It has built its graph, and begins."""
        return self.says(job, "Process", {"pid": 7})

    def lost(self, job, **how):
        told = {"reason": "killed by SIGKILL", "exit_status": -9, "raised": False, "details": ""} | how
        return Lost(self._jobs[job], **told)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    """Most tests do not ask how long is waited between two tries."""
    monkeypatch.setattr(losses, "FIRST_PAUSE_SECONDS", 0.0)


def _is_message(sent):
    return len(sent) == 4


def coordinate(
    script,
    partition=COARSE,
    *,
    begin=None,
    mesh=False,
    on_told=lambda coordinator, told: None,
    stopping=lambda: False,
    **patience,
):
    """Everything that is told while the script happens."""
    workers = Scripted(jobs_of(partition, "nowhere:function", {}), script)
    plan = Plan(partition, "mesh" if mesh else "processes").to_json()
    spec = RunSpec(GraphRecipe(""), plan, "cpu", tolerances=Tolerances(**patience))
    coordinator = Coordinator(GRAPH, spec, workers, initial=numbered_state(0), restored=begin)
    told = []
    for what in coordinator.run(stopping):
        told.append(what)
        on_told(coordinator, what)
    return told


def ends_at(iteration, workers):
    """The rest of a script in which all goes well."""
    yield workers.parts(numbered_state(iteration))


def of_kind(told, kind):
    return [what for what in told if isinstance(what, kind)]


def assert_same(mine, right):
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(right), strict=True):
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b)


# --- beginning ----------------------------------------------------------------------------------------


def test_workers_begin_with_nothing_at_the_beginning():
    def script(workers):
        first, *begins = workers.take()
        assert first == "started"
        assert [name for name, *_ in begins] == ["actor/0", "actor/1", "learner/0"]
        assert {kind for _, kind, _, _ in begins} == {"Begin"}
        assert all(arrays == {} for *_, arrays in begins)
        fields = begins[0][2]
        assert (fields["first"], fields["attempt"], fields["generation"], fields["restart"]) == (0, 0, 0, 0)
        assert fields["resets_environments"]
        yield from ends_at(100, workers)

    coordinate(script)


def test_workers_that_go_on_get_their_shares():
    state = numbered_state(30)

    def script(workers):
        begins = {to: (fields, arrays) for to, fields, arrays in workers.take("Begin")}
        for fields, _ in begins.values():
            assert (fields["first"], fields["generation"], fields["resets_environments"]) == (30, 1, False)
        shares = [arrays["collector.index"].tolist() for _, arrays in begins.values()]
        assert shares == [[0, 1], [2, 3], [0, 1, 2, 3]]
        assert [any(n.startswith("learner.") for n in arrays) for _, arrays in begins.values()] == [
            False,
            False,
            True,
        ]
        yield from ends_at(100, workers)

    coordinate(script, begin=Saved(30, state))


def test_asynchronous_workers_go_on_with_environments_of_their_own():
    def script(workers):
        begins = {to: arrays for to, _, arrays in workers.take("Begin")}
        assert not any(name.startswith("collector") for arrays in begins.values() for name in arrays)
        assert begins["update/0"] and begins["actor/1"]
        yield [workers.part("update/0", numbered_state(100))]

    coordinate(script, CENTRAL, begin=Saved(30, numbered_state(30)))


# --- rows and states ----------------------------------------------------------------------------------


def test_rows_come_in_order():
    def script(workers):
        yield [Started(job, 1.5) for job in workers.jobs]
        yield [workers.row(0, x=1.0), workers.row(1, x=2.0)]
        yield [workers.row(2, x=3.0)]
        yield from ends_at(100, workers)

    told = coordinate(script)
    rows = of_kind(told, MetricsRows)
    assert [(row.first, [float(r["x"]) for r in row.rows]) for row in rows] == [(0, [1]), (1, [2]), (2, [3])]
    assert rows[0].rows[0]["x"].dtype == np.float32
    assert told[0] == Notice("actor/0 started in 1.5 s")


def test_a_state_is_put_together_from_the_parts():
    def script(workers):
        yield [workers.row(0)]
        ((to, fields, _),) = workers.take("SnapshotRequest")
        wanted = fields["iteration"]
        assert to == ALL and wanted > 1
        state = numbered_state(wanted)
        first, *others = workers.parts(state)
        yield others
        yield [workers.row(n) for n in range(1, wanted + 2)]
        yield [first]
        yield from ends_at(100, workers)

    told = coordinate(script, on_told=wants_at_rows(1))
    saved = of_kind(told, Saved)
    assert len(saved) == 2
    assert saved[0].iteration == int(saved[0].state.iteration)
    # The root key is nobody's part; it stays as it was at the beginning.
    right = eqx.tree_at(lambda state: state.key, numbered_state(saved[0].iteration), jax.random.key(0))
    assert_same(saved[0].state, right)
    assert saved[-1].iteration == 100


def wants_at_rows(*iterations):
    def on_told(coordinator, told):
        if isinstance(told, MetricsRows) and told.first + 1 in iterations:
            coordinator.request_snapshot()

    return on_told


def test_a_state_that_somebody_missed_is_asked_for_again():
    def script(workers):
        workers.take()
        yield [workers.row(0)]
        ((_, first, _),) = workers.take("SnapshotRequest")
        yield [
            workers.says("learner/0", "MissedSnapshot", {"iteration": first["iteration"]}),
            workers.part("actor/0", numbered_state(first["iteration"])),
        ]
        yield [workers.row(first["iteration"] + 1)]
        ((to, second, _),) = workers.take("SnapshotRequest")
        assert to == ALL and second["iteration"] > first["iteration"]
        yield workers.parts(numbered_state(second["iteration"]))
        yield from ends_at(100, workers)

    told = coordinate(script, on_told=wants_at_rows(1, *range(3, 99)))
    assert len(of_kind(told, Saved)) == 2


def test_a_state_that_lacks_a_part_is_asked_for_again():
    """A worker may be replaced before it answers, and its replacement may be past the iteration."""

    def script(workers):
        workers.take()
        yield [workers.row(0)]
        ((_, first, _),) = workers.take("SnapshotRequest")
        state = numbered_state(first["iteration"])
        yield [workers.part("actor/0", state), workers.part("learner/0", state)]
        for n in range(1, first["iteration"] + 1):
            yield [workers.row(n)]
        assert workers.take("SnapshotRequest") == []
        yield [workers.row(first["iteration"] + 1)]
        assert [to for to, *_ in workers.take("SnapshotRequest")] == [ALL]
        yield from ends_at(100, workers)

    told = coordinate(script, on_told=wants_at_rows(*range(1, 99)))
    assert [saved.iteration for saved in of_kind(told, Saved)] == [100]


def test_parts_of_the_end_that_came_early_are_kept():
    """Workers that serve steps are done with the last iteration before anybody has learned from it."""

    def script(workers):
        actors, learner = workers.parts(numbered_state(100))[:2], workers.part("learner/0", numbered_state(100))
        yield [workers.row(97), *actors, workers.row(98), workers.row(99), learner]

    told = coordinate(script, on_told=wants_at_rows(99, 100))
    assert [saved.iteration for saved in of_kind(told, Saved)] == [100]


@pytest.mark.parametrize(
    ("job", "kind"), [("learner/0", "parameters or statistics"), ("actor/1", "policy inputs")]
)
def test_a_state_with_a_leaf_missing_is_refused(job, kind):
    def script(workers):
        *others, part = sorted(workers.parts(numbered_state(100)), key=lambda part: part.job.name == job)
        name, *_ = sorted(part.message.arrays, reverse=job == "actor/1")  # `collector.observation` of the actor
        without = {n: array for n, array in part.message.arrays.items() if n != name}
        yield [*others, Received(part.job, part.message._replace(arrays=without))]
        yield [Finished(job) for job in workers.jobs]

    with raises("state-after-iteration-cannot-be", "100", f"{job} sent no {kind}"):
        coordinate(script)


def test_a_group_with_the_update_alone_is_told_of_the_end():
    def script(workers):
        yield [workers.row(98, "update/0")]
        assert workers.take("SnapshotRequest") == []
        yield [workers.row(99, "update/0")]
        assert workers.take("SnapshotRequest") == [("update", {"iteration": 100, "final": True}, {})]
        yield [workers.part("update/0", numbered_state(100))]

    told = coordinate(script, CENTRAL)
    (saved,) = of_kind(told, Saved)
    assert_same(saved.state.learner, numbered_state(100).learner)
    # Environments of asynchronous workers are not saved; those of the beginning stand for them.
    assert_same(saved.state.collector, numbered_state(0).collector)


def test_on_a_mesh_states_are_those_between_windows():
    one = Partition("gpu-only", (Group("all", FRAGMENTS, 2),))

    def script(workers):
        yield from workers.meet("10.0.0.1:40123")
        assert [fields["rendezvous_address"] for _, fields, _ in workers.take("Begin")] == ["10.0.0.1:40123"] * 2
        yield [workers.says("all/0", "IterationMetrics", {"first": 0, "rows": [{"x": 1.0}] * 8})]
        ((_, fields, _),) = workers.take("SnapshotRequest")
        assert fields["iteration"] % 8 == 0 and fields["iteration"] > 8
        yield workers.parts_of_mesh(numbered_state(100))

    told = coordinate(script, one, mesh=True, on_told=wants_at_rows(1))
    assert [len(rows.rows) for rows in of_kind(told, MetricsRows)] == [8]
    assert [saved.iteration for saved in of_kind(told, Saved)] == [100]


def test_all_processes_of_a_mesh_get_the_kernels_of_the_first():
    one = Partition("gpu-only", (Group("all", FRAGMENTS, 2),))
    launches = {"device": "chip", "rollouts": [1, 2], "gradients": None}

    def script(workers):
        yield from workers.meet("127.0.0.1:1")
        assert [fields["launches"] for _, fields, _ in workers.take("Begin")] == [None, None]
        yield [workers.says("all/0", "KernelsChosen", {"launches": launches})]
        assert workers.take("KernelsChosen") == [("all/1", {"launches": launches, "notes": ()}, {})]
        compiled = {"launches": launches, "notes": ["one kernel"]}
        yield [workers.says("all/0", "MeshCompiled", compiled)]
        yield [workers.lost("all/1")]
        yield from workers.meet("127.0.0.1:2")
        begun = [(fields["launches"], fields["rendezvous_address"]) for _, fields, _ in workers.take("Begin")]
        assert begun == [(launches, "127.0.0.1:2")] * 2
        yield [workers.says("all/0", "MeshCompiled", compiled)]
        yield workers.parts_of_mesh(numbered_state(100))

    told = coordinate(script, one, mesh=True)
    assert of_kind(told, LaunchesChosen) == [LaunchesChosen(launches)] * 2
    assert told.count(Notice("one kernel")) == 1  # not again after the loss


def test_replicas_of_a_group_get_the_kernels_of_its_first_one():
    actors = {"device": "chip", "rollouts": [16, 0], "gradients": None}
    learner = {"device": "chip", "rollouts": None, "gradients": [32, 2]}

    def script(workers):
        assert [fields["launches"] for _, fields, _ in workers.take("Begin")] == [None, None, None]
        yield [workers.says("actor/0", "KernelsChosen", {"launches": actors, "notes": ["one kernel", "why"]})]
        assert workers.take("KernelsChosen") == [("actor/1", {"launches": actors, "notes": ()}, {})]
        yield [workers.says("learner/0", "KernelsChosen", {"launches": learner, "notes": ["why"]})]
        assert not workers.take("KernelsChosen")
        yield [workers.lost("actor/1")]
        assert [(to, fields["launches"]) for to, fields, _ in workers.take("Begin")] == [("actor/1", actors)]
        yield [workers.lost("learner/0")]
        begun = {to: fields["launches"] for to, fields, _ in workers.take("Begin")}
        assert begun == {"actor/0": actors, "actor/1": actors, "learner/0": learner}
        yield [workers.says("actor/0", "KernelsChosen", {"launches": actors, "notes": ["as when it began"]})]
        yield from ends_at(100, workers)

    told = coordinate(script)
    groups = [chosen.launches["groups"] for chosen in of_kind(told, LaunchesChosen)]
    assert groups == [{"actor": actors}, *[{"actor": actors, "learner": learner}] * 2]
    notices = [notice.text for notice in of_kind(told, Notice)]
    assert [text for text in notices if text in ("one kernel", "why", "as when it began")] == ["one kernel", "why"]


def test_failures_of_environments_are_told_and_counted():
    failure = {"index": 7, "doing": "step", "error": "ValueError: no", "line": "env.py:3: raise"}

    def script(workers):
        yield [workers.row(0)]
        yield [workers.says("actor/1", "EnvFailures", {"failures": [failure]})]
        yield [workers.row(1), workers.row(2)]
        yield [workers.says("actor/1", "EnvFailures", {"failures": [failure] * 7}), workers.lost("actor/0")]
        yield [workers.says("learner/0", "IterationMetrics", {"first": 3, "rows": [{"x": 1.0}, {"x": 2.0}]})]
        yield from ends_at(100, workers)

    told = coordinate(script)
    rows = [row for rows in of_kind(told, MetricsRows) for row in rows.rows]
    assert [float(row["episodes/failed"]) for row in rows] == [0, 1, 0, 8, 0]
    text = "actor/1: environment 7 failed in step{}: ValueError: no, at env.py:3: raise. Its episode was truncated"
    times = ["", "", "", ", for the 4th time", ", for the 8th time"]
    assert [notice.text for notice in of_kind(told, Notice)][:5] == [text.format(time) for time in times]


def test_what_workers_built_and_compiled_is_put_together():
    """Side by side and after one another; of a worker that is replaced later it does not count."""

    def script(workers):
        yield [workers.says("actor/0", "CompileTimes", {"compiled": [[9.0, 7.0], [6.0, 5.0]], "built": 6.5})]
        yield [workers.says("learner/0", "CompileTimes", {"compiled": [[8.0, 6.5]], "built": 9.0})]
        yield [workers.row(0), workers.lost("actor/0")]
        yield [workers.says("actor/0", "CompileTimes", {"compiled": [[5.0, 0.0]], "built": 1.0})]
        yield from ends_at(100, workers)

    first, second = (told.so_far.compiling for told in of_kind(coordinate(script), StartedUp))
    assert abs(first - 3.0) < 0.1 and abs(second - 3.5) < 0.1


def test_before_the_first_iteration_waiting_for_another_attempt_is_no_training():
    """The second attempt is built when it tells so: what passed since the workers were asked for counts."""

    def script(workers):
        yield [workers.says("learner/0", "CompileTimes", {"compiled": [], "built": 9.0})]
        time.sleep(0.2)
        yield [workers.lost("actor/0")]
        yield [workers.says("actor/0", "CompileTimes", {"compiled": [[0.1, 0.0]], "built": 0.0})]
        yield from ends_at(100, workers)

    first, second = (told.so_far for told in of_kind(coordinate(script), StartedUp))
    assert first.total == 0.0  # built before this coordinator began
    assert second.total >= 0.2


# --- losses -------------------------------------------------------------------------------------------


def test_a_lost_actor_is_replaced_and_begins_anew_while_others_go_on():
    def script(workers):
        yield [workers.row(0)]
        ((_, wanted, _),) = workers.take("SnapshotRequest")
        yield workers.parts(
            numbered_state(wanted["iteration"])
        )  # so that there is a later state than the beginning
        yield [workers.row(50)]
        ((_, again, _),) = workers.take("SnapshotRequest")
        yield [workers.lost("actor/1")]
        replaced, begin, *rest = workers.take()
        assert replaced == ("replaced", "actor/1")
        name, kind, fields, arrays = begin
        assert (name, kind, arrays) == ("actor/1", "Begin", {})
        # Its channels count from the beginning of all, whatever was saved since.
        assert (fields["first"], fields["attempt"], fields["generation"], fields["restart"]) == (0, 1, 0, 0)
        assert rest == [("actor/1", "SnapshotRequest", again, {})]  # which the lost one had not answered
        yield [workers.is_at_work("actor/1"), workers.lost("actor/1")]
        assert [f["attempt"] for _, f, _ in workers.take("Begin")] == [2]
        yield [workers.row(51)]
        yield [workers.is_at_work("actor/1")]
        yield from ends_at(100, workers)

    told = coordinate(script, on_told=wants_at_rows(1, 51))
    assert not of_kind(told, RolledBack)
    notices = [notice.text for notice in of_kind(told, Notice)]
    assert (
        notices
        == [
            "actor/1 was lost: killed by SIGKILL",
            "actor/1 is process 7",
            "actor/1 was replaced; training continues",  # not before it is at work
        ]
        * 2
    )


def test_after_a_lost_learner_all_begin_again_from_the_last_state():
    def script(workers):
        yield [workers.lost("actor/0")]
        yield [workers.row(0)]
        wanted = workers.take("SnapshotRequest")[-1][1]["iteration"]
        yield workers.parts(numbered_state(wanted))
        yield [workers.row(40)]
        yield [workers.lost("learner/0")]
        sent = workers.take()
        assert [s for s in sent if s[0] == "replaced"] == [
            ("replaced", name) for name in ("actor/0", "actor/1", "learner/0")
        ]
        begins = [s for s in sent if len(s) == 4 and s[1] == "Begin"]
        for name, _, fields, arrays in begins:
            assert fields["first"] == wanted
            assert (fields["attempt"], fields["generation"], fields["restart"]) == (0, 1, 1)
            assert arrays and {array.flat[0] for n, array in arrays.items() if n.startswith("learner.")} <= {
                wanted
            }
            assert any(n.startswith("learner.") for n in arrays) == (name == "learner/0")
        yield [workers.row(wanted)]
        yield from ends_at(100, workers)

    told = coordinate(script, on_told=wants_at_rows(1))
    (saved, _), (rewound,) = of_kind(told, Saved), of_kind(told, RolledBack)
    assert rewound.iteration == saved.iteration
    assert f"all workers restart after iteration {saved.iteration}" in [n.text for n in of_kind(told, Notice)]


def test_before_the_first_state_all_begin_again_from_the_beginning():
    """With the same environments, so that the same is learned."""

    def script(workers):
        workers.take()
        yield [workers.lost("learner/0")]
        begins = workers.take("Begin")
        assert [(fields["first"], fields["resets_environments"]) for _, fields, _ in begins] == [(0, False)] * 3
        shares = [arrays["collector.index"].tolist() for *_, arrays in begins]
        assert shares == [[0, 1], [2, 3], [0, 1, 2, 3]]
        yield from ends_at(100, workers)

    assert of_kind(coordinate(script), RolledBack) == [RolledBack(0)]


def test_before_the_first_state_asynchronous_workers_begin_anew():
    def script(workers):
        workers.take()
        yield [workers.lost("update/0")]
        begins = workers.take("Begin")
        assert [(f["first"], f["resets_environments"], f["generation"], arrays) for _, f, arrays in begins] == [
            (0, True, 1, {})
        ] * 3
        yield [workers.part("update/0", numbered_state(100))]

    assert of_kind(coordinate(script, CENTRAL), RolledBack) == [RolledBack(0)]


def test_what_replaced_workers_said_before_is_passed_over():
    """Several things may have happened when the coordinator looks; all workers are replaced at the first."""

    def script(workers):
        stale = [
            workers.row(20),
            workers.lost("actor/0"),
            workers.lost("learner/0"),
            *workers.parts(numbered_state(100)),
        ]
        yield [workers.lost("learner/0"), *stale]
        assert len([s for s in workers.take() if s[0] == "replaced"]) == 3
        yield [workers.row(0)]
        yield from ends_at(100, workers)

    told = coordinate(script)
    assert [type(what) for what in told if not isinstance(what, Notice)] == [RolledBack, MetricsRows, Saved]


def test_a_worker_that_hangs_is_lost():
    def script(workers):
        workers.take()
        yield [Hung(workers.jobs[1], 12.3, "in reset, at env.py:7")]
        assert workers.take()[0] == ("replaced", "actor/1")
        yield [workers.is_at_work("actor/1")]
        yield [Hung(workers.jobs[2], 12.3, "learning, at loops.py:7")]
        assert len([s for s in workers.take() if s[0] == "replaced"]) == 3
        yield from ends_at(100, workers)

    told = coordinate(script)
    assert of_kind(told, Notice)[:3] == [
        Notice("actor/1 hangs since 12 s in reset, at env.py:7", failed="worker"),
        Notice("actor/1 is process 7"),
        Notice("actor/1 was replaced; training continues"),
    ]
    assert of_kind(told, RolledBack) == [RolledBack(0)]


def test_a_silent_host_is_told_with_its_worker_and_when_it_is_given_up():
    def script(workers):
        actor = workers.jobs[1]
        yield [Silent(actor, 10.4, "10.0.0.2"), Audible(actor, 14.2, "10.0.0.2")]
        yield from ends_at(100, workers)

    assert [notice.text for notice in of_kind(coordinate(script), Notice)] == [
        "actor/1 on 10.0.0.2 has not responded for 10 s. It counts as lost after 20 s",
        "actor/1 on 10.0.0.2 responds again after 14 s",
    ]


@pytest.mark.parametrize("job", ["actor/0", "learner/0"])
def test_too_many_losses_in_a_row_end_the_run(job):
    def script(workers):
        for _ in range(module.MAX_RESTARTS):
            yield [workers.lost(job)]
        yield [workers.lost(job, reason="ValueError: no such file", raised=True, details="Traceback ...")]

    with pytest.raises(LostWorker) as caught:
        coordinate(script)
    assert str(caught.value) == f"{job} was lost 6 times in a row: ValueError: no such file\nTraceback ..."


def test_an_iteration_between_losses_of_a_learner_is_a_new_row_of_them():
    def script(workers):
        for n in range(3 * module.MAX_RESTARTS):
            yield [workers.lost("learner/0")]
            if n % module.MAX_RESTARTS == 0:
                yield [workers.row(n)]
        yield from ends_at(100, workers)

    assert len(of_kind(coordinate(script), Saved)) == 1


def test_a_replica_whose_environments_fail_again_and_again_ends_the_run_however_far_it_comes_in_between():
    def script(workers):
        for n in range(3):
            yield [Started(workers.jobs[0], 0.1), workers.row(2 * n), workers.row(2 * n + 1)]
            yield [Hung(workers.jobs[0], 130.0, "stepping environments; env.py:7 in step: sleep()")]

    with pytest.raises(LostWorker, match="actor/0 was lost 3 times in a row: it hung stepping .* env.py:7"):
        coordinate(script, max_failures=2)


def test_a_replica_that_has_worked_for_long_begins_a_new_row_of_losses(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(losses.time, "monotonic", lambda: now[0])

    def script(workers):
        for _ in range(10):
            yield [Started(workers.jobs[0], 0.1)]
            now[0] += 100.0
            yield [Hung(workers.jobs[0], 30.0, "stepping environments")]
        yield from ends_at(100, workers)

    assert len(of_kind(coordinate(script, max_failures=2, hang_seconds=69.0), Saved)) == 1
    with pytest.raises(LostWorker, match="actor/0 was lost 3 times in a row"):
        coordinate(script, max_failures=2, hang_seconds=71.0)


def test_each_try_waits_longer_than_the_one_before(monkeypatch):
    monkeypatch.setattr(losses, "FIRST_PAUSE_SECONDS", 1.0)
    assert [losses.pause_before(count) for count in range(1, 8)] == [0, 1, 2, 4, 8, 10, 10]
    monkeypatch.setattr(losses, "FIRST_PAUSE_SECONDS", 0.2)
    looks = []

    def script(workers):
        workers.take()
        yield [workers.lost("actor/0")]
        assert workers.take()[0] == ("replaced", "actor/0")
        yield [workers.lost("actor/0"), workers.row(0), workers.lost("actor/0")]
        assert workers.take() == [("stopped", "actor/0")]  # and the loss of one that waits is none
        while not (sent := workers.take()):
            looks.append(1)
            yield []
        assert sent[0] == ("replaced", "actor/0")
        yield [workers.is_at_work("actor/0")]
        yield from ends_at(100, workers)

    told = coordinate(script)
    assert len(looks) > 1
    assert [notice.text for notice in of_kind(told, Notice)][1:5] == [
        "actor/0 was lost: killed by SIGKILL",
        "actor/0 was lost 2 times in a row (the limit is 5) and is restarted in 0.2 s",
        "actor/0 is process 7",
        "actor/0 was replaced; training continues",
    ]


def test_while_all_wait_to_begin_again_nothing_that_they_said_counts(monkeypatch):
    monkeypatch.setattr(losses, "FIRST_PAUSE_SECONDS", 0.1)

    def script(workers):
        yield [workers.lost("learner/0")]
        workers.take()
        yield [workers.lost("learner/0"), workers.row(0), workers.lost("actor/1")]
        assert workers.take() == [("stopped", ALL)]
        while not (sent := workers.take()):
            yield []
        replaced = [s for s in sent if s[0] == "replaced"]
        assert replaced == [("replaced", name) for name in ("actor/0", "actor/1", "learner/0")]
        yield from ends_at(100, workers)

    told = coordinate(script)
    assert of_kind(told, RolledBack) == [RolledBack(0)] * 2
    assert of_kind(told, MetricsRows) == []


@pytest.mark.parametrize("kind", [EnvironmentFailed, NonFiniteError, DeviceMemoryError])
def test_an_error_that_no_other_attempt_would_mend_ends_the_run_at_once(kind):
    def script(workers):
        yield [workers.lost("actor/1", raised=True, final=kind("environment 3 gave reward = nan"))]

    with pytest.raises(kind, match="^actor/1: environment 3 gave reward = nan$"):
        coordinate(script)


def test_what_fails_in_the_same_iteration_again_and_again_ends_the_run():
    """All go back and come there again, but nobody comes further."""

    def script(workers):
        for _ in range(module.MAX_RESTARTS + 1):
            yield [workers.row(n) for n in range(7)]
            yield [workers.lost("learner/0", reason="ValueError: the seventh")]

    with pytest.raises(LostWorker, match="learner/0 was lost 6 times in a row: ValueError: the seventh"):
        coordinate(script)


def test_workers_of_one_host_share_its_cores(monkeypatch):
    def environments(**options):
        return [dict(job.environment) for job in jobs_of(COARSE, "nowhere:function", {}, **options)]

    monkeypatch.delenv("NPROC", raising=False)
    cpu = {"JAX_PLATFORMS": "cpu"}
    assert environments() == [cpu, cpu, {}]
    assert environments(cores=8) == [cpu | {"NPROC": "2"}] * 2 + [{"NPROC": "2"}]
    assert environments(cores=2)[0]["NPROC"] == "1"
    assert environments(processes=False) == [{}, {}, {}]
    monkeypatch.setenv("NPROC", "3")  # whoever says it knows better
    assert environments(cores=8) == [cpu, cpu, {}]


def test_workers_that_compute_on_gpus_get_their_variables(monkeypatch):
    def seen(partition, gpus):
        jobs = jobs_of(partition, "nowhere:function", {}, gpus=[{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus])
        return [job.environment.get("CUDA_VISIBLE_DEVICES") for job in jobs]

    everything = Partition("everything", (Group("learner", FRAGMENTS, 3),))
    assert seen(everything, ["2", "5", "2"]) == ["2", "5", "2"]
    assert seen(COARSE, ["1"]) == [None, None, "1"]  # actors compute on the CPU
    assert seen(everything, []) == [None] * 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-4f")
    assert visible_gpus() == ["3", "GPU-4f"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []


# --- stopping -----------------------------------------------------------------------------------------


def stops_at_rows(iteration):
    def on_told(coordinator, told):
        if isinstance(told, MetricsRows) and told.first + 1 == iteration:
            coordinator.stop()
            coordinator.stop()  # a second time changes nothing

    return on_told


def held(workers, **begun):
    """Answers: how many iterations each group's replicas have begun."""
    each = {job.name: begun[job.group] for job in workers.jobs if job.group in begun}
    return [workers.says(name, "Hold", {"begun": number}) for name, number in each.items()]


def test_stopping_ends_where_the_furthest_replica_is():
    """Actors may be an iteration ahead of the learner, or more where it takes long until they hear of it."""

    def script(workers):
        yield [workers.row(9)]
        assert workers.take("Hold") == [(ALL, {"begun": 0}, {})]
        yield [*held(workers, learner=11), workers.row(10)]
        yield held(workers, actor=13)[:1]
        assert workers.take("End") == []  # before all have answered
        yield held(workers, actor=13)[1:]
        assert workers.take() == [(ALL, "End", {"iteration": 13}, {})]
        yield [workers.row(11), workers.row(12)]
        yield from ends_at(13, workers)

    told = coordinate(script, on_told=stops_at_rows(10))
    assert [saved.iteration for saved in of_kind(told, Saved)] == [13]
    assert of_kind(told, MetricsRows)[-1].first == 12


def test_a_replica_that_is_lost_after_its_answer_has_to_answer_again():
    def script(workers):
        workers.take()
        yield [workers.row(9)]
        yield held(workers, actor=12)
        workers.take()
        yield [workers.lost("actor/0")]
        kinds = [(sent[0], sent[1]) for sent in workers.take()]
        # Held before it begins, so that it is not past what the others are told.
        assert kinds == [("replaced", "actor/0"), ("actor/0", "Hold"), ("actor/0", "Begin")]
        yield held(workers, learner=11)
        assert workers.take("End") == []
        yield [workers.says("actor/0", "Hold", {"begun": 11})]
        assert workers.take("End") == [(ALL, {"iteration": 12}, {})]
        yield [workers.lost("actor/0")]
        kinds = [(sent[0], sent[1]) for sent in workers.take()]
        assert kinds == [("replaced", "actor/0"), ("actor/0", "End"), ("actor/0", "Begin")]
        yield from ends_at(12, workers)

    told = coordinate(script, on_told=stops_at_rows(10))
    assert [saved.iteration for saved in of_kind(told, Saved)] == [12]


def test_a_learner_that_is_lost_while_all_stop_takes_them_back():
    def script(workers):
        workers.take()
        yield [workers.row(9)]
        yield held(workers, actor=12, learner=11)
        assert workers.take("End") == [(ALL, {"iteration": 12}, {})]
        yield [workers.lost("learner/0")]
        sent = workers.take()
        assert [to for to, what, *_ in filter(_is_message, sent) if what == "Hold"] == [
            "actor/0",
            "actor/1",
            "learner/0",
        ]
        yield held(workers, actor=1, learner=0)
        assert workers.take("End") == [(ALL, {"iteration": 1}, {})]
        yield [workers.row(0)]
        yield from ends_at(1, workers)

    told = coordinate(script, on_told=stops_at_rows(10))
    assert of_kind(told, RolledBack) == [RolledBack(0)]
    assert [saved.iteration for saved in of_kind(told, Saved)] == [1]


def test_stopping_is_asked_about_even_while_nothing_happens():
    wishes = []

    def script(workers):
        yield [workers.row(9)]
        assert workers.take("Hold") == []
        wishes.append("to stop")
        yield []
        assert workers.take("Hold") == [(ALL, {"begun": 0}, {})]
        yield held(workers, actor=10, learner=10)
        yield from ends_at(10, workers)

    saved = of_kind(coordinate(script, stopping=lambda: bool(wishes)), Saved)
    assert [state.iteration for state in saved] == [10]


def test_stopping_does_not_wait_until_all_that_has_happened_is_told():
    """A coordinator that is slower than its workers has many rows to read."""
    wishes, held_at = [], []

    def script(workers):
        workers.take()
        yield [workers.row(9), workers.row(10), workers.row(11)]
        yield held(workers, actor=20, learner=20)
        yield from ends_at(20, workers)

    def on_told(coordinator, told):
        if isinstance(told, MetricsRows):
            wishes.append("to stop")
            held_at.append((ALL, "Hold", {"begun": 0}, {}) in coordinator._workers.sent)

    coordinate(script, on_told=on_told, stopping=lambda: bool(wishes))
    assert held_at == [False, True, True]


def test_a_replica_that_has_done_what_was_planned_makes_that_the_end():
    """Actors are done before the learner is."""

    def script(workers):
        actor, learner = workers.jobs[0], workers.jobs[2]
        yield [*workers.parts(numbered_state(100))[:2], Finished(actor), workers.row(97)]
        yield held(workers, actor=100)[1:]
        assert workers.take("End") == []
        yield [workers.says(learner.name, "Hold", {"begun": 99})]
        assert workers.take("End") == [(ALL, {"iteration": 100}, {})]
        yield [workers.part(learner.name, numbered_state(100))]

    told = coordinate(script, on_told=stops_at_rows(98))
    assert [saved.iteration for saved in of_kind(told, Saved)] == [100]


def test_a_stop_where_a_state_was_just_saved_ends_there():
    def script(workers):
        yield [workers.row(0)]
        ((_, wanted, _),) = workers.take("SnapshotRequest")
        iteration = wanted["iteration"]
        yield workers.parts(numbered_state(iteration))
        yield [workers.row(iteration - 1)]
        yield held(workers, actor=iteration, learner=iteration)
        assert workers.take("End") == [(ALL, {"iteration": iteration}, {})]
        yield from ends_at(iteration, workers)

    def on_told(coordinator, told):
        if isinstance(told, MetricsRows) and told.first == 0:
            coordinator.request_snapshot()
        elif isinstance(told, MetricsRows):
            coordinator.stop()

    told = coordinate(script, on_told=on_told)
    first, second = (saved.iteration for saved in of_kind(told, Saved))
    assert first == second


def test_of_asynchronous_workers_only_the_update_says_where_the_end_is():
    def script(workers):
        yield [workers.row(9, "update/0")]
        workers.take()
        yield [workers.says("actor/1", "Hold", {"begun": 50})]
        assert workers.take() == []
        yield [workers.says("update/0", "Hold", {"begun": 10})]
        # It is told at once, because no row comes any more.
        assert workers.take() == [
            (ALL, "End", {"iteration": 10}, {}),
            ("update", "SnapshotRequest", {"iteration": 10, "final": True}, {}),
        ]
        yield [workers.part("update/0", numbered_state(10))]

    told = coordinate(script, CENTRAL, on_told=stops_at_rows(10))
    assert [saved.iteration for saved in of_kind(told, Saved)] == [10]


def test_all_ended_without_a_state_though_they_were_stopped():
    def script(workers):
        yield [workers.row(9)]
        yield [Finished(job) for job in workers.jobs]

    with raises("all-workers-ended-but-no", "0"):
        coordinate(script, on_told=stops_at_rows(10))


def test_a_stop_that_takes_long_says_what_it_waits_for(monkeypatch):
    monkeypatch.setattr(module, "SLOW_STOP_SECONDS", 0.05)

    def script(workers):
        workers.notes["actor/1"] = "stepping environments; env.py:7 in step: sleep()"
        yield [workers.row(9)]
        for _ in range(3):
            time.sleep(0.05)
            yield []
        yield held(workers, actor=10, learner=10)
        yield from ends_at(10, workers)

    (notice,) = of_kind(coordinate(script, stopping=lambda: True), Notice)
    assert notice.text == (
        "stopping; waiting for actor/1 (stepping environments; env.py:7 in step: sleep()). Press "
        "Ctrl-C again to end the run at once; it can be resumed from its newest checkpoint"
    )

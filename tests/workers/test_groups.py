"""The product of algorithms and distribution policies: placement changes no number.

Whatever is not in this table's fast part is in its slow one: `pytest -m slow tests/workers/test_groups.py`.
"""

import contextlib
import functools
import itertools
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from group_runs import train
from jax.experimental.compilation_cache import compilation_cache
from own_algorithm import partition as crosswise, reinforce

import rollmill
from agents_envs import squad
from rollmill.channels.broker.local import LocalBroker
from rollmill.channels.errors import TimedOut
from rollmill.channels.shm import queue
from rollmill.channels.shm.wire import MemoryWire
from rollmill.dataflow import flow, roles
from rollmill.planning.distribution import find_distribution
from rollmill.planning.placement import Counts
from rollmill.planning.plan import Plan
from rollmill.processes.messages import WorkerMessage
from rollmill.programs.compiled import lower
from rollmill.programs.dispatch import dispatch_ahead
from rollmill.record.leaves import to_host
from rollmill.workers.protocol import Begin
from rollmill.workers.replica import collecting, exchange, learner_state
from rollmill.workers.replica.context import ReplicaContext
from rollmill.workers.replica.layouts import gradients_layout
from rollmill.workers.replica.parameter_server import run_parameter_server
from rollmill.workers.replica.remote import LAST
from rollmill.workers.reports import MetricsRows, Saved
from rollmill.workers.run_spec import GraphRecipe, RunSpec

ITERATIONS = 20
TINY = rollmill.NetworkConfig(hidden_sizes=(8,))
RECURRENT = rollmill.NetworkConfig(torso="gru", hidden_sizes=(8,), recurrent_size=4)
LSTM = rollmill.NetworkConfig(torso="lstm", hidden_sizes=(8,), recurrent_size=4)
NORMALISED = {"normalize_observations": True, "normalize_rewards": True}
MINIBATCHES = {"num_minibatches": 2, "update_epochs": 2}
UPDATES = 4
"""Updates of an iteration with these."""
REPLAY = {
    "buffer_size": 8 * 24,  # less than what the training collects
    "batch_size": 32,
    "learning_starts": 100,
    "gradient_steps": 3,
    "target_interval": 2,
}
OVERLAPPING, WHOLE = {"sequence_length": 16, "burn_in": 4}, {"sequence_length": 8, "burn_in": 0}
REPLAY_OF_ACTIONS = {name: value for name, value in REPLAY.items() if name != "target_interval"}
TEAM = {"team": ("scout", "medic")}
VALUE_LOSS = 0.63
ROUNDING = {("dqn c51", "losses/q"): 51 * 2**-24 * 51}
"""Absolute tolerances of metrics that are sums of large terms.

The value of an action in C51 is the sum of 51 products of probabilities and returns from -100 to 100. Their sizes
add up to 51 while the policy is young. A sum of K terms in float32 rounds by at most K * 2**-24 times the sum of
their sizes. With equal weights and samples, programs for 32 samples and for twice 16 differ from float64 by
2.7e-5.
"""

POLICIES = {
    "gpu-only": Counts(learners=2),
    "multi-learner": Counts(workers=2, learners=2),
    "single-learner-coarse": Counts(actors=2),
    "single-learner-fine": Counts(workers=2),
    "environments": Counts(workers=4, actors=2, learners=2),
    "central": Counts(actors=2),
}


def short_cartpole():
    """CartPole with episodes some of which terminate, while others are truncated."""
    return rollmill.time_limit(rollmill.make("CartPole-v1"), 15)


def masked():
    """CartPole that forbids, half of the time, to push the way the cart is going."""
    legal = lambda state, params: jnp.stack([state.inner.velocity > -0.1, state.inner.velocity < 0.1])
    return rollmill.time_limit(rollmill.make("CartPole-v1")._replace(action_mask=legal), 15)


def pendulum():
    """Whose episodes are truncated, never terminated."""
    return rollmill.make("Pendulum-v1", max_steps=11)


def tag():
    return rollmill.make("TagGridWorld-Small-v0")


def tic_tac_toe():
    return rollmill.make("TicTacToe-v0")


def stopping_ppo(env, **settings):
    """Which ends an iteration's learning after its first epoch where the values were far off."""
    return rollmill.ppo(env, **settings)._replace(
        keep_learning=lambda metrics: metrics["losses/value"] < VALUE_LOSS
    )


ALGORITHMS = {
    "ppo": (rollmill.ppo, short_cartpole, MINIBATCHES | NORMALISED),
    "ppo masked": (rollmill.ppo, masked, MINIBATCHES),
    "ppo stopping": (stopping_ppo, short_cartpole, MINIBATCHES),
    "ppo recurrent": (rollmill.ppo, short_cartpole, MINIBATCHES | NORMALISED | {"network": RECURRENT}),
    "a3c": (rollmill.a3c, short_cartpole, NORMALISED),
    "a2c": (rollmill.a2c, short_cartpole, NORMALISED),
    "impala": (rollmill.impala, short_cartpole, MINIBATCHES),
    "mappo": (rollmill.mappo, tag, MINIBATCHES | {"normalize_observations": True}),
    "ippo": (rollmill.ippo, tag, MINIBATCHES | {"normalize_values": False}),
    "dqn": (rollmill.dqn, short_cartpole, REPLAY),
    "dqn with all options": (
        rollmill.dqn,
        masked,
        REPLAY | {"prioritised": True, "duelling": True, "n_step": 3, "huber": True, "max_grad_norm": 1.0},
    ),
    "dqn c51": (rollmill.dqn, masked, REPLAY | {"prioritised": True, "value_distribution": "c51"}),
    "dqn quantiles": (rollmill.dqn, short_cartpole, REPLAY | {"value_distribution": "quantiles"}),
    "pqn": (rollmill.pqn, masked, MINIBATCHES),
    "r2d2": (rollmill.r2d2, masked, REPLAY | OVERLAPPING | {"network": RECURRENT}),
    "r2d2 lstm": (rollmill.r2d2, short_cartpole, REPLAY | WHOLE | {"prioritised": False, "network": LSTM}),
    "sac": (rollmill.sac, pendulum, REPLAY_OF_ACTIONS),
    "sac discrete": (rollmill.sac, masked, REPLAY_OF_ACTIONS),
    "rsac": (rollmill.rsac, pendulum, REPLAY_OF_ACTIONS | OVERLAPPING | {"network": RECURRENT}),
    "rsac discrete lstm": (rollmill.rsac, masked, REPLAY_OF_ACTIONS | WHOLE | {"network": LSTM}),
    "td3": (rollmill.td3, pendulum, REPLAY_OF_ACTIONS),
    "ddpg": (rollmill.ddpg, pendulum, REPLAY_OF_ACTIONS),
    "vdn": (rollmill.vdn, squad, REPLAY | TEAM | {"n_step": 2}),
    "qmix": (rollmill.qmix, squad, REPLAY | TEAM | {"mixing_size": 8, "hypernetwork_size": 8}),
    "alphazero": (rollmill.alphazero, tic_tac_toe, MINIBATCHES | {"num_simulations": 4}),
    "one's own": (reinforce, short_cartpole, None),
}
FAST = {("ppo", "multi-learner")}
TABLE = [
    pytest.param(*case, marks=() if case in FAST else pytest.mark.slow)
    for case in itertools.product(ALGORITHMS, POLICIES)
]


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    """Replicas and policies have programs in common, which are compiled once."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("cache")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config.values[name] for name in settings}
    _configure(settings)
    yield
    _configure(before)


def _configure(settings):
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@functools.cache
def graph_of(algorithm):
    build, env, settings = ALGORITHMS[algorithm]
    if settings is None:
        return build(env())
    sizes = {"num_envs": 8, "num_steps": 8, "total_timesteps": ITERATIONS * 64, "learning_rate": 2.5e-4}
    return build(env(), **({"network": TINY} | sizes | settings))


@functools.cache
def one_program(algorithm):
    """The state at the end, and the metrics of each iteration."""
    graph, rows = graph_of(algorithm), []
    program = lower(graph)
    for window in dispatch_ahead(program, program.start(), first=0, until=ITERATIONS):
        rows += window.metrics
    return window.after, rows


def assert_close(mine, right, tolerance=1e-5):
    mine, right = to_host(mine), to_host(right)
    assert mine.keys() == right.keys()
    for name in right:
        np.testing.assert_allclose(mine[name], right[name], rtol=tolerance, atol=tolerance, err_msg=name)


def assert_the_same_training(trained, algorithm, *, policy_lag):
    state, rows = one_program(algorithm)
    assert_close(trained.state, state)
    more = {"episodes/failed"} | ({"policy_lag/mean", "policy_lag/max"} if policy_lag else set())
    assert all(set(row) == set(rows[0]) | more for row in trained.rows)
    for name in rows[0]:
        mine, right = ([row[name] for row in each] for each in (trained.rows, rows))
        atol = ROUNDING.get((algorithm, name), 1e-5)
        np.testing.assert_allclose(mine, right, rtol=1e-4, atol=atol, err_msg=name)
    assert all(row[name] == 0 for row in trained.rows for name in more)
    assert sum(row["episodes/ended"] for row in rows) >= 10


@pytest.mark.parametrize(("algorithm", "policy"), TABLE)
def test_every_policy_gives_the_numbers_of_the_one_program(algorithm, policy):
    partition = find_distribution(policy)(POLICIES[policy])
    trained = train(graph_of(algorithm), partition)
    apart = partition.are_separate("policy", "gradients")
    assert_the_same_training(trained, algorithm, policy_lag=apart)


@pytest.mark.slow
def test_the_cases_are_what_they_say():
    """Episodes that terminate and that are truncated; learning that ends before its last epoch; masks."""
    graph = graph_of("ppo")
    ended = [
        row["episodes/length_sum"] / row["episodes/ended"]
        for row in one_program("ppo")[1]
        if row["episodes/ended"]
    ]
    assert min(ended) < 15 and max(ended) == 15
    assert flow(graph).prepared_leaves and flow(graph_of("mappo")).prepared_leaves
    stopping = one_program("ppo stopping")[1]
    assert {float(row["epochs"]) for row in stopping} == {1.0, 2.0}
    assert jax.tree.leaves(flow(graph_of("ppo masked")).reply.action_mask)
    assert jax.tree.leaves(flow(graph_of("ppo recurrent")).trajectory.memory)


# --- policies and algorithms of one's own -------------------------------------------------------------


def test_a_policy_of_ones_own_needs_no_change_in_an_algorithm():
    trained = train(graph_of("ppo"), crosswise(Counts(workers=2)))
    assert_the_same_training(trained, "ppo", policy_lag=True)


@pytest.mark.slow
def test_an_algorithm_of_ones_own_needs_no_policy():
    trained = train(graph_of("one's own"), crosswise(Counts(workers=4)))
    assert_the_same_training(trained, "one's own", policy_lag=True)
    graph = reinforce(rollmill.make("Probe-ActionObservation-v0"), iterations=60)
    rows = train(graph, crosswise(Counts(workers=2))).rows
    assert _mean_return(rows[:5]) < 0.5 and _mean_return(rows[-5:]) > 0.9


def _mean_return(rows):
    return sum(row["episodes/return_sum"] for row in rows) / sum(row["episodes/ended"] for row in rows)


# --- replicas -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["gpu-only", "central"])
@pytest.mark.slow_beyond(1)
def test_replicas_that_reduce_hold_the_same_bits(policy, monkeypatch):
    """The learner of each replica at the end, though only the first one's is saved."""
    learners = {}
    learner_part = learner_state.learner_part

    def watched(context, learner):
        learners[f"{context.group.name}/{context.replica}"] = to_host(learner)
        return learner_part(context, learner)

    monkeypatch.setattr(learner_state, "learner_part", watched)
    partition = find_distribution(policy)(POLICIES[policy])
    trained = train(graph_of("ppo"), partition)
    first, second = (learners[f"{partition.groups[0].name}/{n}"] for n in (0, 1))
    own = flow(graph_of("ppo"))
    kept = own.prepared_leaves | (own.updated_leaves if policy == "gpu-only" else frozenset(own.parameters))
    for place, name in enumerate(first):
        if place in kept:
            np.testing.assert_array_equal(first[name], second[name], err_msg=name)
    saved = to_host(trained.state.learner)
    assert all(np.array_equal(saved[name], first[name]) for n, name in enumerate(first) if n in kept)


@pytest.mark.slow
def test_a_training_goes_on_under_another_policy():
    """The state is the same whatever the placement."""
    graph, halves = graph_of("ppo"), []
    states = {}

    def on_told(coordinator, told):
        if isinstance(told, Saved):
            states[told.iteration] = told.state
        elif not states:
            coordinator.request_snapshot()

    train(graph, find_distribution("environments")(POLICIES["environments"]), on_told=on_told)
    middle = min(states)
    assert 0 < middle < ITERATIONS
    for policy in ("central", "environments"):
        begin_with = Saved(middle, states[middle])
        halves.append(train(graph, find_distribution(policy)(POLICIES[policy]), begin_with=begin_with))
    for trained in halves:
        assert len(trained.rows) == ITERATIONS - middle
        assert_close(trained.state, one_program("ppo")[0])


@pytest.mark.parametrize(
    ("policy", "stop_at"),
    [
        pytest.param("environments", 7, marks=pytest.mark.slow),
        ("central", 7),
        ("single-learner-coarse", ITERATIONS - 1),
    ],
)
@pytest.mark.slow_beyond(1)
def test_a_training_that_is_stopped_has_the_state_of_its_last_row(policy, stop_at):
    def on_told(coordinator, told):
        if isinstance(told, MetricsRows) and told.first + 1 == stop_at:
            coordinator.stop()

    trained = train(graph_of("ppo"), find_distribution(policy)(POLICIES[policy]), on_told=on_told)
    iterations = len(trained.rows)
    assert stop_at <= iterations <= ITERATIONS
    program = lower(graph_of("ppo"))
    *_, window = dispatch_ahead(program, program.start(), first=0, until=iterations)
    assert_close(trained.state, window.after)


def test_a_training_that_is_stopped_at_once_is_whole():
    """With all replicas before the same iteration, or one in the first and all others made to do it too."""
    trained = train(
        graph_of("ppo"),
        find_distribution("single-learner-fine")(POLICIES["single-learner-fine"]),
        on_told=lambda coordinator, told: coordinator.stop(),
    )
    assert int(trained.state.iteration) == len(trained.rows) <= 3


# --- asynchronous -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "policy"),
    [(rollmill.a3c, "central"), (rollmill.impala, "single-learner-coarse")],
)
@pytest.mark.slow
def test_asynchronous_trainings_end_tell_their_lag_and_learn(algorithm, policy):
    iterations = 150
    graph = algorithm(
        rollmill.make("Probe-ActionObservation-v0"),
        num_envs=8,
        num_steps=8,
        total_timesteps=iterations * 64,
        learning_rate=2e-2,
        ent_coef=0.0,
        network=TINY,
    )
    partition = find_distribution(policy)(Counts(actors=2, asynchronous=True))
    trained = train(graph, partition)
    assert int(trained.state.iteration) == iterations == len(trained.rows)
    for row in trained.rows:
        assert 0 <= row["policy_lag/mean"] <= row["policy_lag/max"]
        assert row["episodes/ended"] == 64  # one-step episodes
    assert _mean_return(trained.rows[:3]) < 0.6
    assert _mean_return(trained.rows[-10:]) > 0.9
    network, values = trained.state.learner.weights.network, trained.state.learner.weights.values
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(network))
    assert float(values.count) == pytest.approx(iterations * 64, rel=0.05)  # each batch once, whoever prepared it
    assert 0.5 < float(values.mean) < 1


@pytest.mark.parametrize(
    ("policy", "counts"),
    [("single-learner-coarse", {"actors": 1}), ("environments", {"workers": 2, "actors": 2, "learners": 2})],
)
@pytest.mark.slow
def test_the_only_source_of_a_learner_is_at_most_one_iteration_behind(policy, counts):
    """It is one behind at first: it collects the second rollout while the learner compiles."""
    trained = train(graph_of("impala"), find_distribution(policy)(Counts(**counts, asynchronous=True)))
    assert len(trained.rows) == ITERATIONS
    assert max(row["policy_lag/max"] for row in trained.rows) == UPDATES


class Ages:
    """What a learner's iteration was when each rollout had been sent, and when it was taken."""

    def __init__(self):
        self.published, self.sent, self.taken = 0, {}, {}

    def watch(self, monkeypatch):
        publish, send = exchange.PublishWeights._publish, exchange.SendTrajectories.run
        gather = queue.QueueReceiver.gather

        def published(stage, version):
            publish(stage, version)
            self.published = version

        def sent(stage, state):
            after = send(stage, state)
            self.sent[stage._context.replica, state.iteration] = self.published
            return after

        def gathered(receiver, **options):
            found = gather(receiver, **options)
            self.taken |= {(header.source, header.iteration): self.published for header in found.headers}
            return found

        monkeypatch.setattr(exchange.PublishWeights, "_publish", published)
        monkeypatch.setattr(exchange.SendTrajectories, "run", sent)
        monkeypatch.setattr(queue.QueueReceiver, "gather", gathered)


def test_a_rollout_waits_for_one_iteration_though_another_source_is_slow(monkeypatch):
    """While the slow source collects, the learner goes on with the rollouts of the fast one."""
    ages, collect = Ages(), collecting.Collect.run

    def slowly(stage, state):
        deadline = time.monotonic() + 60
        while stage._context.replica == 1 and state.iteration == 1 and ages.published < 3 * ITERATIONS // 4:
            assert time.monotonic() < deadline, "the learner waits for the slow source"
            time.sleep(0.01)
        return collect(stage, state)

    ages.watch(monkeypatch)
    monkeypatch.setattr(collecting.Collect, "run", slowly)
    partition = find_distribution("single-learner-coarse")(Counts(actors=2, asynchronous=True))
    trained = train(graph_of("impala"), partition)
    assert len(ages.taken) == 2 * ITERATIONS == 2 * len(trained.rows)
    assert max(ages.taken[rollout] - ages.sent[rollout] for rollout in ages.taken) <= 1
    assert sum(source == 0 for source, _ in ages.taken) > ITERATIONS
    assert max(row["policy_lag/max"] for row in trained.rows) > 2 * UPDATES


class FinalOrder:
    """A control whose coordinator asks for the last state once it has heard of the last iteration."""

    def __init__(self, *, late):
        """`late` orders come only to who waits for them."""
        self.sent, self._late = [], late
        self.at, self.check, self.stopping = lambda note, expect=0.0: None, lambda: None, lambda: False
        self.answer, self.work, self.started = lambda kind, reply: None, self.at, lambda: None

    def send(self, kind, fields, arrays=None):
        self.sent.append((kind, fields["first" if kind == "IterationMetrics" else "iteration"]))

    def latest(self, kind):
        told = ("IterationMetrics", ITERATIONS - 1) in self.sent and kind == "SnapshotRequest" and not self._late
        return WorkerMessage("SnapshotRequest", {"iteration": ITERATIONS, "final": True}, {}) if told else None

    def wait(self, kind, timeout=None):
        self._late = False
        return self.latest(kind)


ENDED = [("IterationMetrics", ITERATIONS - 2), ("IterationMetrics", ITERATIONS - 1), ("SnapshotPart", ITERATIONS)]


def context_of(group, wire=None, control=None, **fields):
    """The context of a replica of asynchronous A3C with a parameter server."""
    graph = graph_of("a3c")
    partition = find_distribution("central")(Counts(actors=2, asynchronous=True))
    begin = Begin(restart=0, resets_environments=True, **{"first": 0, "attempt": 0, "generation": 0, **fields})
    spec = RunSpec(GraphRecipe(""), Plan(partition, "threads").to_json(), "cpu")
    return ReplicaContext(spec, begin, graph, roles(partition)[group], 0, wire, control)


@pytest.fixture
def updating():
    """Lets an update do the last two iterations of asynchronous workers; its thread, and senders of gradients."""

    def start(control):
        broker = LocalBroker()
        context = context_of("update", wire=MemoryWire(broker), control=control, first=ITERATIONS - 2)
        flows = context.flow
        thread = threading.Thread(target=run_parameter_server, args=(context,), daemon=True)
        thread.start()
        wire, layout = MemoryWire(broker), gradients_layout(flows)
        senders = [wire.sender("gradients", source=n, targets=[0], layout=layout) for n in range(2)]
        return thread, senders, layout.unflatten([np.zeros(leaf.shape, leaf.dtype) for leaf in layout.leaves])

    return start


@pytest.mark.parametrize(
    "starts",
    [
        [(0, 0, 0), (0, 0, 1), (0, 1, 0)],  # the first start, a replaced replica, a restart of all of them
        [(30, 1, 0), (60, 1, 0)],  # a run that is resumed twice
        [(30, 1, 1), (30, 2, 0)],
    ],
)
def test_environments_that_start_anew_repeat_no_earlier_episodes(starts):
    keys, numbers = set(), set()
    for first, generation, attempt in starts:
        context = context_of("actor", first=first, generation=generation, attempt=attempt)
        keys.add(bytes(jax.random.key_data(context.start_key)))
        numbers.add(context.start_number)
    assert len(keys) == len(numbers) == len(starts)
    assert (0 in numbers) == ((0, 0, 0) in starts)


def test_an_update_ends_though_gradients_never_cease(updating):
    """Asynchronous workers go on until they are ended, and that they are when the last state is there."""
    control = FinalOrder(late=False)
    thread, senders, gradients = updating(control)
    deadline = time.monotonic() + 30
    while thread.is_alive() and time.monotonic() < deadline:
        for sender in senders:
            with contextlib.suppress(TimedOut):
                sender.send(gradients, flags=LAST, timeout=0.0)
    assert not thread.is_alive()
    assert control.sent == ENDED


def test_an_update_waits_for_the_last_order_after_all_workers_have_closed(updating):
    """Between hosts they do, so that nothing is lost on the way."""
    control = FinalOrder(late=True)
    thread, senders, gradients = updating(control)
    for sender in senders:
        for _ in range(2):
            sender.send(gradients, flags=LAST, timeout=30.0)
        sender.close()
    thread.join(30.0)
    assert control.sent == ENDED


class EarlyOrder(FinalOrder):
    """A control whose coordinator asks for a state that lies ahead, and for the last one in the end."""

    def latest(self, kind):
        wanted = super().latest(kind)
        return wanted or (
            WorkerMessage("SnapshotRequest", {"iteration": ITERATIONS - 1}, {})
            if kind == "SnapshotRequest"
            else None
        )


def test_a_state_that_is_wanted_is_not_sent_before_its_iteration(updating):
    """However long no gradients come: a checkpoint is what it says."""
    control = EarlyOrder(late=False)
    thread, senders, gradients = updating(control)
    time.sleep(1.0)
    assert control.sent == []
    for sender in senders:
        for _ in range(2):
            sender.send(gradients, flags=LAST, timeout=30.0)
    thread.join(30.0)
    assert [entry for entry in control.sent if entry[0] == "IterationMetrics"] == ENDED[:2]
    assert control.sent.index(("SnapshotPart", ITERATIONS - 1)) > control.sent.index(
        ("IterationMetrics", ITERATIONS - 2)
    )

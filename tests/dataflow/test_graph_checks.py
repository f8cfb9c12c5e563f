"""Wrong functions of a graph are refused with a sentence that names the function, its call and its result."""

import jax
import jax.numpy as jnp
import pytest

import rollmill
from rollmill.core.errors import ContractError
from rollmill.dataflow import Batch, MeanGradients, fingerprint, init_state, iterate
from rollmill.training.training import check_algorithm
from wordings import raises
from workers.own_algorithm import reinforce


@pytest.fixture(scope="module")
def graph():
    return reinforce(rollmill.make("Probe-ActionObservation-v0"), iterations=1)


def learn_by(graph, loss):
    return graph._replace(gradients=MeanGradients(loss, lambda learner: learner["weights"]))


def weigh(weights, sample):
    return jnp.sum(weights["bias"]) * sample["gained"]


PARAMETERS = {
    "policy": lambda weights, key, memory, observation: None,
    "gradients": lambda learner: None,
    "update": lambda learner, gradients: learner,
    "prepare": lambda learner, trajectory: None,
    "condition": lambda minibatch: minibatch,
    "action_mask": lambda state, params: (),
    "start_memory": lambda key: (),
}


@pytest.mark.parametrize("field", PARAMETERS)
def test_wrong_parameters_are_refused(graph, field):
    with raises("takes-but-is-called-with", f"reinforce: {field} takes", __file__):
        check_algorithm(graph._replace(**{field: PARAMETERS[field]}))


def test_parameters_of_a_loss_are_part_of_the_check(graph):
    with raises("takes-but-is-called-with", "(network, learner, sample, sequence)"):
        check_algorithm(learn_by(graph, lambda weights, learner, sample: None))


@pytest.mark.parametrize(
    "sizes, code, values",
    [
        ({"num_envs": -3}, "in-graphs-loops-must-be", ("num_envs=-3",)),
        ({"iterations": 0}, "in-graphs-loops-must-be", ("iterations=0",)),
        ({"num_shards": 0}, "in-graphs-loops-must-be", ("num_shards=0",)),
        ({"num_envs": 3}, "num-shards-in-graphs-loops", ("num_shards=4", "num_envs=3", "multiple of 4")),
        ({"num_minibatches": 5}, "shard-has-cannot-be-divided", ("16 samples", "num_minibatches=5")),
        ({"num_minibatches": 4, "minibatch_items": "sequences"}, "shard-has-cannot-be-divided", ("2 sequences",)),
    ],
)
def test_impossible_sizes_of_loops_are_refused(graph, sizes, code, values):
    with raises(code, "reinforce: ", *values):
        check_algorithm(graph._replace(loops=graph.loops._replace(**sizes)))


def test_a_loss_is_a_scalar(graph):
    def loss(weights, learner, sample, sequence):
        return jnp.full(2, weigh(weights, sample)), {}

    with raises("loss-one-sample-is-expected", "float32[2]"):
        fingerprint(learn_by(graph, loss))


def test_a_loss_without_gradients_is_refused(graph):
    def stopped(weights, learner, sample, sequence):
        return jax.lax.stop_gradient(weigh(weights, sample)), {}

    with raises("loss-does-not-depend-on", "stop_gradient"):
        fingerprint(learn_by(graph, stopped))
    ppo = rollmill.ppo(
        "CartPole-v1",
        num_envs=4,
        num_steps=8,
        total_timesteps=32,
        network=rollmill.NetworkConfig(hidden_sizes=(4,)),
    )
    loss = lambda *args: (jnp.float32(0.5), {})
    with raises("loss-does-not-depend-on"):
        fingerprint(ppo._replace(gradients=MeanGradients(loss, ppo.gradients.network)))


@pytest.mark.parametrize("change", [lambda gained: gained.T, lambda gained: gained.reshape(2, -1)])
def test_a_batch_with_other_axes_and_as_many_samples_is_refused(graph, change):
    def prepare(learner, trajectory, *, reduce, replicas):
        learner, batch = graph.prepare(learner, trajectory, reduce=reduce, replicas=replicas)
        return learner, Batch({**batch.samples, "gained": change(batch.samples["gained"])})

    changed = graph._replace(prepare=prepare, loops=graph.loops._replace(num_steps=4))
    index = jnp.arange(changed.loops.num_envs, dtype=jnp.int32)
    with raises("prepare-returned-as-expected-leading", "gained"):
        jax.eval_shape(lambda: iterate(changed, init_state(changed, jax.random.key(0), index)))


def test_metrics_of_a_loss_are_scalars(graph):
    def loss(weights, learner, sample, sequence):
        return weigh(weights, sample), {"each": jnp.zeros(3)}

    with raises("metric-gradients-is-expected-scalar", "'each'", "float32[3]"):
        fingerprint(learn_by(graph, loss))


@pytest.mark.parametrize("metric", [None, {"part": jnp.zeros(())}, "text"])
def test_metrics_are_numbers(graph, metric):
    def loss(weights, learner, sample, sequence):
        return weigh(weights, sample), {"each": metric}

    with raises("metric-gradients-is-expected-scalar", "'each'"):
        fingerprint(learn_by(graph, loss))


@pytest.mark.parametrize("name", ["env_steps", "episode/return", "losses/gradient_norm", "finite/mine", 3])
def test_metrics_do_not_replace_those_of_every_run(graph, name):
    def loss(weights, learner, sample, sequence):
        return weigh(weights, sample), {name: jnp.zeros(())}

    with raises("returned-metric-called-expected-string", repr(name), "gradients"):
        fingerprint(learn_by(graph, loss))
    with raises("returned-metric-called-expected-string", repr(name), "report"):
        fingerprint(graph._replace(report=lambda learner, batch: {name: jnp.zeros(())}))


def test_a_metric_does_not_replace_the_loss(graph):
    def loss(weights, learner, sample, sequence):
        return weigh(weights, sample), {"losses/total": jnp.zeros(())}

    with raises("loss-one-sample-returned-metric", "'losses/total'"):
        fingerprint(learn_by(graph, loss))


def test_a_reported_metric_is_not_lost_to_one_of_the_loss(graph):
    def loss(weights, learner, sample, sequence):
        return weigh(weights, sample), {"losses/mine": jnp.zeros(())}

    for name in ("losses/mine", "losses/total"):
        reporting = learn_by(graph, loss)._replace(report=lambda learner, batch, name=name: {name: jnp.zeros(())})
        with raises("report-returned-metric-called-gradients", repr(name)):
            fingerprint(reporting)


def test_a_loss_returns_metrics(graph):
    with raises("loss-one-sample-returned-expected", "float32[]"):
        fingerprint(learn_by(graph, lambda weights, learner, sample, sequence: weigh(weights, sample)))


def without_learner(graph):
    return lambda *args, **named: graph.prepare(*args, **named)[1]


def with_short_samples(graph):
    return lambda learner, *args, **named: (learner, Batch({"gained": jnp.zeros(3)}))


def with_other_memory(graph):
    return lambda *args: graph.policy(*args)._replace(memory=jnp.zeros(2))


RESULTS = {
    "policy returned the action float32[2]": ("policy", lambda graph: _acting(graph, jnp.zeros(2))),
    "policy returned the action float, expected int32[]": ("policy", lambda graph: _acting(graph, 0.5)),
    "reinforce: policy returned a tuple of 3": ("policy", lambda graph: lambda *args: (jnp.int32(0), (), ())),
    "reinforce: the memory of policy is float32[2]": ("policy", with_other_memory),
    "reinforce: greedy returned NoneType": ("greedy", lambda graph: lambda *args: None),
    "reinforce: update raised": ("gradients", lambda graph: lambda learner, minibatch: (learner, {})),
    "reinforce: the learner of update is": ("update", lambda graph: lambda learner, slopes, share=1.0: slopes),
    "reinforce: prepare returned Batch": ("prepare", without_learner),
    "reinforce: prepare returned samples['gained'] as float32[3], expected": ("prepare", with_short_samples),
    "reinforce: condition returned NoneType": ("condition", lambda graph: lambda minibatch, reduce: None),
    "reinforce: environment returned a tuple": (
        "environment",
        lambda graph: lambda *args: (args, 0),
    ),
}


@pytest.mark.parametrize("text", RESULTS)
def test_wrong_results_are_attributed_to_their_function(graph, text):
    field, wrong = RESULTS[text]
    with pytest.raises(ContractError) as raised:
        fingerprint(graph._replace(**{field: wrong(graph)}))
    assert str(raised.value).startswith(text)


def test_an_exception_with_another_cause_is_not_changed(graph):
    calls = []

    def weights(learner):  # fails in an iteration alone
        calls.append(learner)
        if len(calls) == 1:
            raise RuntimeError("first call")
        return graph.weights(learner)

    with pytest.raises(RuntimeError, match="first call"):
        fingerprint(graph._replace(weights=weights))


def _acting(graph, action):
    return lambda *args: graph.policy(*args)._replace(action=action)


def test_graphs_of_the_package_pass(graph):
    check_algorithm(graph)
    check_algorithm(rollmill.dqn("CartPole-v1"))
    assert jax.eval_shape(graph.start_memory) == ()

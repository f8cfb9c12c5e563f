"""Parameters of environments that options set: by value, and as inputs of programs instead of constants."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rollmill
from rollmill.core.errors import UsageError
from rollmill.dataflow import init_state, iterate
from rollmill.programs.evaluation.compiled import evaluator
from rollmill.programs.states import start_state
from wordings import raises

TINY = {"num_envs": 4, "num_steps": 8, "total_timesteps": 64, "network": rollmill.NetworkConfig(hidden_sizes=(4,))}


def graph_of(**options):
    return rollmill.ppo(rollmill.make("CartPole-v1", **options), num_minibatches=1, **TINY)


def lowered(graph) -> str:
    """The start and one iteration as text."""
    index = jnp.arange(graph.loops.num_envs, dtype=jnp.int32)
    begin = lambda seed, held: init_state(graph, jax.random.key(seed), index, held)
    inputs = jnp.uint32(0), {name: jnp.float32(value) for name, value in graph.inputs.items()}
    step = jax.jit(partial(iterate, graph)).lower(jax.eval_shape(begin, *inputs))
    return jax.jit(begin).lower(*inputs).as_text() + step.as_text()


def test_programs_contain_no_parameter_that_was_set():
    first, other = graph_of(gravity=12, reset_bound=0.02), graph_of(gravity=3.7, reset_bound=0.04)
    assert first.parameters == {"gravity": 12.0, "reset_bound": 0.02}
    assert lowered(first) == lowered(other)
    assert lowered(first) != lowered(graph_of())


@pytest.mark.parametrize("gravity", [9.8, 3.7])
def test_a_step_follows_the_held_gravity(gravity):
    """Without force, the angular acceleration is that of Barto, Sutton and Anderson's equation."""
    graph = graph_of(gravity=gravity, force=0, reset_bound=0.2)
    begun = start_state(graph).collector
    assert begun.environment[2]["gravity"].tolist() == [np.float32(gravity)] * 4
    after = jax.vmap(graph.environment, in_axes=(None, 0, None))(
        jax.random.key(0), begun.environment, jnp.int32(0)
    )
    _, _, angle, velocity = np.asarray(begun.observation, np.float64).T
    push = 0.05 * velocity**2 * np.sin(angle) / 1.1
    inertia = 0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / 1.1)
    expected = velocity + 0.02 * (gravity * np.sin(angle) - np.cos(angle) * push) / inertia
    np.testing.assert_allclose(after.info["final_observation"][:, 3], expected, rtol=1e-5)


@pytest.mark.parametrize("episodes", [3])
def test_an_evaluation_has_the_parameters_of_the_training(episodes):
    """Poles without gravity and force stay in their limits for the whole episode; a schedule is at its end."""
    unmoved = {"force": 0, "reset_bound": 0.001, "max_steps": 30}
    still, later = graph_of(gravity=0, **unmoved), graph_of(gravity="linear:1000:0", **unmoved)
    lengths = [
        evaluator(graph, graph.weights(start_state(graph).learner), episodes=episodes, seed=0)(
            graph.weights(start_state(graph).learner)
        ).lengths
        for graph in (still, later, graph_of())
    ]
    assert (lengths[0] == 30).all() and (lengths[1] == 30).all() and not (lengths[2] == 30).all()


def test_what_cannot_be_traced_stays_a_constant():
    def step(key, state, action, params):
        assert params.pole_mass > 0  # a condition of Python
        return own.step(key, state, action, params)

    own = rollmill.make("CartPole-v1", pole_mass=0.2, gravity=5)
    with pytest.warns(UserWarning, match="pole_mass determines shapes or code in CartPole-v1"):
        graph = rollmill.ppo(own._replace(step=step), num_minibatches=1, **TINY)
    assert graph.parameters == {"gravity": 5.0}
    follows = rollmill.make("CartPole-v1", pole_mass="linear:0.1:0.2")
    with raises("cannot-change", "pole_mass", "linear:0.1:0.2", "shapes or code in CartPole-v1"):
        rollmill.ppo(follows._replace(step=step), num_minibatches=1, **TINY)


def test_a_whole_number_keeps_its_type():
    graph = rollmill.mappo(rollmill.make("TagGridWorld-Small-v0", grid_length=30), num_minibatches=1, **TINY)
    states = jax.eval_shape(graph.start_environment, jax.random.key(0), jnp.int32(0))[0]
    assert graph.parameters == {"grid_length": 30.0} and states[2]["grid_length"].dtype == jnp.float32
    first = start_state(graph).collector.observation
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(first))


def gravities(graph, iterations: int) -> list[np.ndarray]:
    """The gravity of each environment's step, found from its angular velocity, in the first step of iterations."""
    state, found = start_state(graph), []
    step = jax.jit(partial(iterate, graph))
    for _ in range(iterations):
        begun = state.collector
        after = jax.vmap(graph.environment, in_axes=(None, 0, None))(
            jax.random.key(0), begun.environment, jnp.int32(0)
        )
        _, _, angle, velocity = np.asarray(begun.observation, np.float64).T
        inertia = 0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / 1.1)
        push = 0.05 * velocity**2 * np.sin(angle) / 1.1
        change = (np.asarray(after.info["final_observation"][:, 3], np.float64) - velocity) / 0.02
        found.append((change * inertia + np.cos(angle) * push) / np.sin(angle))
        state, _ = step(state)
    return found


def test_a_parameter_follows_its_schedule_step_by_step():
    """An iteration is eight of sixteen steps: gravity goes from 10 to 20, and is 15 after one iteration."""
    graph = graph_of(gravity="linear:10:20", force=0, reset_bound=0.2)
    first, second = gravities(graph, 2)
    np.testing.assert_allclose(first, 10, rtol=1e-3)
    np.testing.assert_allclose(second, 15, rtol=1e-3)
    assert lowered(graph) == lowered(graph_of(gravity="linear:5:6", force=1, reset_bound=0.1))
    _, held, steps = graph.start_environment(jax.random.key(0), jnp.int32(0))[0][1:]
    assert (
        int(steps) == int(held["planned_steps"]) == 16
    )  # beside a training, as in evaluations, it has its last value


def test_a_distribution_is_drawn_from_for_each_episode():
    graph = graph_of(gravity="uniform:5:15", force=0, reset_bound=0.2, pole_mass=0.1)
    (drawn,) = gravities(graph, 1)
    assert ((drawn > 4.99) & (drawn < 15.01)).all() and drawn.std() > 0.1
    assert lowered(graph) == lowered(graph_of(gravity="uniform:1:2", force=1, reset_bound=0.1, pole_mass=0.2))
    assert rollmill.make("CartPole-v1", gravity="uniform:5:15").params.gravity == 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gravty": 3.7}, "CartPole-v1 has no option 'gravty'. Did you mean gravity?"),
        ({"gravity": "low"}, "CartPole-v1: gravity='low' must be of type float"),
        ({"gravity": "linear:1"}, "CartPole-v1: gravity='linear:1' must be a number or a schedule"),
        ({"gravity": "uniform:nan:1"}, "gravity='uniform:nan:1' must be uniform:LOW:HIGH, with finite numbers"),
        ({"gravity": "uniform:1"}, "gravity='uniform:1' must be uniform:LOW:HIGH, with finite numbers"),
        ({"gravity": "uniform:2:1"}, "CartPole-v1: gravity='uniform:2:1' has a lower bound above its upper bound"),
        ({"gravity": float("inf")}, "CartPole-v1: gravity=inf must be finite"),
    ],
)
def test_other_values_are_refused_by_name(options, message):
    with pytest.raises(UsageError, match=message.replace("?", r"\?")):
        rollmill.make("CartPole-v1", **options)


def test_parameters_given_twice_are_refused():
    env = rollmill.make("CartPole-v1", gravity=3.7)
    with raises("was-made-with-and-params", "CartPole-v1", "gravity"):
        rollmill.ppo(env, params=env.params)

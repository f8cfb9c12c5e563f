"""Behaviour cloning: trains initial weights to imitate recorded actions (Pomerleau, "ALVINN", 1989).

For discrete actions, the loss is the negative log-probability of the recorded action. For continuous actions, it
is the squared error of the most likely action, which does not train the standard deviation. The critic learns the
returns of the recorded episodes, which bootstrap from the last observation of a truncated episode. Running
statistics of observations, rewards and values are initialised from the recording.

Shape letter: `N` transitions.
"""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from gymnasium import spaces
from jaxtyping import Array, Bool, Float, Int, PyTree

from rollmill.algorithms.network_policy import PolicyWeights
from rollmill.core.errors import UsageError
from rollmill.core.spaces import contains, space_text, struct
from rollmill.core.types import Key
from rollmill.dataflow import Graph
from rollmill.envs import scale, update_statistics
from rollmill.gpus.jax_settings import check_compiled
from rollmill.programs.cache import enable_compilation_cache
from rollmill.programs.states import begin_learner
from rollmill.record.transitions import read_transitions, sha256_of_file

UPDATES, BATCH, RATE = 2_000, 256, 1e-3
"""Defaults of behaviour cloning: number of Adam steps, transitions per step, and the learning rate, which falls
linearly to zero."""

MASKED = -1e6
"""Log-probability below which an action counts as illegal."""


class Demonstrations(NamedTuple):
    """Recorded transitions in the form in which behaviour cloning learns from them."""

    observation: PyTree[Array]
    action: PyTree[Array]
    action_mask: PyTree[Bool[Array, "N ..."]]
    """Legal actions of each transition, or `()` if all actions are legal."""
    target: Float[Array, " N"]
    """Discounted return from each transition to the end of its episode, without the last reward of a truncated
    episode."""
    bootstrap: Float[Array, " N"]
    """Discount of the value of the last observation in a truncated episode, which adds to the return, or 0 if the
    episode terminates."""
    last: Int[Array, " N"]
    """Index of the last transition of the episode."""
    so_far: Float[Array, " N"]
    """Discounted sum of the rewards of each episode up to each transition, by which rewards are normalised."""


class Cloned(NamedTuple):
    """A learner state after behaviour cloning from a recording."""

    learner: Any
    transitions: int
    digest: str
    """SHA-256 of the recording."""
    agreement: float
    """Share of the recorded actions that are the most likely ones after cloning. For continuous actions, the mean
    squared error in units of half the action range."""


def clone(graph: Graph, file: Path, *, seed: int, updates: int) -> Cloned:
    """Trains the initial learner state of one seed to imitate the actions in a recording.

    Raises a `UsageError` if behaviour cloning does not support the algorithm's policy, or if the recording has
    other observation or action spaces.
    """
    check_compiled()
    enable_compilation_cache()
    key = jax.random.key(seed)
    _check(graph, jax.eval_shape(graph.start_learner, key))
    digest, shown = sha256_of_file(file), demonstrations(graph, file)
    learner = begin_learner(graph, key)  # compiled last: a refusal does not wait for it
    if learner.returns is not None:  # the critic values normalised rewards
        returns = update_statistics(learner.returns, shown.so_far)
        learner = eqx.tree_at(lambda learner: learner.returns, learner, returns)
        shown = shown._replace(target=scale(returns, shown.target))
    weights = _with_statistics(learner.weights, shown)
    _check_legal(graph, file, weights, shown)
    learn = jax.jit(partial(_learn, graph))
    network = learn(weights, shown, jax.random.fold_in(key, 1), jnp.int32(updates))
    weights = eqx.tree_at(lambda weights: weights.network, weights, network)
    agreement = float(jax.jit(partial(_agreement, graph))(weights, shown))
    learner = eqx.tree_at(lambda learner: learner.weights, learner, weights)
    return Cloned(learner, len(shown.target), digest, agreement)


def _check(graph: Graph, learner: Any) -> None:
    """Raises a `UsageError` for an algorithm, a network or actions that cannot learn from a file."""
    name = graph.settings["algorithm"]
    if not isinstance(getattr(learner, "weights", None), PolicyWeights) or graph.outputs.searches:
        raise UsageError(f"clone supports only ppo, a2c, a3c and impala, not {name}. hint: leave it out.")
    if jax.tree.leaves(graph.start_memory()):
        raise UsageError(
            "clone needs a policy without memory, but this network has a memory. hint: use another torso."
        )
    if not isinstance(
        graph.action_space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary
    ):
        raise UsageError(
            f"clone does not support actions with several parts, got {space_text(graph.action_space)}."
        )


def _check_legal(graph: Graph, file: Path, weights: PolicyWeights, shown: Demonstrations) -> None:
    """Raises a `UsageError` if a recorded action is illegal in its state: no weights make it likely."""
    if not jax.tree.leaves(shown.action_mask):
        return
    probable = jax.jit(jax.vmap(lambda row: _distribution(graph, weights, row).log_prob(row.action)))(shown)
    legal = np.asarray(probable) > MASKED
    if not legal.all():
        raise UsageError(
            f"{file}: the action of transition {int(np.argmin(legal))} is illegal according to its action_mask."
        )


def demonstrations(graph: Graph, file: Path) -> Demonstrations:
    """Reads the transitions of a recording. Raises a `UsageError` if their observations or actions do not fit the
    spaces of the graph.
    """
    expected = {"observation": struct(graph.observation_space), "action": struct(graph.action_space)}
    state = jax.eval_shape(graph.start_environment, jax.random.key(0), jnp.int32(0))[0]
    mask = jax.eval_shape(graph.action_mask, state)
    if jax.tree.leaves(mask):
        expected["action_mask"] = mask
    rows = read_transitions(file, expected)
    inside = np.asarray(jax.vmap(partial(contains, graph.action_space))(jnp.asarray(rows["action"])))
    if not inside.all():
        place = int(np.argmin(inside))
        wrong = rows["action"][place]
        raise UsageError(
            f"{file}: the action of transition {place} is {wrong}, which is not in "
            f"{space_text(graph.action_space)}."
        )
    # With normalised rewards, gamma is part of the programs. A schedule has its first value in `hyperparameters`.
    gamma = graph.hyperparameters.get("gamma") or graph.settings.get("config", {}).get("gamma", 1.0)
    ends = rows["terminated"] | rows["truncated"]
    ends[-1] = True
    # The observation after a truncated episode is not recorded, so its return goes up to the last observation.
    is_cut = ends & ~rows["terminated"]
    sums = {
        "target": discounted_returns(np.where(is_cut, 0, rows["reward"]), ends, gamma),
        "bootstrap": discounted_returns(is_cut.astype(np.float32), ends, gamma),
        "last": np.flatnonzero(ends)[np.cumsum(ends) - ends].astype(np.int32),
        "so_far": accumulate_rewards(rows["reward"], ends, gamma),
    }
    parts = rows["observation"], rows["action"], rows.get("action_mask", ())
    return Demonstrations(*jax.tree.map(jnp.asarray, parts), **jax.tree.map(jnp.asarray, sums))


def discounted_returns(
    reward: Float[np.ndarray, " N"], ends: Bool[np.ndarray, " N"], gamma: float
) -> Float[np.ndarray, " N"]:
    """Returns the discounted sum of the rewards from each transition to the end of its episode."""
    result, after = np.empty(len(reward), np.float32), 0.0
    for place in range(len(reward) - 1, -1, -1):
        after = float(reward[place]) + gamma * after * (not ends[place])
        result[place] = after
    return result


def accumulate_rewards(
    reward: Float[np.ndarray, " N"], ends: Bool[np.ndarray, " N"], gamma: float
) -> Float[np.ndarray, " N"]:
    """Returns `R = gamma R + r` after each transition, as `envs.record_discounted_returns` does."""
    result, before = np.empty(len(reward), np.float32), 0.0
    for place in range(len(reward)):
        result[place] = before = float(reward[place]) + gamma * before
        before *= not ends[place]
    return result


# --- learning -----------------------------------------------------------------------------------------


def _with_statistics(weights: PolicyWeights, shown: Demonstrations) -> PolicyWeights:
    """Updates the statistics of observations and values, if there are any, with all transitions."""
    observations, values = weights.observations, weights.values
    if observations is not None:
        observations = update_statistics(observations, shown.observation)
    if values is not None:
        values = update_statistics(values, shown.target)
    return PolicyWeights(weights.network, observations, values)


def _learn(
    graph: Graph, weights: PolicyWeights, shown: Demonstrations, key: Key, updates: Int[Array, ""]
) -> PyTree[Array]:
    """Returns the network after `updates` steps of Adam on minibatches drawn from the transitions."""
    value_of, optimiser = graph.outputs.value, optax.scale_by_adam()
    count, scale = len(shown.target), jnp.std(shown.target) + 1e-6
    assert value_of is not None

    def loss(network: PyTree[Array], batch: Demonstrations) -> Float[Array, ""]:
        now = eqx.tree_at(lambda weights: weights.network, weights, network)
        values = jax.vmap(lambda seen: value_of(now, (), seen))
        errors = jax.vmap(partial(_error, graph, now))(batch)
        last = jax.lax.stop_gradient(values(jax.tree.map(lambda leaf: leaf[batch.last], shown.observation)))
        target = batch.target + batch.bootstrap * last
        # The target of a last observation is its own value, so it contributes no gradient.
        value = values(batch.observation)
        return jnp.mean(errors) + 0.5 * jnp.mean(jnp.square((value - target) / scale))

    def update(step: Int[Array, ""], carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        network, state = carry
        drawn = jax.random.randint(jax.random.fold_in(key, step), (BATCH,), 0, count)
        gradients = jax.grad(loss)(network, jax.tree.map(lambda leaf: leaf[drawn], shown))
        with jax.numpy_dtype_promotion("standard"):  # Optax relies on type promotion
            changes, state = optimiser.update(gradients, state)
            rate = RATE * (1 - step / updates)
            return jax.tree.map(lambda old, change: old - rate * change, network, changes), state

    start = weights.network, optimiser.init(weights.network)
    return jax.lax.fori_loop(0, updates, update, start)[0]


def _error(graph: Graph, weights: PolicyWeights, row: Demonstrations) -> Float[Array, ""]:
    """Returns the loss of ONE transition."""
    distribution = _distribution(graph, weights, row)
    if isinstance(graph.action_space, spaces.Box):
        return jnp.mean(_deviation(graph.action_space, distribution.mode(), row.action))
    return -distribution.log_prob(row.action)


def _distribution(graph: Graph, weights: PolicyWeights, row: Demonstrations) -> Any:
    assert graph.outputs.distribution is not None
    return graph.outputs.distribution(weights, (), row.observation, row.action_mask)


def _deviation(space: spaces.Box, action: Float[Array, "*shape"], shown: Array) -> Float[Array, "*shape"]:
    """Returns squared differences, in units of half the range for bounded actions."""
    half = np.where(np.isfinite(space.low) & np.isfinite(space.high), 0.5 * (space.high - space.low), 1.0)
    return jnp.square((action - shown) / half.astype(np.float32))


def _agreement(graph: Graph, weights: PolicyWeights, shown: Demonstrations) -> Float[Array, ""]:
    def one(row: Demonstrations) -> Float[Array, ""]:
        distribution = _distribution(graph, weights, row)
        if isinstance(graph.action_space, spaces.Box):
            return jnp.mean(_deviation(graph.action_space, distribution.mode(), row.action))
        return jnp.all(distribution.mode() == row.action).astype(jnp.float32)

    return jnp.mean(jax.vmap(one)(shown))

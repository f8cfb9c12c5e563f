"""Shared parts of algorithms that learn from a replay memory.

Shape letter: `N` samples of a minibatch.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from gymnasium import spaces
from jaxtyping import Array, Bool, Float, Integer, PyTree

from rollmill.algorithms.building import (
    Choices,
    assemble_graph,
    environment_parts,
    numbers_to_hold,
    optimiser_of,
    schedule_of,
    validate_config,
    with_layout,
)
from rollmill.algorithms.environment_fragments import EnvironmentFunctions
from rollmill.algorithms.hyperparameters import Number, current_hyperparameters
from rollmill.algorithms.network_policy import weights_and_rest
from rollmill.algorithms.on_policy import no_condition
from rollmill.algorithms.optimisers import Optimiser, rate_now
from rollmill.algorithms.sizes import check_positive, iterations_for
from rollmill.core.bounds import Count, Range, Rate, Scheduled, ScheduledFraction, ScheduledPositive
from rollmill.core.errors import UsageError
from rollmill.core.field_help import with_field_help
from rollmill.core.schema import check_fields
from rollmill.core.spaces import space_text
from rollmill.core.types import (
    Action,
    Environment,
    GymnasiumObject,
    HostEnvironment,
    Key,
    Memory,
    Observation,
    Params,
    StartHost,
)
from rollmill.dataflow import (
    MAX_ROWS,
    Batch,
    ExperienceStore,
    Graph,
    Learner,
    Loops,
    Metrics,
    PolicyOutputs,
    Reduce,
    Replay,
    Trajectory,
    waiting_iterations,
)
from rollmill.networks import MASKED_LOGIT, Categorical, NetworkConfig

MAX_SHARDS = 64

MAX_STORED = 2**31 - 1
"""Maximum number of rows in a replay memory, whose indices have 32 bits."""


@with_field_help
@dataclass(frozen=True)
class OffPolicyConfig:
    """Hyperparameters that SAC, TD3 and DDPG have in common, named as in the literature."""

    total_timesteps: Count = 1_000_000
    """Number of environment steps of the whole run, over all environments."""
    num_envs: Count = 8
    """Number of parallel environments."""
    num_steps: Count = 1
    """Number of steps of each environment in one iteration, before `gradient_steps` updates."""
    gradient_steps: Count | None = None
    """Number of updates in one iteration. Default: one for each collected environment step, `num_envs` x
    `num_steps`."""
    buffer_size: Count = 1_000_000
    """Number of steps that the replay memory holds, over all environments."""
    batch_size: Count = 256
    """Number of transitions in the minibatch of one update."""
    learning_starts: Count = 10_000
    """Number of environment steps with random actions that are stored before learning begins."""
    learning_rate: Rate = 3e-4
    """Learning rate of Adam for the actor. If it is annealed, this is the initial value."""
    anneal_lr: bool = False
    """Anneal learning rates linearly to zero over all planned updates."""
    adam_eps: ScheduledPositive = 1e-8
    """Epsilon of Adam."""
    max_grad_norm: Annotated[Scheduled, Range(0, finite=False)] = float("inf")
    """Maximum global norm of each network's gradients. Gradients with a larger norm are scaled down to it."""
    gamma: ScheduledFraction = 0.99
    """Discount factor."""
    tau: ScheduledFraction = 0.005
    """Fraction by which the target networks move towards the networks at each update."""
    num_shards: Count | None = None
    """Number of logical shards within which transitions are drawn, a multiple of the device count. Default:
    automatic."""
    network: NetworkConfig = field(
        default_factory=partial(NetworkConfig, activation="relu", hidden_sizes=(256, 256))
    )
    """Network of the actor, and of each critic."""

    def __post_init__(self) -> None:
        check_fields(self)


class OffPolicyParts(NamedTuple):
    """Checked inputs of the graph of an algorithm with a replay memory."""

    env: Environment | HostEnvironment
    environment: EnvironmentFunctions
    host: StartHost | None
    config: Any
    """Hyperparameters, with automatic choices resolved by the environment's spaces."""
    choices: Choices
    custom: list[str]
    loops: Loops
    replay: Any
    """The experience store, of the type that the algorithm made."""


MAX_INTERVAL = 2**31 - 1
"""Maximum number of updates between two events of a schedule, which are counted in 32 bits."""

_WORD = 2**32


class StepCounts(eqx.Module):
    """Counts of steps and updates in a learner, on which schedules depend. They never overflow."""

    env_steps: Integer[Array, ""]
    """Environment steps of all environments so far, modulo 2^32, counted by `prepare`."""
    updates: Integer[Array, ""]
    """Updates so far, counted by `update`. From 2^32 on, a multiple of the algorithm's interval is subtracted."""
    env_step_wraps: Integer[Array, ""] = eqx.field(default_factory=lambda: jnp.uint32(0))
    """How often `env_steps` has reached 2^32."""

    @property
    def updates_done(self) -> Float[Array, ""]:
        """Number of updates made so far, on which schedules depend."""
        return self.updates.astype(jnp.uint32).astype(jnp.float32)

    def fraction_of(self, steps: Number) -> Float[Array, ""]:
        """Returns the number of environment steps so far as a fraction of `steps`, at most 1."""
        high, low = (word.astype(jnp.float32) for word in (self.env_step_wraps, self.env_steps))
        return jnp.minimum((high * float(_WORD) + low) / steps, 1)

    def is_before(self, step: int) -> Bool[Array, ""]:
        """Returns whether fewer than `step` environment steps have been made."""
        wraps, rest = divmod(step, _WORD)
        if wraps >= _WORD:
            return jnp.asarray(True)
        high, low = (word.astype(jnp.uint32) for word in (self.env_step_wraps, self.env_steps))
        return (high < jnp.uint32(wraps)) | ((high == jnp.uint32(wraps)) & (low < jnp.uint32(rest)))


class FunctionalNetwork(NamedTuple):
    """A neural network as functions of its weights."""

    make: Callable[[Key], Any]
    static: PyTree
    """Parts of the network that are not weights, such as functions and sizes."""

    def init(self, key: Key) -> PyTree[Array]:
        """Returns the initial weights of the network."""
        return eqx.filter(self.make(key), eqx.is_inexact_array)

    def network(self, weights: PyTree[Array]) -> Any:
        """Returns the network with these weights."""
        return eqx.combine(weights, self.static)

    def start_memory(self) -> Memory:
        """Returns the memory of a network at the start of an episode, or `()` for a network without memory."""
        shapes = jax.eval_shape(self.init, jax.random.key(0))
        zeros = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
        return self.network(zeros).initial_memory()

    def __call__(self, weights: PyTree[Array], *inputs: Any) -> Any:
        """Returns the network's output for one observation."""
        return self.network(weights)(*inputs)

    def advance(self, weights: PyTree[Array], memory: Memory, observation: Observation) -> tuple[Array, Memory]:
        """Returns the outputs of a recurrent network for one observation, and the next memory."""
        return self.network(weights).advance(observation, memory)


def functional_network(make: Callable[[Key], Any]) -> FunctionalNetwork:
    """Creates a `FunctionalNetwork` from a function that creates the network from a random key."""
    return FunctionalNetwork(make, weights_and_rest(make)[1])


def check_replay(config: Any, replay: Replay, loops: Loops) -> None:
    """Checks that a memory of single steps can be used. Raises a `UsageError` with sizes that would fit."""
    check_stored(config, loops, steps_each=replay.capacity, steps_before=_each(replay, loops))
    least = 2 * loops.num_steps + replay.n_step + 1
    if replay.capacity < least:
        raise UsageError(
            f"buffer_size={config.buffer_size} holds {replay.capacity} steps of each of "
            f"num_envs={loops.num_envs} environments, but num_steps={loops.num_steps} needs at least {least}. "
            f"hint: use buffer_size={least * loops.num_envs} or more."
        )
    if replay.minibatch_size > replay.learning_starts:
        raise UsageError(
            f"batch_size={replay.minibatch_size} is larger than learning_starts={replay.learning_starts}, the "
            f"number of steps stored when learning begins. hint: use learning_starts={replay.minibatch_size} or "
            "more."
        )
    if replay.minibatch_size + loops.num_envs > config.buffer_size:
        raise UsageError(
            f"batch_size={replay.minibatch_size} is larger than buffer_size={config.buffer_size} allows. hint: "
            f"use buffer_size={replay.minibatch_size + loops.num_envs} or more."
        )


def check_stored(config: Any, loops: Loops, *, steps_each: int, steps_before: int) -> None:
    """Checks that a replay memory is not too large, and that learning begins before training ends.

    Raises a `UsageError` that names the invalid sizes, and sizes that would fit.
    """
    if config.buffer_size > MAX_STORED:
        raise UsageError(
            f"buffer_size={config.buffer_size} exceeds the limit of {MAX_STORED} steps for a replay memory."
        )
    for name, steps in {"buffer_size": steps_each, "learning_starts": steps_before}.items():
        if steps > MAX_ROWS:
            raise UsageError(
                f"{name}={getattr(config, name)} means {steps} steps in each of num_envs={loops.num_envs} "
                f"environments, more than the limit of {MAX_ROWS}. hint: use {name}={MAX_ROWS * loops.num_envs} "
                "or less, or more environments."
            )
    if config.learning_starts > config.total_timesteps:
        raise UsageError(
            f"learning_starts={config.learning_starts} must be less than "
            f"total_timesteps={config.total_timesteps}, or nothing is learned."
        )


def prepare_off_policy(
    kind: type[Any],
    env: Environment | HostEnvironment | GymnasiumObject | str,
    config: Any,
    overrides: dict[str, Any],
    *,
    params: Params | None,
    network: NetworkConfig | str | None,
    replay: Callable[[Any], ExperienceStore] | None = None,
    check: Callable[[Any, Any, Loops], None] = check_replay,
    steps_per_update: int = 1,
    prepare_environment: Callable[..., Any] = environment_parts,
) -> OffPolicyParts:
    """Checks the inputs of an algorithm with a replay memory, and prepares them for a graph.

    `config` is an instance of `kind`, or a dictionary of some of its fields. `overrides` replace fields. `params`
    replaces the environment's parameters, and `network` replaces `config.network`. `replay` creates the replay
    memory from the hyperparameters. By default, the memory holds single steps and draws them uniformly. `check`
    checks the hyperparameters, the memory and the loops. If `gradient_steps` is None, there is one update for
    every `steps_per_update` environment steps. The default of 1 follows the papers of SAC and TD3.
    `prepare_environment` checks and prepares the environment. By default, it rejects several agents. Raises a
    `UsageError` for invalid names, types or sizes, and for an unsupported environment.
    """
    config, choices = validate_config(kind, env, config, network, overrides)
    refuse_network(choices)
    made, environment, host = prepare_environment(env, config, params=params, final_mask=True)
    config = with_layout(config, made)
    memory = (replay or uniform_replay)(config)
    loops = _loops_of(config, steps_per_update)
    check(config, memory, loops)
    return OffPolicyParts(
        made, environment, host, config, choices, choices.made_in_python(params=params), loops, memory
    )


def refuse_network(choices: Choices) -> None:
    """Raises a `UsageError` if the network is given as a function, which the algorithm does not support."""
    if choices.network is not None:
        raise UsageError(
            "this algorithm creates its own action-value networks. hint: pass network=rollmill.NetworkConfig(...)."
        )


def uniform_replay(config: Any) -> Replay:
    """Creates a replay memory that draws single steps uniformly."""
    return Replay(
        capacity=config.buffer_size // config.num_envs,
        minibatch_size=config.batch_size,
        learning_starts=config.learning_starts,
        gamma=partial(_gamma, config),
    )


def _gamma(config: Any, learner: Learner) -> Float[Array, ""]:
    """Returns the discount factor of the learner, or the configured one if it holds no hyperparameters."""
    held = current_hyperparameters(learner) if getattr(learner, "hyperparameters", {}) else {}
    return jnp.float32(held.get("gamma", config.gamma))


def check_discrete(algorithm: str, space: spaces.Space, alternatives: str) -> spaces.Discrete:
    """Returns the action space if it is `Discrete`. Otherwise raises a `UsageError` that names `alternatives`."""
    if not isinstance(space, spaces.Discrete):
        raise UsageError(
            f"{algorithm} needs a Discrete action space, got {space_text(space)}. hint: {alternatives}."
        )
    return space


def check_continuous(algorithm: str, space: spaces.Space, alternatives: str) -> spaces.Box:
    """Returns the action space if it is a `Box`, and otherwise raises a `UsageError` that names `alternatives`."""
    if not isinstance(space, spaces.Box):
        raise UsageError(
            f"{algorithm} needs a Box of continuous actions, got {space_text(space)}. hint: {alternatives}."
        )
    return space


def off_policy_graph(
    name: str,
    parts: OffPolicyParts,
    *,
    policy: Any,
    greedy: Any,
    start_learner: Callable[[Key], Learner],
    weights: Callable[[Learner], PyTree[Array]],
    gradients: Any,
    update: Any,
    report: Any,
    hyperparameters: Mapping[str, float] = MappingProxyType({}),
    condition: Any = no_condition,
    outputs: PolicyOutputs = PolicyOutputs(),  # noqa: B008 - immutable
    store: ExperienceStore | None = None,
    start_memory: Callable[[], Memory] = lambda: (),
) -> Graph:
    """Assembles the graph of an algorithm with a replay memory from the parts of `prepare_off_policy`.

    `policy` explores, and `greedy` is the deployed policy. The learner has a field `progress`, which is a
    `StepCounts`, and a field `hyperparameters` if there are any. `store` replaces `parts.replay`. By default, the
    policy has no memory. The other arguments are fields of `Graph`.
    """
    return assemble_graph(
        name,
        parts.env,
        parts.environment,
        parts.config,
        custom=parts.custom,
        loops=parts.loops,
        policy=policy,
        gradients=gradients,
        update=update,
        start_memory=start_memory,
        start_learner=start_learner,
        weights=weights,
        prepare=partial(_count_steps, parts.loops.batch_size),
        condition=condition,
        greedy=greedy,
        host=parts.host,
        report=report,
        replay=store or parts.replay,
        outputs=outputs,
        hyperparameters=hyperparameters,
    )


def initial_progress() -> StepCounts:
    """Returns the counts of an off-policy learner before its first step."""
    return StepCounts(jnp.uint32(0), jnp.uint32(0))


def learner_hyperparameters(parts: OffPolicyParts, **further: float | int) -> dict[str, float]:
    """Returns the hyperparameters that an off-policy learner holds as data (`numbers_of`)."""
    return numbers_to_hold(parts.config, _learning(parts), **further)


def adam(parts: OffPolicyParts, rate: str = "learning_rate", *, interval: int = 1) -> Optimiser:
    """Returns Adam with clipped gradients, whose learning rate is the hyperparameter named `rate`.

    It makes one update for every `interval` updates of the run.
    """
    scaling = lambda config: optax.scale_by_adam(eps=config.adam_eps)
    return optimiser_of(parts.choices, scaling, _learning(parts), rate=rate, every=interval)


def learning_rate_metric(
    parts: OffPolicyParts, *, interval: int = 1
) -> Callable[[Learner, PyTree[Array]], Metrics]:
    """Returns a function from a learner and the state of its optimiser (`adam`) to the metric `learning_rate`."""
    schedule = partial(schedule_of, parts.choices, _learning(parts), every=interval)
    return lambda learner, state: {"learning_rate": rate_now(schedule(learner.hyperparameters), state)}


def _learning(parts: OffPolicyParts) -> Loops:
    """Returns the loops without the iterations before learning begins, in which schedules do not advance."""
    loops = parts.loops
    return loops._replace(iterations=max(loops.iterations - waiting_iterations(parts.replay, loops), 1))


def explores_at_random(config: Any, progress: StepCounts) -> Bool[Array, ""]:
    """Returns whether actions are still random, because learning has not begun."""
    return progress.is_before(config.learning_starts)


def random_action(space: spaces.Box | spaces.Discrete, key: Key, action_mask: PyTree) -> Action:
    """Draws a random action uniformly, from the legal actions if there is a mask."""
    dtype = jax.dtypes.canonicalize_dtype(space.dtype)
    if isinstance(space, spaces.Discrete):
        legal = jnp.ones(int(space.n), bool) if isinstance(action_mask, tuple) else action_mask
        logits = jnp.where(legal, jnp.float32(0), MASKED_LOGIT)
        return Categorical(logits, int(space.start), dtype).sample(key)
    low, high = (jnp.asarray(np.asarray(bound, np.float32)) for bound in (space.low, space.high))
    return low + (high - low) * jax.random.uniform(key, space.shape)


def update_target(target: PyTree[Array], network: PyTree[Array], tau: Number) -> PyTree[Array]:
    """Moves a target network towards the network by the fraction `tau` (Lillicrap et al., 2016)."""
    return jax.tree.map(lambda slow, fast: slow + tau * (fast - slow), target, network)


def scale_weights(minibatch: Batch, reduce: Reduce) -> Batch:
    """Scales importance weights to a mean of 1 over the whole minibatch.

    Schaul et al. (2016) divide by the largest weight instead, which depends on how a minibatch is divided.
    """
    weight = minibatch.samples.weight
    scaled = weight / jnp.maximum(reduce(jnp.mean(weight)), 1e-12)
    return minibatch._replace(samples=minibatch.samples._replace(weight=scaled))


def count_update(progress: StepCounts, *, interval: int = 1) -> StepCounts:
    """Returns the counts after one more update.

    Before the number of updates overflows, it restarts at 0 in place of a multiple of `interval`, so that
    `updates % interval` remains correct.
    """
    updates = progress.updates.astype(jnp.uint32) + 1
    end = _WORD // interval * interval
    again = updates if end == _WORD else jnp.where(updates == jnp.uint32(end), 0, updates)
    return eqx.tree_at(lambda counts: counts.updates, progress, again)


def check_interval(name: str, interval: int) -> None:
    """Raises a `UsageError` if an interval has more updates than the counter can hold."""
    if interval > MAX_INTERVAL:
        raise UsageError(f"{name}={interval} exceeds the limit of {MAX_INTERVAL} updates.")


def _count_steps(
    batch_size: int, learner: Any, trajectory: Trajectory, *, reduce: Reduce, replicas: int
) -> tuple[Learner, Batch]:
    """Counts the environment steps of an iteration. The replay memory supplies the minibatches."""
    before: StepCounts = learner.progress
    high, low = divmod(batch_size, _WORD)
    env_steps = before.env_steps.astype(jnp.uint32) + jnp.uint32(low)
    carry = high + (env_steps < jnp.uint32(low)).astype(jnp.uint32)
    progress = StepCounts(env_steps, before.updates, before.env_step_wraps.astype(jnp.uint32) + carry)
    return eqx.tree_at(lambda learner: learner.progress, learner, progress), Batch(())


def _loops_of(config: Any, steps_per_update: int) -> Loops:
    names = ("total_timesteps", "num_envs", "num_steps", "batch_size", "buffer_size")
    updates = config.gradient_steps
    if updates is None:
        updates = max(1, config.num_envs * config.num_steps // steps_per_update)
    check_positive({**{name: getattr(config, name) for name in names}, "gradient_steps": updates})
    shards = config.num_shards or _most_shards(config.num_envs, config.batch_size)
    for name in ("num_envs", "batch_size"):
        if getattr(config, name) % shards:
            raise UsageError(
                f"num_shards={shards} does not divide {name}={getattr(config, name)}. hint: leave num_shards "
                "out, and Rollmill chooses a number that does."
            )
    return Loops(
        iterations=iterations_for(config.total_timesteps, config.num_envs, config.num_steps),
        num_envs=config.num_envs,
        num_steps=config.num_steps,
        epochs=1,
        num_minibatches=updates,
        num_shards=shards,
        minibatch_items="samples",
    )


def _most_shards(num_envs: int, batch_size: int) -> int:
    """Returns the largest power of two that divides both, up to a limit."""
    both = math.gcd(num_envs, batch_size)
    return min(both & -both, MAX_SHARDS)


def _each(replay: Replay, loops: Loops) -> int:
    """Returns the number of steps of each environment before learning begins."""
    return -(-replay.steps_before_learning(loops) // loops.num_envs)

"""Shared parts of algorithms whose recurrent networks learn from stored sequences: R2D2 and recurrent SAC.

A network begins with the stored memory, and goes through the burn-in without gradients. It learns from the steps
after the burn-in. Where an episode begins within a sequence, the memory begins anew.

Shape letters: `N` sequences of a minibatch, `T` steps of a sequence after the burn-in, `n` outputs of a network.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from rollmill.algorithms.off_policy import FunctionalNetwork, check_stored
from rollmill.algorithms.on_policy import beginnings
from rollmill.core.errors import UsageError
from rollmill.core.types import FINAL_MASK, Memory, Observation
from rollmill.dataflow import Loops, Sequence, SequenceReplay, Step
from rollmill.networks.actor_critic import CELLS


def sequence_replay(config: Any) -> SequenceReplay:
    """Creates a replay memory that draws sequences uniformly."""
    return SequenceReplay(
        rollouts=config.buffer_size // config.num_envs // config.num_steps,
        num_steps=config.num_steps,
        minibatch_size=config.batch_size,
        learning_starts=config.learning_starts,
        length=config.sequence_length // config.num_steps,
    )


def check_sequences(
    algorithm: str, without_memory: str, config: Any, replay: SequenceReplay, loops: Loops
) -> None:
    """Checks the network and the lengths of sequences. Raises a `UsageError` that suggests valid values.

    `without_memory` is the name of the algorithm to use for networks without memory.
    """
    if config.network.torso not in CELLS:
        raise UsageError(
            f"{algorithm} needs a recurrent network, got torso={config.network.torso!r}. hint: use torso='gru' or "
            f"'lstm', or train networks without memory with {without_memory}."
        )
    length, steps = config.sequence_length, config.num_steps
    if length % steps:
        raise UsageError(
            f"sequence_length={length} must be a multiple of num_steps={steps}, because a sequence consists of "
            f"whole rollouts. hint: use sequence_length={-(-length // steps) * steps}."
        )
    if config.burn_in >= length:
        raise UsageError(
            f"burn_in={config.burn_in} leaves no step of sequence_length={length} to learn from. hint: use "
            f"burn_in={length - 1} or less."
        )
    if replay.rollouts < replay.length:
        raise UsageError(
            f"buffer_size={config.buffer_size} holds {config.buffer_size // config.num_envs} steps of each of "
            f"num_envs={config.num_envs} environments, but one sequence has sequence_length={length}. hint: use "
            f"buffer_size={length * config.num_envs} or more."
        )
    each = -(-replay.steps_before_learning(loops) // loops.num_envs)
    check_stored(config, loops, steps_each=replay.capacity, steps_before=each)


class DividedSequences(NamedTuple):
    """The sequences of a minibatch, divided at the end of the burn-in."""

    burn_in: tuple[Observation, Bool[Array, "N B"]]
    """Observations of the `B` steps of the burn-in, and whether an episode begins with a step."""
    steps: Step
    """Steps after the burn-in, with leaves `[N, T, ...]`."""
    begins: Bool[Array, "N T"]
    """Whether an episode begins with a step."""
    observation: Observation
    """The observation after the last step."""


class Unrolled(NamedTuple):
    """Results of a recurrent network in the steps after the burn-in."""

    outputs: Float[Array, "N T n"]
    memory: Memory
    """Memory after each step."""


def divide(sequences: Sequence, burn_in: int) -> DividedSequences:
    """Divides sequences into the burn-in and the steps that are learned from."""
    steps = sequences.steps
    begins = jax.vmap(beginnings)(steps.terminated | steps.truncated)
    early = jax.tree.map(lambda leaf: leaf[:, :burn_in], (steps.observation, begins))
    steps, begins = jax.tree.map(lambda leaf: leaf[:, burn_in:], (steps, begins))
    return DividedSequences(early, steps, begins, sequences.observation)


def unroll(
    network: FunctionalNetwork, weights: PyTree[Array], memory: Memory, divided: DividedSequences
) -> Unrolled:
    """Computes a network's outputs in the steps after the burn-in.

    `memory` is the memory before the first step of the burn-in, which has no gradients.
    """
    one = partial(_unroll_one, network)
    if divided.burn_in[1].shape[1]:
        _, after = jax.vmap(partial(one, jax.lax.stop_gradient(weights)))(memory, *divided.burn_in)
        memory = jax.tree.map(lambda leaf: leaf[:, -1], after)
    return Unrolled(*jax.vmap(partial(one, weights))(memory, divided.steps.observation, divided.begins))


def _unroll_one(
    network: FunctionalNetwork,
    weights: PyTree[Array],
    memory: Memory,
    observation: Observation,
    begins: Bool[Array, " T"],
) -> tuple[Float[Array, "T n"], Memory]:
    """Returns the outputs in each step of ONE sequence, and the memory after each step."""
    at_start = network.start_memory()

    def step(memory: Memory, given: tuple[Observation, Bool[Array, ""]]) -> tuple[Memory, tuple[Array, Memory]]:
        seen, begins = given
        memory = jax.tree.map(partial(jnp.where, begins), at_start, memory)
        outputs, memory = network.advance(weights, memory, seen)
        return memory, (outputs, memory)

    return jax.lax.scan(step, memory, (observation, begins))[1]


def next_outputs(
    network: FunctionalNetwork, weights: PyTree[Array], unrolled: Unrolled, divided: DividedSequences
) -> Float[Array, "N T n"]:
    """Returns a network's outputs after each step, given those before it and the memory after it.

    Final observations of truncated episodes are evaluated only if there are any in the minibatch.
    """
    steps = divided.steps
    evaluate = jax.vmap(lambda memory, observation: network.advance(weights, memory, observation)[0])
    last = evaluate(jax.tree.map(lambda leaf: leaf[:, -1], unrolled.memory), divided.observation)
    following = jnp.concatenate([unrolled.outputs[:, 1:], last[:, None]], axis=1)
    final = jax.lax.cond(
        jnp.any(steps.truncated),
        lambda: jax.vmap(evaluate)(unrolled.memory, steps.final_observation),
        lambda: jnp.zeros_like(following),
    )
    return jnp.where(steps.truncated[..., None], final, following)


def legal_after(steps: Step) -> PyTree[Bool[Array, "N T n"]]:
    """Returns the legal actions after each step, before any reset, or `()` if all actions are legal."""
    return steps.info[FINAL_MASK] if jax.tree.leaves(steps.action_mask) else ()

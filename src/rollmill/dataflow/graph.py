"""An algorithm as data: four fragments, the sizes of the two loops that drive them, and the functions around them.

    collect = num_steps x {policy, environment}
    learn   = prepare once, then epochs x num_minibatches x {condition, gradients, update}

Fragments are functions of ONE environment, one sequence or one minibatch: `dataflow.collecting` lifts those of
an environment, `dataflow.gradients` the loss of a sample. They name no machine. A distribution policy partitions
the fragments into groups (Zhu et al., "MSRL: Distributed Reinforcement Learning with Dataflow Fragments", USENIX
ATC 2023).

Shape letters: `T` steps of a rollout, `E` environments, `N` samples of a minibatch.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import equinox as eqx
import numpy as np
from gymnasium import spaces
from jaxtyping import Array, Bool, Float, Int, PyTree

from rollmill.core.types import Action, Environment, Key, Memory, Observation, StartHost, Timestep

Learner: TypeAlias = PyTree[Array | np.ndarray]
"""Network weights, optimiser state and running statistics."""

Weights: TypeAlias = PyTree[Array | np.ndarray]
"""The part of the learner that the policy needs: it travels on the edge *weights*."""

Metrics: TypeAlias = Mapping[str, Float[Array, "..."]]
"""Named numbers: `[]` each, and stacked where a loop has gone over them."""

ActionMask: TypeAlias = PyTree[Array]
"""The policy's knowledge of the environment's state besides the observation: legal actions, as booleans in the
shape of its logits, `()` where all are legal; for a policy that plans, also the state that it goes on from."""

Reduce: TypeAlias = Callable[[PyTree[Array]], PyTree[Array]]
"""Mean over replicas that hold equal shares of a batch; the identity where there is one."""


class Decision(NamedTuple):
    """The result of the policy fragment for one observation."""

    action: Action
    memory: Memory
    extras: PyTree[Array]
    """Further outputs for the learner, such as the log-probability and the value."""


class Step(NamedTuple):
    """One step of one environment as the learner sees it; in a trajectory every leaf is `[T, E, ...]`."""

    observation: Observation
    action_mask: ActionMask
    action: Action
    extras: PyTree[Array]
    reward: Float[Array, "..."]
    terminated: Bool[Array, "..."]
    truncated: Bool[Array, "..."]
    final_observation: Observation
    """The observation after the step, before any auto-reset."""
    final_memory: Memory
    """The policy's memory after the step, before any reset."""
    info: dict[str, Array]


class Trajectory(NamedTuple):
    """A rollout: the edge *trajectory*."""

    steps: Step
    """Leaves `[T, E, ...]`."""
    start_memory: Memory
    """The policy's memory before the first step; leaves `[E, ...]`."""
    observation: Observation
    """The observation after the last step, with which the next rollout begins; leaves `[E, ...]`."""
    memory: Memory
    """The policy's memory after the last step; leaves `[E, ...]`."""


class Batch(NamedTuple):
    """The samples of an iteration or of a minibatch.

    Of a batch, `samples` has leaves `[T, E, ...]` and `sequences` `[E, ...]`. Of a minibatch,
    `samples` has leaves `[N, ...]`, or `[N, T, ...]` if it is cut by sequence.
    """

    samples: PyTree[Array]
    sequences: PyTree[Array] = ()


class Collector(eqx.Module):
    """The state carried from step to step, one entry for each environment: every leaf is `[E, ...]`."""

    index: Int[Array, "*E"]
    """Global index of the environment; its random keys derive from it, wherever it is placed."""
    environment: PyTree[Array]
    observation: Observation
    action_mask: ActionMask
    memory: Memory


class State(eqx.Module):
    """The whole training state: what is saved, and all that the next iteration depends on."""

    collector: Collector
    learner: Learner
    key: Key
    iteration: Int[Array, "*S"]
    rings: PyTree[Array] = ()
    """The contents of the graph's experience store, or `()` for a graph without one."""


class Loops(NamedTuple):
    """The sizes of the two loops."""

    iterations: int
    """Iterations of the whole training."""
    num_envs: int
    num_steps: int
    epochs: int
    num_minibatches: int
    """Minibatches of an epoch, and updates with them."""
    num_shards: int
    """Shuffling, and draws from a replay memory, stay inside this many equal shards of the environments, each with
    its own key."""
    cut: Literal["samples", "sequences"]
    """Whether minibatches are cut from single steps, or from whole sequences of an environment."""

    @property
    def rows_each(self) -> int:
        """Rows that an environment adds to a batch: its steps, or the one sequence of them."""
        return self.num_steps if self.cut == "samples" else 1

    @property
    def batch_size(self) -> int:
        """Environment steps of one iteration."""
        return self.num_envs * self.num_steps


@runtime_checkable
class StepEnvironment(Protocol):
    """`environment`: one step with auto-reset; `info["final_observation"]` is kept."""

    def __call__(self, key: Key, state: PyTree[Array], action: Action, /) -> Timestep:
        """The timestep after the action."""
        ...


@runtime_checkable
class Decide(Protocol):
    """`policy`: one action for one observation."""

    def __call__(
        self, weights: Weights, key: Key, memory: Memory, observation: Observation, action_mask: ActionMask, /
    ) -> Decision:
        """The action, the next memory and the extras."""
        ...


@runtime_checkable
class Gradients(Protocol):
    """`gradients`: of the mean loss over a minibatch.

    Invariant: gradients and metrics are means over samples, so that the mean over equal parts of a
    minibatch (chunks, devices, workers) is the result for the whole.
    """

    def __call__(self, learner: Learner, minibatch: Batch, /) -> tuple[Weights, Metrics]:
        """Gradients with respect to the network's weights, and metrics."""
        ...


@runtime_checkable
class Update(Protocol):
    """`update`: one optimiser step.

    `share` is the part of a minibatch that the gradients are of, by which schedules advance: 1 / K where
    gradients of K workers are applied one by one.
    """

    def __call__(self, learner: Learner, gradients: Weights, /, *, share: float = 1.0) -> Learner:
        """The learner one step further."""
        ...


@runtime_checkable
class Prepare(Protocol):
    """Turns a trajectory into a batch, once an iteration; may advance the learner's statistics."""

    def __call__(
        self, learner: Learner, trajectory: Trajectory, /, *, reduce: Reduce, replicas: int
    ) -> tuple[Learner, Batch]:
        """Prepares a trajectory.

        Args:
            learner: before the iteration's updates.
            trajectory: trajectory of the environments held here.
            reduce: the mean over replicas.
            replicas: number of replicas that share the environments; scales counts and sums, so that their mean
                over replicas is the total.

        Returns:
            The learner with its new statistics, and the batch to learn from.
        """
        ...


class Sample(NamedTuple):
    """A minibatch drawn from an experience store."""

    minibatch: Batch
    place: PyTree[Array] = ()
    """Where the store keeps these samples. Only its `update` reads this."""


@runtime_checkable
class ExperienceStore(Protocol):
    """Stores the steps of many iterations, and draws the minibatches that a learner trains on.

    A store is a value of sizes and functions. Its contents are a pytree in the training state (`State.rings`), in
    which every leaf is `[E, ...]`: the part of one environment lies with that environment, wherever it is placed.
    Placement, checkpoints and recovery therefore need no code of their own for a new store. A store draws inside
    the logical shards of the environments, each with its own key, so that every placement draws the same samples.
    """

    @property
    def capacity(self) -> int:
        """Number of environment steps kept for each environment."""
        ...

    def first_learning(self, loops: Loops, /) -> int:
        """Returns the number of environment steps after which learning begins."""
        ...

    def empty(self, graph: "Graph", index: Int[Array, " E"], /) -> PyTree[Array]:
        """Returns the contents before the first step, for the environments with these global indices."""
        ...

    def add(self, graph: "Graph", contents: PyTree[Array], trajectory: Trajectory, /) -> PyTree[Array]:
        """Returns the contents with a rollout of the same environments added."""
        ...

    def is_ready(self, contents: PyTree[Array], loops: Loops, /) -> Bool[Array, ""]:
        """Returns whether enough is stored to begin learning. The answer is the same on every replica."""
        ...

    def sample(self, graph: "Graph", contents: PyTree[Array], key: Key, index: Int[Array, " E"], /) -> Sample:
        """Draws the part of one minibatch that belongs to the environments held here.

        `index` holds their global indices, which are whole logical shards.
        """
        ...

    def update(
        self, graph: "Graph", contents: PyTree[Array], learner: Learner, sample: Sample, /
    ) -> PyTree[Array]:
        """Returns the contents after a sample was learned from, by the learner before that update."""
        ...

    def mutable(self, contents: PyTree[Array], /) -> PyTree[Array]:
        """Returns the part that `update` changes. The loop over minibatches carries this part alone."""
        ...

    def with_mutable(self, contents: PyTree[Array], mutable: PyTree[Array], /) -> PyTree[Array]:
        """Returns the contents with this part exchanged."""
        ...

    def fill(self, contents: PyTree[Array], /) -> Float[Array, ""]:
        """Returns the mean fraction of the capacity that is in use."""
        ...


class PolicyOutputs(NamedTuple):
    """Outputs of a policy's networks besides its action, as functions of ONE raw observation.

    None stands for an output that the algorithm does not have, or that is no function of the policy's weights.
    """

    distribution: Callable[[Weights, Memory, Observation, ActionMask], PyTree] | None = None
    """The action distribution (`networks.Distribution`) under a mask of legal actions; of several agents a
    dictionary by kind, with a leading axis of agents."""
    value: Callable[[Weights, Memory, Observation], Float[Array, ""]] | None = None
    """The expected return, in the unit of the rewards that were learned from."""
    q_values: Callable[[Weights, Observation], Float[Array, " n"]] | None = None
    """The expected return of each action of a `Discrete` space."""
    searches: bool = False
    """True if actions come from a search that begins with a position of the environment; then `distribution` and
    `value` are those of the network alone."""


class Graph(NamedTuple):
    """An algorithm with its environment and network as a value: four fragments, the sizes of its loops, and the
    functions around them. It names no machine.
    """

    settings: dict[str, Any]
    """Algorithm, environment and hyperparameters, as JSON: the graph can be built again from them."""
    observation_space: spaces.Space
    action_space: spaces.Space
    loops: Loops
    environment: StepEnvironment
    policy: Decide
    gradients: Gradients
    update: Update
    start_environment: Callable[[Key, Int[Array, ""]], tuple[PyTree[Array], Observation]]
    """`(key, global index) -> (state, observation)` of one environment."""
    start_memory: Callable[[], Memory]
    start_learner: Callable[[Key], Learner]
    action_mask: Callable[[PyTree[Array]], ActionMask]
    """Environment state to legal actions, and all else that the policy has to know of it."""
    weights: Callable[[Learner], Weights]
    prepare: Prepare
    condition: Callable[[Batch, Reduce], Batch]
    """Rescaling that needs the whole minibatch, such as standardising advantages; runs before gradients."""
    greedy: Decide
    """The policy as it is deployed: the most likely action; the key is not used."""
    host: StartHost | None = None
    """Starts environments that are Python objects; then `environment` is a crossing to them."""
    keep_learning: Callable[[Metrics], Bool[Array, ""]] | None = None
    """Asked with the metrics of an epoch's last minibatch; False ends the iteration's learning."""
    end_iteration: Callable[[Learner], Learner] | None = None
    """Beside `keep_learning`: moves schedules over the updates that an iteration has left out. Where none was left
    out it changes nothing, so that it may be called again."""
    appraise: Callable[[Weights, Step], Step] | None = None
    """Optional: values that a rollout kernel computes with each step, so that `prepare` need not. The returned
    step may lack leaves that are no longer needed, such as final observations."""
    condense: Callable[[Weights, Step], Step] | None = None
    """Optional: makes a step of all environments, leaves `[E, ...]`, smaller where it is collected, so that a
    trajectory holds a large observation once. Rollout kernels do without it."""
    replay: ExperienceStore | None = None
    """Where steps are stored to learn from, instead of the iteration's own batch."""
    elsewhere: Callable[[Environment], "Graph"] | None = None
    """The same algorithm on another environment of the same spaces, where more of the graph than its environment
    fragment depends on the environment."""
    report: Callable[[Learner, Batch], Metrics] | None = None
    """Further metrics of an iteration, from what `prepare` returns; like all, their mean over replicas is that of
    the whole."""
    outputs: PolicyOutputs = PolicyOutputs()
    """The policy's outputs besides its action, for its use after training."""

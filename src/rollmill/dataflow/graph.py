"""An algorithm as data: four fragments, the sizes of the two loops that drive them, and the functions around
them.

    collect = num_steps x {policy, environment}
    learn   = prepare once, then epochs x num_minibatches x {condition, gradients, update}

Fragments are functions of ONE environment, one sequence or one minibatch. `dataflow.collecting` lifts the
functions of an environment, and `dataflow.gradients` the loss of a sample. They are independent of hardware. A
distribution policy partitions the fragments into groups (Zhu et al., "MSRL: Distributed Reinforcement Learning
with Dataflow Fragments", USENIX ATC 2023).

Shape letters: `T` steps of a rollout, `E` environments, `N` samples of a minibatch.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import equinox as eqx
import numpy as np
from gymnasium import spaces
from jaxtyping import Array, Bool, Float, Int, Key as KeyArray, PyTree

from rollmill.core.field_help import with_tuple_help
from rollmill.core.types import Action, Environment, Key, Memory, Observation, StartHost, Timestep

Learner: TypeAlias = PyTree[Array | np.ndarray]
"""Network weights, optimiser state and running statistics."""

Weights: TypeAlias = PyTree[Array | np.ndarray]
"""Part of the learner that the policy needs: the edge *weights*."""

Hyperparameters: TypeAlias = dict[str, Float[Array | np.ndarray, "..."]]
"""Hyperparameters by name that a learner holds as data, in its field `hyperparameters`."""

ENVIRONMENT_PREFIX = "environment:"
"""Prefix of the inputs of a start that are parameters of the environment."""

Metrics: TypeAlias = Mapping[str, Float[Array, "..."]]
"""Named scalars, stacked by the loops around them."""

ActionMask: TypeAlias = PyTree[Array]
"""What the policy knows of the environment's state besides the observation. Usually, these are the legal actions,
as booleans in the shape of the logits, or `()` if every action is legal. A policy that plans also gets the state
to plan from."""

Reduce: TypeAlias = Callable[[PyTree[Array]], PyTree[Array]]
"""Mean over replicas with equal parts of a batch. The identity for a single replica."""


class Decision(NamedTuple):
    """Decision of the policy for one observation: the action, the next memory, and outputs for the learner."""

    action: Action
    memory: Memory
    extras: PyTree[Array]
    """Further outputs for the learner, such as the log-probability and the value."""


class Step(NamedTuple):
    """One step of one environment, as the learner sees it. In a trajectory, every leaf is `[T, E, ...]`."""

    observation: Observation
    action_mask: ActionMask
    action: Action
    extras: PyTree[Array]
    reward: Float[Array, "..."]
    terminated: Bool[Array, "..."]
    truncated: Bool[Array, "..."]
    final_observation: Observation
    """Observation after the step, before any auto-reset."""
    final_memory: Memory
    """Memory of the policy after the step, before any reset."""
    info: dict[str, Array]


class Trajectory(NamedTuple):
    """Data of a rollout of all environments: the edge *trajectory*."""

    steps: Step
    """Steps of the rollout, with leaves `[T, E, ...]`."""
    start_memory: Memory
    """Memory of the policy before the first step, with leaves `[E, ...]`."""
    observation: Observation
    """Observation after the last step, where the next rollout begins. Leaves `[E, ...]`."""
    memory: Memory
    """Memory of the policy after the last step, with leaves `[E, ...]`."""


class Batch(NamedTuple):
    """Samples of an iteration or of a minibatch.

    In a batch, `samples` has leaves `[T, E, ...]` and `sequences` has leaves `[E, ...]`. In a minibatch, `samples`
    has leaves `[N, ...]`, or `[N, T, ...]` for minibatches of sequences.
    """

    samples: PyTree[Array]
    sequences: PyTree[Array] = ()


class Collector(eqx.Module):
    """State of all environments and policies that a rollout carries from step to step, with leaves `[E, ...]`."""

    index: Int[Array, "*E"]
    """Global index of the environment. Its random keys derive from it, so they do not depend on placement."""
    environment: PyTree[Array]
    observation: Observation
    action_mask: ActionMask
    memory: Memory


class State(eqx.Module):
    """The complete training state. Checkpoints hold it, and the next iteration depends on nothing else.

    The states of several seeds or trials are one state, whose leaves have a leading axis `S`.
    """

    collector: Collector
    learner: Learner
    key: KeyArray[Array, "*S"]
    iteration: Int[Array | np.ndarray, "*S"]
    rings: PyTree[Array | np.ndarray] = ()
    """Contents of the graph's experience store, or `()` for a graph without one."""


class Loops(NamedTuple):
    """Sizes of the two loops of an iteration: collecting and learning."""

    iterations: int
    """Number of iterations of the whole run."""
    num_envs: int
    num_steps: int
    epochs: int
    num_minibatches: int
    """Number of minibatches in an epoch, each followed by an update."""
    num_shards: int
    """Number of equal shards of the environments. Shuffling and sampling stay inside a shard, with its own key."""
    minibatch_items: Literal["samples", "sequences"]
    """Whether minibatches consist of single steps, or of whole sequences of an environment."""

    @property
    def rows_per_env(self) -> int:
        """Number of rows that an environment adds to a batch: its steps, or 1 for sequences."""
        return self.num_steps if self.minibatch_items == "samples" else 1

    @property
    def batch_size(self) -> int:
        """Number of environment steps in one iteration, over all environments."""
        return self.num_envs * self.num_steps


@runtime_checkable
class StepEnvironment(Protocol):
    """Fragment `environment`: makes one step with auto-reset, and keeps `info["final_observation"]`."""

    def __call__(self, key: Key, state: PyTree[Array], action: Action, /) -> Timestep:
        """Returns the timestep after the action."""
        ...


@runtime_checkable
class PolicyFunction(Protocol):
    """Fragment `policy`: chooses one action for one observation."""

    def __call__(
        self, weights: Weights, key: Key, memory: Memory, observation: Observation, action_mask: ActionMask, /
    ) -> Decision:
        """Returns the action, the next memory and the extras."""
        ...


@runtime_checkable
class Gradients(Protocol):
    """Fragment `gradients`: computes the gradients of the mean loss over a minibatch.

    Gradients and metrics must be means over samples. The mean over equal parts of a minibatch (chunks, devices,
    workers) is then the result for the whole.
    """

    def __call__(self, learner: Learner, minibatch: Batch, /) -> tuple[Weights, Metrics]:
        """Returns gradients with respect to the network's weights, and metrics."""
        ...


@runtime_checkable
class Update(Protocol):
    """Fragment `update`: makes one optimiser step with the gradients of a minibatch.

    `share` is the fraction of a minibatch that the gradients cover, and schedules advance by it. It is 1 / K if
    the gradients of K workers are applied one by one.
    """

    def __call__(self, learner: Learner, gradients: Weights, /, *, share: float = 1.0) -> Learner:
        """Returns the learner after the step."""
        ...


@runtime_checkable
class Prepare(Protocol):
    """Converts a trajectory to a batch, once in an iteration. It may advance the learner's statistics."""

    def __call__(
        self, learner: Learner, trajectory: Trajectory, /, *, reduce: Reduce, replicas: int
    ) -> tuple[Learner, Batch]:
        """Prepares a trajectory.

        Args:
            learner: learner before the iteration's updates.
            trajectory: rollout of the environments held here.
            reduce: mean over replicas.
            replicas: number of replicas that share the environments. Counts and sums are scaled by it, so that
                their mean over replicas is the total.

        Returns:
            The learner with its new statistics, and the batch to learn from.
        """
        ...


class Sample(NamedTuple):
    """A minibatch drawn from an experience store."""

    minibatch: Batch
    location: PyTree[Array] = ()
    """Location of the samples in the store, which only the store's `update` reads."""


@runtime_checkable
class ExperienceStore(Protocol):
    """Stores the steps of many iterations, and draws the minibatches that a learner trains on.

    A store consists of sizes and functions. Its contents are a pytree in the training state (`State.rings`). Every
    leaf has the shape `[E, ...]`, so the part of one environment is placed with that environment. Placement,
    checkpoints and recovery therefore work for every store. A store draws within the logical shards of the
    environments, each with its own key, so every placement draws the same samples.
    """

    @property
    def capacity(self) -> int:
        """Maximum number of steps that are stored for each environment."""
        ...

    def steps_before_learning(self, loops: Loops, /) -> int:
        """Returns the number of environment steps after which learning begins."""
        ...

    def empty(self, graph: "Graph", index: Int[Array, " E"], /) -> PyTree[Array]:
        """Returns the store's contents before the first step, for environments with the given global indices."""
        ...

    def add(self, graph: "Graph", contents: PyTree[Array], trajectory: Trajectory, /) -> PyTree[Array]:
        """Returns the store's contents after adding a rollout of the same environments."""
        ...

    def is_ready(self, contents: PyTree[Array], loops: Loops, /) -> Bool[Array, ""]:
        """Returns whether the store holds enough steps to begin learning. All replicas get the same answer."""
        ...

    def sample(
        self, graph: "Graph", contents: PyTree[Array], learner: Learner, key: Key, index: Int[Array, " E"], /
    ) -> Sample:
        """Draws this replica's part of one minibatch.

        `index` holds the global indices of the replica's environments, which form whole logical shards. A store
        may read the learner's hyperparameters, and the count of updates that their schedules follow.
        """
        ...

    def update(
        self, graph: "Graph", contents: PyTree[Array], learner: Learner, sample: Sample, /
    ) -> PyTree[Array]:
        """Returns the store's contents after learning from a sample. `learner` is from before that update."""
        ...

    def mutable_part(self, contents: PyTree[Array], /) -> PyTree[Array]:
        """Returns the part of the store's contents that `update` changes.

        The loop over minibatches carries only this part.
        """
        ...

    def with_mutable_part(self, contents: PyTree[Array], mutable: PyTree[Array], /) -> PyTree[Array]:
        """Returns the store's contents with `mutable` as the part that `update` changes."""
        ...

    def fill_fraction(self, contents: PyTree[Array], /) -> Float[Array, ""]:
        """Returns the mean fraction of the store's capacity that is in use."""
        ...


class PolicyOutputs(NamedTuple):
    """Outputs of a policy's networks besides the action, as functions of ONE raw observation.

    A field is None if the algorithm does not have the output, or if the output depends on more than the policy's
    weights.
    """

    distribution: Callable[[Weights, Memory, Observation, ActionMask], PyTree] | None = None
    """Action distribution (`networks.Distribution`) under a mask of legal actions. In a multi-agent environment,
    it is a dictionary by kind, with a leading axis of agents."""
    value: Callable[[Weights, Memory, Observation], Float[Array, ""]] | None = None
    """Expected return, in the units of the rewards used for learning."""
    q_values: Callable[[Weights, Observation], Float[Array, " n"]] | None = None
    """Expected return of each action of a `Discrete` space."""
    searches: bool = False
    """Whether actions come from a search. `distribution` and `value` then describe the network alone."""


_TRAIN = "an algorithm is a value, which run = rollmill.train(algorithm) trains"
_LOAD = "train the algorithm with run = rollmill.train(algorithm), then use rollmill.load(run)"
FROM_MODELS = {
    **dict.fromkeys(("learn", "train", "fit"), _TRAIN),
    **dict.fromkeys(("predict", "evaluate", "save", "load"), _LOAD),
}
"""Hints for methods of models in other libraries, which graphs do not have."""


@with_tuple_help
class Graph(NamedTuple):
    """An algorithm with its environment and network, as a value that is independent of hardware.

    A graph consists of four fragments, the sizes of its loops, and the functions around the fragments.
    """

    settings: dict[str, Any]
    """Algorithm, environment and hyperparameters as JSON, from which the graph can be rebuilt."""
    observation_space: spaces.Space
    """Space of one observation of one environment."""
    action_space: spaces.Space
    """Space of one action of one environment."""
    loops: Loops
    """Sizes of the loops: environments, steps, epochs, minibatches and iterations."""
    environment: StepEnvironment
    """Fragment: `(key, state, action) -> Timestep` of one environment, which resets itself. See
    `algorithms.environment_functions`."""
    policy: PolicyFunction
    """Fragment: `(weights, key, memory, observation, action_mask) -> Decision` for one observation in training."""
    gradients: Gradients
    """Fragment `(learner, minibatch) -> (gradients, metrics)`. `MeanGradients` derives it from a sample's loss."""
    update: Update
    """Fragment: `(learner, gradients, share=1.0) -> learner`, a step of the optimiser."""
    start_environment: Callable[..., tuple[PyTree[Array], Observation]]
    """`(key, global index) -> (state, observation)` of one environment."""
    start_memory: Callable[[], Memory]
    """`() -> memory` of the policy at the start of an episode. `lambda: ()` for a policy without memory."""
    start_learner: Callable[[Key], Learner]
    """`(key) -> learner` before the first iteration: weights, optimiser state and statistics."""
    action_mask: Callable[[PyTree[Array]], ActionMask]
    """Maps the environment's state to all that the policy knows of it, such as legal actions."""
    weights: Callable[[Learner], Weights]
    """`(learner) -> weights`, the part of the learner that the policy needs."""
    prepare: Prepare
    """`(learner, trajectory, *, reduce, replicas) -> (learner, Batch)`, once in an iteration: returns, advantages
    and statistics."""
    condition: Callable[[Batch, Reduce], Batch]
    """`(minibatch, reduce) -> minibatch` before `gradients`: rescaling that needs the whole minibatch, such as
    standardising advantages. `lambda minibatch, reduce: minibatch` changes nothing. `reduce` takes the mean over
    replicas, and is the identity for one."""
    greedy: PolicyFunction
    """The deployed policy, which takes the most likely action. It does not use its key."""
    host: StartHost | None = None
    """Function that starts environments that are Python objects, or None. `environment` then calls them through a
    crossing."""
    keep_learning: Callable[[Metrics], Bool[Array, ""]] | None = None
    """Function of the metrics of an epoch's last minibatch. If it returns False, the iteration stops learning."""
    adapt: Callable[[Learner, Metrics], Learner] | None = None
    """Adapts numbers of the learner to the metrics of a minibatch, before its update."""
    end_iteration: Callable[[Learner], Learner] | None = None
    """Moves schedules past the updates that `keep_learning` left out. Applying it again changes nothing."""
    compute_values: Callable[[Weights, Step], Step] | None = None
    """Computes values inside a rollout kernel, so that `prepare` need not. Optional.

    The returned step may lack leaves that are no longer needed, such as final observations.
    """
    compact_step: Callable[[Weights, Step], Step] | None = None
    """Makes a step of all environments, with leaves `[E, ...]`, smaller when it is collected. Optional.

    A trajectory then holds each large observation once. Rollout kernels do not use it.
    """
    replay: ExperienceStore | None = None
    """Experience store from which the algorithm learns instead of the iteration's own batch, or None."""
    rebuild_for: Callable[[Environment], "Graph"] | None = None
    """Builds the same algorithm for another environment with equal spaces. Needed if more than the environment
    fragment depends on the environment."""
    report: Callable[[Learner, Batch], Metrics] | None = None
    """Computes further metrics from the result of `prepare`. Their mean over replicas is the run's metric."""
    outputs: PolicyOutputs = PolicyOutputs()
    """Outputs of the policy besides its action, for use after training."""
    merge_metrics: Callable[..., Learner] | None = None
    """Updates statistics with the metrics of a worker's iteration: `(learner, metrics, share=1.0) -> learner`.
    Optional. It serves asynchronous workers, which send only gradients and metrics, so that `prepare` cannot
    update the statistics."""
    hyperparameters: Mapping[str, float] = MappingProxyType({})
    """Hyperparameters that the learner holds as data in its field `hyperparameters`, and not in programs."""
    parameters: Mapping[str, float] = MappingProxyType({})
    """Parameters of the environment that its state holds, and not programs. `start_environment` takes them as its
    third argument."""

    evaluate_schedules: Callable[[Learner], Learner] | None = None
    """Evaluates the schedules of the learner's hyperparameters for all updates of an iteration. The result has the
    leaves of the learner in their order. None if no number follows a schedule."""

    stochastic: PolicyFunction | None = None
    """The deployed policy with sampled actions. Default: `policy`, which may act differently in training."""

    def __repr__(self) -> str:
        """Returns the algorithm, the environment and the sizes of a rollout, without the functions."""
        algorithm, environment = (self.settings.get(name) for name in ("algorithm", "environment"))
        sizes = f"num_envs={self.loops.num_envs}, num_steps={self.loops.num_steps}"
        return f"Graph(algorithm={algorithm!r}, environment={environment!r}, {sizes})"

    if not TYPE_CHECKING:  # otherwise type checkers would accept every attribute

        def __getattr__(self, name: str) -> Any:
            hint = f". hint: {FROM_MODELS[name]}." if name in FROM_MODELS else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    def deployed_policy(self, *, stochastic: bool) -> PolicyFunction:
        """Returns the policy for use after training, which samples actions or takes the most likely ones."""
        return (self.stochastic or self.policy) if stochastic else self.greedy

    @property
    def inputs(self) -> dict[str, float]:
        """Returns the initial hyperparameters of the learner and the environment by name."""
        parameters = {f"{ENVIRONMENT_PREFIX}{name}": value for name, value in self.parameters.items()}
        return {**self.hyperparameters, **parameters}

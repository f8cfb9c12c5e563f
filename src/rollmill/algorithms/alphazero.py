"""AlphaZero (Silver et al., Science 2018) as a graph of four fragments.

The policy is a tree search that steps copies of the environment, by default Gumbel AlphaZero (Danihelka et al.,
"Policy improvement by planning with Gumbel", ICLR 2022). The network learns to predict the search's choices and
the results of the games. The searches are in `rollmill.tree_search`.

There are two departures from the paper. Training and self-play alternate, and each iteration learns only from its
own games, as in the Pgx example (Koyamada et al., NeurIPS 2023). Games that do not end within an iteration are
bootstrapped from the network's value.

Search and targets do not depend on the number of players. Rewards and values are for the player to move. A step's
discount is `gamma` if the turn stays, `-gamma` if it passes to the opponent, and 0 if the episode terminates.

Shape letters: `T` steps, `E` environments of this replica, `A` actions.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

from rollmill.algorithms.building import (
    Choices,
    assemble_graph,
    loops_of,
    numbers_to_hold,
    optimiser_of,
    schedule_of,
    validate_config,
    with_layout,
)
from rollmill.algorithms.environment_fragments import environment_functions
from rollmill.algorithms.hyperparameters import current_config, current_hyperparameters
from rollmill.algorithms.losses import squared_value_loss
from rollmill.algorithms.network_policy import MakeNetwork, NetworkPolicy, PolicyWeights, network_policy
from rollmill.algorithms.on_policy import ActorCriticLearner, no_condition, start_learner, update
from rollmill.algorithms.optimisers import rate_now
from rollmill.algorithms.reports import GAMES, value_moments
from rollmill.algorithms.returns import bootstrap_values, lambda_returns
from rollmill.algorithms.sizes import steps_each
from rollmill.core.bounds import (
    Count,
    Fraction,
    NonNegative,
    Positive,
    Range,
    Rate,
    Scheduled,
    ScheduledFraction,
    ScheduledNonNegative,
)
from rollmill.core.errors import UsageError
from rollmill.core.field_help import with_field_help
from rollmill.core.operations import operation_scope
from rollmill.core.schema import check_fields
from rollmill.core.types import (
    Environment,
    GymnasiumObject,
    HostEnvironment,
    Key,
    Memory,
    Observation,
    Params,
    State,
    Timestep,
)
from rollmill.dataflow import (
    ActionMask,
    Batch,
    Decision,
    ElementwiseUpdate,
    Graph,
    Hyperparameters,
    MeanGradients,
    Metrics,
    PolicyOutputs,
    Reduce,
    Step,
    Trajectory,
    UnfusedPolicy,
)
from rollmill.envs import strongly_typed
from rollmill.envs.agents import legal_actions
from rollmill.networks import NetworkConfig, actor_critic
from rollmill.tree_search.gumbel import gumbel_search
from rollmill.tree_search.positions import Position, advance, discrete_action, plannable_parts, position
from rollmill.tree_search.puct import NO_NOISE, RootNoise, puct_search
from rollmill.tree_search.tree import EvaluatedPosition, Expansion, SearchResult

UNFUSED = "alphazero searches a tree before each move, and the trees of all games do not fit into a kernel"


@with_field_help
@dataclass(frozen=True)
class AlphaZeroConfig:
    """Hyperparameters of AlphaZero, named as in the literature."""

    STATIC_FIELDS: ClassVar[tuple[str, ...]] = (
        *("gamma", "value_scale", "gumbel_scale"),
        *("dirichlet_fraction", "dirichlet_alpha", "temperature"),
    )
    """Hyperparameters that the search reads. They are constants in compiled programs."""

    total_timesteps: Count = 2_000_000
    """Number of moves of the whole run, over all environments."""
    num_envs: Count = 256
    """Number of games played in parallel."""
    num_steps: Count = 32
    """Number of moves of each game in one iteration."""
    num_simulations: Annotated[int, Range(0)] = 32
    """Number of simulations of the search before each move. With 0, the network plays without a search, and its
    policy learns nothing."""
    search: Literal["gumbel", "puct"] = "gumbel"
    """Search algorithm: sequential halving with Gumbel noise, which improves the policy even with few simulations,
    or upper confidence bounds (PUCT) with Dirichlet noise, as in the AlphaZero paper."""
    max_considered_actions: Count = 16
    """Maximum number of actions that the Gumbel search considers at its root."""
    value_scale: Positive = 1.0
    """Weight of values relative to the network's logits in the Gumbel search (c_scale of Danihelka et al.). The
    published value is 1 for Go and chess, and 0.1 for Atari. Values are first mapped to the range from 0 to 1:
    from the range -1 to 1 with `squash_values`, and otherwise from the range of values at each node."""
    max_depth: Count = 64
    """Maximum depth of the search tree. The number of simulations also limits the depth."""
    gumbel_scale: NonNegative = 1.0
    """Scale of the Gumbel noise in self-play."""
    dirichlet_fraction: Fraction = 0.25
    """Share of Dirichlet noise in the prior at the root of the PUCT search in self-play."""
    dirichlet_alpha: Positive = 0.3
    """Concentration of the Dirichlet noise."""
    temperature: NonNegative = 1.0
    """Temperature of PUCT in self-play. Moves are drawn in proportion to their visits to the power of 1 /
    temperature. 0 takes the most visited move."""
    update_epochs: Count = 1
    """Number of epochs (passes over the batch) in one iteration."""
    num_minibatches: Count = 8
    """Number of minibatches in one epoch."""
    learning_rate: Rate = 1e-3
    """Learning rate of Adam. If it is annealed, this is the initial value."""
    anneal_lr: bool = False
    """Anneal the learning rate linearly to zero over all planned updates."""
    weight_decay: ScheduledNonNegative = 0.0
    """Decay of the weights in each update, as a multiple of the learning rate."""
    gamma: Fraction = 1.0
    """Discount factor."""
    td_lambda: ScheduledFraction = 1.0
    """Decay of the value targets. With 1, the target is the result of the game. With 0, it is the value after the
    next move."""
    vf_coef: ScheduledNonNegative = 1.0
    """Weight of the value loss."""
    max_grad_norm: Annotated[Scheduled, Range(0, finite=False)] = 1.0
    """Maximum global norm of the gradients. Gradients with a larger norm are scaled down to it."""
    squash_values: bool | None = None
    """Squash values to the range from -1 to 1 with a tanh. By default, this is on in games for two players, whose
    results lie in this range."""
    num_shards: Count | None = None
    """Number of logical shards within which samples are shuffled, a multiple of the device count. Default:
    automatic."""
    network: NetworkConfig = field(default_factory=partial(NetworkConfig, activation="relu", shared_torso=True))
    """The actor-critic network, without a memory."""

    def __post_init__(self) -> None:
        check_fields(self)


class SearchExtras(NamedTuple):
    """Outputs of the AlphaZero policy that the learner needs besides the action."""

    action_weights: Float[Array, "... A"]
    value: Float[Array, "..."]
    discount: Float[Array, "..."]
    """Discount of all later rewards, which is negative if the turn passes to the opponent."""
    agrees: Float[Array, "..."]
    """1 if the network without search prefers the action that the search chose, and otherwise 0."""


class SelfPlaySamples(NamedTuple):
    """Training samples of AlphaZero: `[T, E, ...]` in a batch, `[N, ...]` in a minibatch."""

    observation: Observation
    action_mask: PyTree[Bool[Array, "..."]]
    action_weights: Float[Array, "... A"]
    """Target of the policy."""
    target: Float[Array, "..."]
    """Target of the value."""
    value: Float[Array, "..."]
    """Value of the position that the search estimates."""
    agrees: Float[Array, "..."]
    games: dict[str, Float[Array, "..."]]
    """1 if a game ended in this way, and otherwise 0. Empty for a single player."""


class Planner(NamedTuple):
    """A network, and the environment that the tree search steps."""

    env: Environment
    """Environment as its author wrote it, without auto-reset, accounting and time limits."""
    policy: NetworkPolicy
    config: Any
    """Hyperparameters, with the values of a learner if it holds them."""

    def now(self, learner: ActorCriticLearner) -> "Planner":
        """Returns the planner with the hyperparameters that a learner holds."""
        return self._replace(config=current_config(self.config, current_hyperparameters(learner)))

    def predict(
        self, network: PyTree[Array], observation: Observation, action_mask: PyTree
    ) -> tuple[Float[Array, " A"], Float[Array, ""]]:
        """Returns the logits of the legal actions, and the value for the player to move."""
        output: Any = self.policy.forward(PolicyWeights(network, None), (), observation, action_mask)
        return output.distribution.logits, jnp.tanh(output.value) if self.config.squash_values else output.value

    def value(self, network: PyTree[Array], observation: Observation) -> Float[Array, ""]:
        """Returns the network's value of a position, for the player to move."""
        return self.predict(network, observation, ())[1]

    def advance(self, state: State, choice: Int[Array, ""], params: Params) -> tuple[Timestep, Float[Array, ""]]:
        """Returns the timestep after an action, and the discount of all later rewards."""
        timestep, factor = advance(self.env, state, choice, params)
        return timestep, jnp.float32(self.config.gamma) * factor


def alphazero(
    env: Environment | HostEnvironment | GymnasiumObject | str,
    config: AlphaZeroConfig | Mapping[str, Any] | None = None,
    *,
    params: Params | None = None,
    network: MakeNetwork | NetworkConfig | str | None = None,
    **overrides: Any,
) -> Graph:
    """Builds AlphaZero for an environment that supports a search, as a graph that `rollmill.train` trains.

    Args:
        env: an id, the result of `rollmill.make`, or your own `Environment`. It must be a two-player game, or a
            single-player environment with deterministic steps. Actions must be `Discrete`.
        config: hyperparameters. Single hyperparameters can be given as keyword arguments instead:
            `alphazero(env, num_envs=8)`.
        params: parameters that replace the environment's own. A leaf with an additional leading axis
            `[num_envs, ...]` holds one value for each environment.
        network: a `NetworkConfig` that replaces `config.network`, the name of a torso, or a function that creates
            your own network: `(key, observation_space, action_space) -> ActorCritic`, with a `Categorical`
            distribution.
        **overrides: fields of `AlphaZeroConfig` to replace. `learning_rate` may be an Optax schedule, which is a
            function of the number of updates and replaces annealing.

    Raises:
        UsageError: a name, type or size is invalid, the environment does not support a search, or the network has
            a memory.

    Examples:
        >>> algorithm = rollmill.alphazero("ConnectFour-v0", total_timesteps=1_000_000, num_simulations=32)
    """
    config, choices = validate_config(AlphaZeroConfig, env, config, network, overrides)
    env, planned = plannable_parts(env, who="alphazero")
    config = with_layout(config, env)
    make_network = choices.network or partial(actor_critic, config=config.network)
    policy = network_policy(env, make_network, normalise_observations=False)
    _check_memory(policy)
    planner = Planner(strongly_typed(planned), policy, _resolve_defaults(config, env))
    environment = environment_functions(
        env, params=params, num_envs=config.num_envs, mask=position, planned_steps=steps_each(config)
    )
    loops = loops_of(
        config, by_sequence=False, epochs=config.update_epochs, num_minibatches=config.num_minibatches
    )
    optimiser = optimiser_of(choices, _scaling, loops)
    numbers = numbers_to_hold(config, loops)
    return assemble_graph(
        "alphazero",
        env,
        environment,
        config,
        custom=choices.made_in_python(params=params),
        loops=loops,
        policy=UnfusedPolicy(partial(play, planner), UNFUSED),
        gradients=MeanGradients(partial(loss, planner), lambda learner: learner.weights.network),
        update=ElementwiseUpdate(partial(update, optimiser)),
        start_memory=policy.start_memory,
        start_learner=partial(start_learner, policy, optimiser, numbers, normalise_rewards=False),
        weights=lambda learner: learner.weights,
        prepare=partial(prepare, planner),
        condition=no_condition,
        greedy=partial(play_greedily, planner),
        rebuild_for=partial(_rebuild_for, choices),
        report=partial(report, partial(schedule_of, choices, loops), loops.batch_size),
        outputs=PolicyOutputs(
            distribution=policy.distribution,
            value=lambda weights, memory, observation: planner.value(weights.network, observation),
            searches=planner.config.num_simulations > 0,
        ),
        hyperparameters=numbers,
    )


# --- checks -------------------------------------------------------------------------------------------


def _scaling(config: Any) -> optax.GradientTransformation:
    return optax.chain(optax.scale_by_adam(eps=1e-5), optax.add_decayed_weights(config.weight_decay))


def _resolve_defaults(config: AlphaZeroConfig, env: Environment) -> AlphaZeroConfig:
    """Returns the hyperparameters, with defaults that depend on the number of players filled in."""
    return replace(config, squash_values=env.num_players > 1) if config.squash_values is None else config


def _check_memory(policy: NetworkPolicy) -> None:
    if policy.recurrent:
        raise UsageError(
            "alphazero needs a network without memory, because a search evaluates positions in any order. hint: "
            "use a torso other than gru and lstm."
        )


def _rebuild_for(choices: Choices, env: Environment) -> Graph:
    overrides = {} if choices.schedule is None else {"learning_rate": choices.schedule}
    return alphazero(env, choices.config, network=choices.network, **overrides)


# --- the policy ---------------------------------------------------------------------------------------


def play(
    planner: Planner, weights: PolicyWeights, key: Key, memory: Memory, observation: Observation, mask: ActionMask
) -> Decision:
    """Returns the move that a search with exploration noise chooses in self-play."""
    return _decide(planner, weights, key, memory, observation, _as_position(planner, mask), explores=True)


def play_greedily(
    planner: Planner, weights: PolicyWeights, key: Key, memory: Memory, observation: Observation, mask: ActionMask
) -> Decision:
    """Returns the best move, from a search without noise. The key is not used."""
    now = _as_position(planner, mask)
    return _decide(planner, weights, jax.random.key(0), memory, observation, now, explores=False)


def _decide(
    planner: Planner,
    weights: PolicyWeights,
    key: Key,
    memory: Memory,
    observation: Observation,
    now: Position,
    *,
    explores: bool,
) -> Decision:
    prior, value = planner.predict(weights.network, observation, now.action_mask)
    root = EvaluatedPosition(prior, value, now.state)
    with operation_scope("search"):
        result = search(planner, weights.network, key, root, now, explores=explores)
    discount = planner.advance(now.state, result.choice, now.params)[1] if explores else planner.config.gamma
    agrees = jnp.argmax(prior) == jnp.argmax(result.action_weights)
    extras = SearchExtras(result.action_weights, result.value, jnp.float32(discount), agrees.astype(jnp.float32))
    return Decision(discrete_action(planner.env, result.choice), memory, extras)


def _as_position(planner: Planner, mask: ActionMask) -> Position:
    """Returns the position that the policy starts from. Without a search, it contains only the legal actions."""
    if isinstance(mask, Position):
        return mask
    if planner.config.num_simulations == 0:
        return Position(mask, (), ())
    raise UsageError(
        f"the search of this policy for {planner.env.name} starts from a state of the environment, which an "
        "observation does not contain. hint: use rollmill.evaluate to play whole games, or num_simulations=0 to "
        "play without a search."
    )


def search(
    planner: Planner, network: PyTree[Array], key: Key, root: EvaluatedPosition, now: Position, *, explores: bool
) -> SearchResult:
    """Runs a tree search from a position of ONE environment, and returns the search's result.

    `root` is the network's evaluation of the position. `now` is the position with its legal actions and the
    environment's parameters. If `explores`, the search adds the exploration noise of self-play, drawn from `key`.
    """
    config = planner.config
    if config.num_simulations == 0:
        choice = jax.random.categorical(key, root.logits) if explores else jnp.argmax(root.logits)
        return SearchResult(choice.astype(jnp.int32), jax.nn.softmax(root.logits), root.value)
    legal = jnp.ones(root.logits.shape, bool) if isinstance(now.action_mask, tuple) else now.action_mask
    given = key, root, legal, partial(_expand, planner, network, now.params)
    sizes = {"num_simulations": config.num_simulations, "max_depth": config.max_depth}
    if config.search == "puct":
        noise = RootNoise(config.dirichlet_fraction, config.dirichlet_alpha, config.temperature)
        return puct_search(*given, **sizes, noise=noise if explores else NO_NOISE)
    return gumbel_search(
        *given,
        **sizes,
        max_considered_actions=config.max_considered_actions,
        gumbel_scale=config.gumbel_scale if explores else 0.0,
        value_scale=config.value_scale / 2 if config.squash_values else config.value_scale,
        rescale_values=not config.squash_values,
    )


def _expand(
    planner: Planner, network: PyTree[Array], params: Params, choice: Int[Array, ""], state: PyTree[Array]
) -> Expansion:
    """Returns a step of a search: an action's outcome, evaluated by the network."""
    with operation_scope("environment"):
        timestep, discount = planner.advance(state, choice, params)
        legal = legal_actions(planner.env, timestep.state, params)
    with operation_scope("network"):
        logits, value = planner.predict(network, timestep.observation, legal)
    return Expansion(timestep.reward, discount, EvaluatedPosition(logits, value, timestep.state))


# --- learning -----------------------------------------------------------------------------------------


def prepare(
    planner: Planner, learner: ActorCriticLearner, trajectory: Trajectory, *, reduce: Reduce, replicas: int
) -> tuple[ActorCriticLearner, Batch]:
    """Computes the training samples of a rollout, with value targets computed backwards over its games."""
    steps, network = trajectory.steps, learner.weights.network
    extras: SearchExtras = steps.extras
    samples = SelfPlaySamples(
        observation=steps.observation,
        action_mask=steps.action_mask.action_mask,
        action_weights=extras.action_weights,
        target=value_targets(planner.now(learner), network, trajectory),
        value=extras.value,
        agrees=extras.agrees,
        games=_results(planner, steps),
    )
    return learner, Batch(samples)


def value_targets(planner: Planner, network: PyTree[Array], trajectory: Trajectory) -> Float[Array, "T E"]:
    """Computes the value targets of a rollout, each for the player who was to move.

    Final observations are evaluated only if an episode was truncated.
    """
    steps, extras = trajectory.steps, trajectory.steps.extras
    value_e = jax.vmap(partial(planner.value, network))
    final_value = jax.lax.cond(
        jnp.any(steps.truncated),
        lambda: jax.vmap(value_e)(steps.final_observation),
        lambda: jnp.zeros_like(steps.reward),
    )
    next_value = jax.vmap(bootstrap_values, in_axes=(1, 0, 1, 1, 1), out_axes=1)(
        extras.value, value_e(trajectory.observation), final_value, steps.terminated, steps.truncated
    )
    returns = partial(lambda_returns, td_lambda=planner.config.td_lambda)
    done = steps.terminated | steps.truncated
    return jax.vmap(returns, in_axes=1, out_axes=1)(steps.reward, next_value, extras.discount, done)


def _results(planner: Planner, steps: Step) -> dict[str, Float[Array, "T E"]]:
    """Returns the results of the games that ended, given by the return of player 0."""
    if planner.env.num_players == 1:
        return {}
    ended, result = steps.terminated | steps.truncated, steps.info["episode_return"]
    return {
        f"{GAMES}first_wins": (ended & (result > 0)).astype(jnp.float32),
        f"{GAMES}draws": (ended & (result == 0)).astype(jnp.float32),
    }


def loss(
    planner: Planner,
    network: PyTree[Array],
    learner: ActorCriticLearner,
    sample: SelfPlaySamples,
    sequence: PyTree[Array],
) -> tuple[Float[Array, ""], Metrics]:
    """Computes the AlphaZero loss of one sample (Silver et al., 2018, equation 1).

    The optimiser applies weight decay.
    """
    logits, value = planner.predict(network, sample.observation, sample.action_mask)
    policy_loss = -jnp.sum(sample.action_weights * jax.nn.log_softmax(logits))
    value_loss = squared_value_loss(value, sample.target)
    return policy_loss + planner.now(learner).config.vf_coef * value_loss, {
        "losses/policy": policy_loss,
        "losses/value": value_loss,
    }


def report(
    schedule: Callable[[Hyperparameters], optax.Schedule],
    batch_size: int,
    learner: ActorCriticLearner,
    batch: Batch,
) -> Metrics:
    """Returns metrics of an iteration: outcomes of games, and how certain the search was.

    `search/entropy` is the mean entropy of the search's choices in nats, and `search/agreement` the share of moves
    in which the network prefers the same action.
    """
    samples: SelfPlaySamples = batch.samples
    weights = samples.action_weights
    surprise = -jnp.log(jnp.maximum(weights, jnp.finfo(weights.dtype).tiny))
    return {
        "learning_rate": rate_now(schedule(learner.hyperparameters), learner.optimiser),
        "search/entropy": jnp.mean(jnp.sum(weights * surprise, axis=-1)),
        "search/agreement": jnp.mean(samples.agrees),
        **value_moments(samples.value, samples.target),
        **{name: batch_size * jnp.mean(ended) for name, ended in samples.games.items()},
    }

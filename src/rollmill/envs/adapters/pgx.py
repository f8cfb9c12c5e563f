"""`pgx:ID`: games of one and two players of Pgx (Koyamada et al., "Pgx: Hardware-accelerated parallel game
simulators for reinforcement learning", NeurIPS 2023), versions from 2.6.

Nothing is downloaded: the trained opponents of Pgx are not used.
"""

from types import ModuleType
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jaxtyping import Array, Int, PyTree

from rollmill.core.errors import UsageError, unknown_name
from rollmill.core.types import Action, Environment, Key, Observation, Params, Timestep
from rollmill.envs.adapters import import_extra
from rollmill.envs.adapters.promotion import promoting
from rollmill.envs.options import keyword_names, unknown_option
from rollmill.envs.transforms import plannable
from rollmill.gpus.jax_settings import standard_promotion

TOO_MANY_PLAYERS = {"bridge_bidding": 4, "mahjong": 4, "sparrow_mahjong": 3}
"""Games with more than two players, and the number of their players."""

PLANNABLE = frozenset(
    {
        "animal_shogi",
        "chess",
        "connect_four",
        "gardner_chess",
        "go_19x19",
        "go_9x9",
        "hex",
        "othello",
        "shogi",
        "tic_tac_toe",
    }
)
"""Games that support planning, because they have perfect information and no chance. Other games roll dice, hide
cards or have random steps."""

PRESETS = {"go_9x9": {"size": 9}, "go_19x19": {"size": 19}}
"""Options of the Pgx classes that an id implies."""


class PgxState(eqx.Module):
    """State of a Pgx game without its observation, and the Pgx number of the player who moved first."""

    game: PyTree
    first: Int[Array, ""]


def make(name: str, **options: Any) -> Environment:
    """Makes the Pgx environment called `name`.

    Args:
        name: an id of Pgx, such as `go_9x9`.
        **options: arguments of the game's class, such as `komi=5.5`.

    Returns:
        The environment, with its legal actions as `action_mask` and observations in float32. Player 0 moves first,
        whereas Pgx assigns the players at random. An illegal action ends the episode with the penalty defined by
        Pgx. Planners can step the games without chance or hidden information.

    Raises:
        UsageError: Pgx is not installed, has no such environment or option, or the game has more than two players.
    """
    pgx = import_extra("pgx", "pgx")
    with standard_promotion():
        source = _source(pgx, name, options)
        first = _first_state(source, name, options)
        env = Environment(
            name=f"pgx:{name}",
            reset=_reset_of(source),
            step=_step_of(source),
            observation_space=_observation_space(first.observation),
            action_space=spaces.Discrete(first.legal_action_mask.shape[0]),
            action_mask=lambda state, params: state.game.legal_action_mask,
            num_players=source.num_players,
            to_move=_to_move if source.num_players == 2 else None,
        )
        env = promoting(env)
        return plannable(env) if name in PLANNABLE else env


def _source(pgx: ModuleType, name: str, options: dict[str, Any]) -> Any:
    """Returns the Pgx environment of an id."""
    fitting = [known for known in pgx.available_envs() if known not in TOO_MANY_PLAYERS]
    if name in TOO_MANY_PLAYERS:
        raise UsageError(
            f"pgx:{name} is a game for {TOO_MANY_PLAYERS[name]} players, but only games for one or two players "
            f"are supported: {', '.join(sorted(fitting))}."
        )
    if name not in fitting:
        raise unknown_name("pgx environment", name, fitting)
    source = pgx.make(name)
    kind, preset = type(source), PRESETS.get(name, {})
    known = [option for option in keyword_names(kind) if option not in preset]
    for option in options:
        if option not in known:
            raise unknown_option(f"pgx:{name}", option, known)
    return kind(**preset, **options) if options else source


def _first_state(source: Any, name: str, options: dict[str, Any]) -> Any:
    """Returns the types of the first Pgx state."""
    try:
        return jax.eval_shape(source.init, jax.random.key(0))
    except (TypeError, ValueError) as error:  # errors of Pgx about an unsupported option
        reason = str(error).partition("\n")[0]
        raise UsageError(f"pgx:{name} with {options} cannot be reset by Pgx: {reason}") from error


def _reset_of(source: Any) -> Any:
    def reset(key: Key, params: Params) -> tuple[Observation, PgxState]:
        game = source.init(key)
        return game.observation, PgxState(game.replace(observation=None), game.current_player)

    return reset


def _step_of(source: Any) -> Any:
    def step(key: Key, state: PgxState, action: Action, params: Params) -> Timestep:
        game = source.step(state.game, action, key)
        return Timestep(
            observation=game.observation,
            state=PgxState(game.replace(observation=None), state.first),
            reward=game.rewards[state.game.current_player],
            terminated=game.terminated,
            truncated=game.truncated,
            info={},
        )

    return step


def _to_move(state: PgxState, params: Params) -> Int[Array, ""]:
    return (state.game.current_player != state.first).astype(jnp.int32)


def _observation_space(observation: jax.ShapeDtypeStruct) -> spaces.Box:
    """Returns a `Box` of float32: from 0 to 1 for planes of booleans, without bounds otherwise."""
    low, high = (0.0, 1.0) if observation.dtype == np.bool_ else (-np.inf, np.inf)
    return spaces.Box(low, high, observation.shape, np.float32)

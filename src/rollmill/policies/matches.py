"""Matches in two-player games: a run against another run, an earlier checkpoint, or a fixed opponent."""

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import jax
from jaxtyping import Array, Int, PyTree

from rollmill.algorithms import EnvironmentFunctions, environment_functions, opponent
from rollmill.core.errors import UsageError
from rollmill.core.types import NO_OPTIONS, Environment, HostEnvironment, Options, Params, State
from rollmill.dataflow import Graph
from rollmill.policies.environments import check_same_spaces, environment_of, on_environment
from rollmill.policies.loading import load_weights
from rollmill.policies.policy import LoadedRun
from rollmill.programs.matches import Game, MatchResult, Player, play_match


def match(
    run_dir: str | PathLike[str],
    against: str | PathLike[str],
    *,
    games: int = 100,
    opening_plies: int = 0,
    env: Environment | str | None = None,
    env_options: Options = NO_OPTIONS,
    checkpoint: str | int = "last",
    against_checkpoint: str | int = "last",
    seed: int = 0,
    train_seed: int | None = None,
    stochastic: bool = False,
    algorithm: Graph | None = None,
    imports: Sequence[str] = (),
    trust: bool = False,
) -> MatchResult:
    """Plays a match between the policy of a run and an opponent, in the run's two-player game.

    Each opening is played twice, so that each side moves first once.

    Args:
        run_dir: directory of the run.
        against: the opponent: `random`; `lookahead-N`, which plays perfectly over the next `N` plies; or another
            run's directory.
        games: number of games, even.
        opening_plies: number of random moves at the beginning of each game, for both sides together. Without them,
            two deterministic policies play the same two games again and again.
        env: the game. Default: the run's game.
        env_options: options of a game given by id.
        checkpoint: checkpoint of the run: `last`, `best`, or the number of an iteration.
        against_checkpoint: checkpoint of the other run.
        seed: seed of openings and stochastic policies.
        train_seed: seed whose policy plays, if the run trained several. Default: the first.
        stochastic: sample the actions of runs as in training, instead of taking the most likely ones.
        algorithm: the run's graph, if it was built from custom Python objects.
        imports: modules to import first, because they register the environment, network or algorithm.
        trust: allow the run directories to import the modules that they name, now and later.

    Returns:
        The results for the run's policy, with `score`, `standard_error` and `elo`.

    Raises:
        UsageError: the environment is not a two-player game, the opponent is unknown, or a number is out of range.
        CheckpointError: a directory is not a run, or lacks the checkpoint.

    Examples:
        >>> rollmill.match("runs/new", against="runs/old", games=100).score
    """
    options: dict[str, Any] = {"seed": train_seed, "imports": imports, "trust": trust}
    return match_runs(
        load_weights(run_dir, checkpoint=checkpoint, algorithm=algorithm, **options),
        load_opponent(against, checkpoint=against_checkpoint, **options),
        env=env,
        env_options=env_options,
        games=games,
        opening_plies=opening_plies,
        seed=seed,
        stochastic=stochastic,
    )


def load_opponent(against: str | PathLike[str], **options: Any) -> LoadedRun | str:
    """Loads the opponent of a match: the weights of a run, or the name of a fixed opponent. Takes the options of
    `load_weights`.
    """
    is_run = isinstance(against, Path) or Path(against).is_dir() or len(Path(against).parts) > 1
    return load_weights(against, **options) if is_run else str(against)


def match_runs(
    loaded: LoadedRun,
    against: LoadedRun | str,
    *,
    env: Environment | str | None = None,
    env_options: Options = NO_OPTIONS,
    games: int = 100,
    opening_plies: int = 0,
    seed: int = 0,
    stochastic: bool = False,
) -> MatchResult:
    """Plays a match between two loaded policies. See `match` for the other arguments."""
    env = game_of(loaded, env, env_options)
    rules = environment_functions(env, num_envs=1)
    sides = [_player(side, env, rules, stochastic=stochastic) for side in (loaded, against)]
    return play_match(_game(env, rules), *sides, games=games, opening_plies=opening_plies, seed=seed)


def game_of(loaded: LoadedRun, env: Environment | str | None, env_options: Options = NO_OPTIONS) -> Environment:
    """Returns the two-player game that a run's policy plays: `env`, or by default the run's game.

    Raises a `UsageError` if the environment is not a two-player game.
    """
    game = environment_of(loaded, env, env_options)
    if isinstance(game, HostEnvironment) or game.num_players != 2:
        raise UsageError(
            f"{game.name} is not a two-player game. hint: evaluate the policy over episodes, without an opponent."
        )
    return game


def _game(env: Environment, rules: EnvironmentFunctions) -> Game:
    turn = environment_functions(env, num_envs=1, mask=_to_move)
    opening = _player("random", env, rules, stochastic=False)
    return Game(env.name, rules.start, rules.step, turn.action_mask, opening)


def _to_move(env: Environment, state: State, params: Params) -> Int[Array, ""]:
    assert env.to_move is not None
    return env.to_move(state, params)


def _player(side: LoadedRun | str, env: Environment, rules: EnvironmentFunctions, *, stochastic: bool) -> Player:
    if isinstance(side, str):
        policy, knowledge = opponent(env, side)
        return Player(policy, (), environment_functions(env, num_envs=1, mask=knowledge).action_mask)
    check_same_spaces(side.graph, env)
    graph = on_environment(side.graph, env)
    if _state_type(graph) != _state_type(rules):
        algorithm = side.graph.settings["algorithm"]
        raise UsageError(
            f"policies of {algorithm} cannot play matches yet, because {algorithm} adds to the state of "
            f"{env.name}."
        )
    policy = graph.deployed_policy(stochastic=stochastic)
    return Player(policy, side.weights, graph.action_mask, graph.start_memory)


def _state_type(functions: Graph | EnvironmentFunctions) -> PyTree:
    start = functions.start_environment if isinstance(functions, Graph) else functions.start
    state, _ = jax.eval_shape(start, jax.random.key(0), jax.ShapeDtypeStruct((), "int32"))
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)

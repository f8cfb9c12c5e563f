"""Plays compiled matches between two policies in a two-player game.

Games are played in pairs from the same opening, and each policy is player 0 in one of them, so neither profits
from the first move or the random opening. Shape letter: `N` pairs of games.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key as KeyArray, PyTree

from rollmill.core.errors import UsageError
from rollmill.core.schema import coerce
from rollmill.core.types import Action, Key, Memory, Observation, Timestep
from rollmill.dataflow import ActionMask, Decision, PolicyFunction, Weights
from rollmill.gpus.jax_settings import check_compiled
from rollmill.programs.cache import enable_compilation_cache
from rollmill.programs.compiler_options import program_options
from rollmill.programs.evaluation.episodes import check_seed, start_memories, where_rows

MAX_PLIES = 10_000
"""Maximum number of plies of a game in a match."""

MAX_GAMES = 1_000_000
"""Maximum number of games of a match."""

MAX_PLAYED_AT_ONCE = 512
"""Maximum number of pairs of games that are played side by side, because a search holds a tree for each game."""


class Player(NamedTuple):
    """A policy as one side of a two-player game."""

    policy: PolicyFunction
    weights: Weights
    action_mask: Callable[[PyTree[Array]], ActionMask]
    """Maps the state of the game to the legal actions and everything else that the policy may know."""
    start_memory: Callable[[], Memory] = tuple


class Game(NamedTuple):
    """A two-player game, as functions of ONE environment with auto-reset."""

    name: str
    start: Callable[[Key, Int[Array, ""]], tuple[PyTree[Array], Observation]]
    step: Callable[[Key, PyTree[Array], Action], Timestep]
    """Advances the game by an action. `info["episode_return"]` is the return of player 0."""
    to_move: Callable[[PyTree[Array]], Int[Array, ""]]
    opening: Player
    """Player that makes the moves of an opening, for both sides."""


class MatchResult(NamedTuple):
    """Results of one policy against another. Each is 1 for a win, 0 for a draw and -1 for a loss."""

    moving_first: Int[np.ndarray, " N"]
    """Results of the games in which the policy was player 0."""
    moving_second: Int[np.ndarray, " N"]
    """Results of the games in which the policy was player 1, from the same openings."""

    @property
    def score(self) -> float:
        """Mean score of the policy per game: 1 for a win, 1/2 for a draw, 0 for a loss."""
        return float(np.mean(self._pair_scores))

    @property
    def standard_error(self) -> float:
        """Standard error of the score over pairs of games, or 0 for a single pair."""
        scores = self._pair_scores
        return float(np.std(scores, ddof=1) / np.sqrt(scores.size)) if scores.size > 1 else 0.0

    @property
    def elo(self) -> float:
        """Difference of Elo ratings that predicts the score. Infinite if all games were won or lost."""
        with np.errstate(divide="ignore"):
            return float(400 * (np.log10(self.score) - np.log10(1 - self.score)))

    @property
    def _pair_scores(self) -> Float[np.ndarray, " N"]:
        return ((self.moving_first + self.moving_second) / 2 + 1) / 2


class _MatchState(NamedTuple):
    state: PyTree[Array]
    observation: Observation
    memories: tuple[Memory, Memory]
    result: Float[Array, " N"]
    """Return of player 0."""
    done: Bool[Array, " N"]
    ply: Int[Array, ""]


def play_match(
    game: Game, player: Player, opponent: Player, *, games: int, opening_plies: int = 0, seed: int = 0
) -> MatchResult:
    """Plays an even number of games between two policies, and returns the results of `player`.

    Two games are played from each opening. In an opening, `game.opening` makes the first `opening_plies` moves for
    both sides, except moves that would end the game. Raises a `UsageError` if `games` is odd, or if a game does
    not end within `MAX_PLIES` plies.
    """
    games, opening_plies, seed = _check_numbers(games, opening_plies, seed)
    enable_compilation_cache()
    pairs = games // 2
    batch = min(pairs, MAX_PLAYED_AT_ONCE)
    play = jax.jit(
        partial(_play, game, player, opponent, batch, opening_plies), compiler_options=program_options()
    )
    played: list[list[Int[np.ndarray, " N"]]] = [[], []]
    for first in range(0, pairs, batch):
        key = jax.random.fold_in(jax.random.key(seed), first)
        for moves_first, results in zip((True, False), played, strict=True):
            weights = player.weights, opponent.weights
            result, done = jax.device_get(play(weights, key, np.int32(first), np.bool_(moves_first)))
            if not done.all():
                raise UsageError(
                    f"{game.name}: {int((~done).sum())} of {batch} games did not end within {MAX_PLIES} plies. "
                    "hint: use rollmill.time_limit(env, max_steps)."
                )
            results.append(np.sign(result if moves_first else -result).astype(np.int32))
    return MatchResult(*(np.concatenate(results)[:pairs] for results in played))


def _check_numbers(games: int, opening_plies: int, seed: int) -> tuple[int, int, int]:
    check_compiled()
    games, opening_plies = coerce("games", int, games), coerce("opening_plies", int, opening_plies)
    seed = coerce("seed", int, seed)
    if games < 2 or games % 2:
        raise UsageError(
            f"games={games} must be even and at least 2, because each opening is played twice, with either "
            "policy moving first."
        )
    if games > MAX_GAMES:
        raise UsageError(
            f"games={games} is more than the limit of {MAX_GAMES}. hint: 100 to 10,000 games suffice for a score."
        )
    if not 0 <= opening_plies <= MAX_PLIES:
        raise UsageError(f"opening_plies={opening_plies} must lie between 0 and {MAX_PLIES}.")
    check_seed(seed)
    return games, opening_plies, seed


def _play(
    game: Game,
    player: Player,
    opponent: Player,
    count: int,
    opening_plies: int,
    weights: tuple[Weights, Weights],
    key: Key,
    first: Int[Array, ""],
    moves_first: Bool[Array, ""],
) -> tuple[Float[Array, " N"], Bool[Array, " N"]]:
    """Plays games, and returns player 0's returns and whether each game ended.

    `moves_first` is True if `player` is player 0.
    """
    start_key, opening_key, run_key = jax.random.split(key, 3)
    index = first + jnp.arange(count, dtype=jnp.int32)
    state, observation = jax.vmap(game.start)(jax.random.split(start_key, count), index)
    memories = start_memories(player.start_memory, count), start_memories(opponent.start_memory, count)
    now = _MatchState(state, observation, memories, jnp.zeros(count), jnp.zeros(count, bool), ply=jnp.int32(0))
    now = jax.lax.fori_loop(0, opening_plies, lambda _, now: _open(game, opening_key, now), now)
    sides = player._replace(weights=weights[0]), opponent._replace(weights=weights[1])
    end = jax.lax.while_loop(
        lambda now: ~jnp.all(now.done) & (now.ply < MAX_PLIES),
        partial(_move, game, sides, run_key, moves_first),
        now._replace(ply=jnp.int32(0)),
    )
    return end.result, end.done


def _open(game: Game, key: Key, now: _MatchState) -> _MatchState:
    """Plays one opening move in every game, unless it would end the game."""
    keys = _keys(key, now)
    decision = _decide(game.opening, keys, start_memories(game.opening.start_memory, now.done.size), now)
    after = jax.vmap(game.step)(keys, now.state, decision.action)
    ended = after.terminated | after.truncated
    keep = partial(where_rows, ended)
    return now._replace(
        state=keep(now.state, after.state), observation=keep(now.observation, after.observation), ply=now.ply + 1
    )


def _move(
    game: Game, sides: tuple[Player, Player], key: Key, moves_first: Bool[Array, ""], now: _MatchState
) -> _MatchState:
    """Plays one move in every game. A policy is called only if it is to move in at least one game."""
    keys = _keys(key, now)
    own = (jax.vmap(game.to_move)(now.state) == 0) == moves_first
    decisions = []
    for side, memory, its_turn in zip(sides, now.memories, (own, ~own), strict=True):
        decide = partial(_decide, side, keys, memory, now)
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(decide))
        decision = jax.lax.cond(jnp.any(its_turn & ~now.done), decide, lambda nothing=nothing: nothing)
        decisions.append(decision._replace(memory=where_rows(its_turn, decision.memory, memory)))
    action = where_rows(own, decisions[0].action, decisions[1].action)
    after = jax.vmap(game.step)(keys, now.state, action)
    ends = (after.terminated | after.truncated) & ~now.done
    return _MatchState(
        state=after.state,
        observation=after.observation,
        memories=(decisions[0].memory, decisions[1].memory),
        result=jnp.where(ends, after.info["episode_return"], now.result),
        done=now.done | ends,
        ply=now.ply + 1,
    )


def _decide(side: Player, keys: KeyArray[Array, " N"], memory: Memory, now: _MatchState) -> Decision:
    mask = jax.vmap(side.action_mask)(now.state)
    decision = jax.vmap(partial(side.policy, side.weights))(keys, memory, now.observation, mask)
    return Decision(decision.action, decision.memory, ())


def _keys(key: Key, now: _MatchState) -> KeyArray[Array, " N"]:
    return jax.random.split(jax.random.fold_in(key, now.ply), now.done.size)

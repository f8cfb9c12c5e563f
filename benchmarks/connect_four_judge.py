"""How well AlphaZero plays Connect Four, judged by a perfect solver.

    python benchmarks/connect_four_judge.py runs/connect-four --checkpoint all --simulations 0 32 128

A position has a theoretical value: won, drawn or lost for the player to move, if both play perfectly. A move keeps
the value or makes a mistake; where a legal move is a mistake, the position is contested. Policies are judged by
their moves in a fixed set of contested positions, and by whole games against a perfect player, who draws uniformly
among the moves that keep the value and, where all moves lose, among those that delay the loss longest.

The first player wins in theory. Nobody who moves second against a perfect player can do better than lose late, and
no position of such games is contested. So where the policy moves second, games begin with a stone of the perfect
player outside the centre, after which the second player draws or wins in theory.

The solver is BitBully (packages bitbully and bitbully-databases, AGPL, for this script alone). Its book has the
positions of up to 12 plies; it searches later ones to the end. Writes results/connect-four-judge.json.
"""

import itertools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from bitbully.bitbully_core import BitBullyCore, BoardCore
from bitbully_databases import BitBullyDatabases
from jaxtyping import Array, Int, PyTree
from measure import options, write_result

import rollmill
from rollmill.algorithms import opponent
from rollmill.core.types import Key
from rollmill.envs.connect_four import (
    COLUMNS,
    SQUARES,
    ConnectFourState,
    connect_four,
    empty,
    legal_columns,
    move,
    observe,
)
from rollmill.policies.loading import load_weights
from rollmill.policies.policy import LoadedRun
from rollmill.programs.cache import enable_compilation_cache
from rollmill.programs.compiler_options import EXACT_PRECISION
from rollmill.record.checkpoints import Checkpoints
from rollmill.record.run_directory import RunDirectory
from rollmill.tree_search.positions import Position

GAME = "ConnectFour-v0"
BOOK = "12-ply-dist"
WON, DRAWN, LOST = 1, 0, -1

CENTRE = COLUMNS // 2
SIDES = {"first": True, "second_off_centre": False}
"""How games against the perfect player begin, and whether the policy moves first."""

PLIES = range(14, 37)
"""Stones on the board in the contested positions."""
RANDOM_MOVES = 0.2
"""Share of random moves in the games of players who otherwise win or block where they can."""

AT_ONCE = 64
"""Positions in which a policy moves side by side."""

Game = tuple[int, ...]
"""The columns of all moves so far."""
Chooser = Callable[[Sequence[Game]], list[int]]
"""A player: chooses a move in each of several games."""


class Contested(NamedTuple):
    """A contested position."""

    game: Game
    keeping: frozenset[int]
    """Moves that keep the theoretical value."""
    quiet: bool
    """Neither player could win with a single move now."""


class Played(NamedTuple):
    """A game of a policy against the perfect player."""

    result: int
    """Result of the policy."""
    kept: tuple[bool, ...]
    """Whether each of its moves in a contested position kept the theoretical value."""


class Solver:
    """Theoretical values of positions; remembers those that it has found."""

    def __init__(self) -> None:
        self._core = BitBullyCore(Path(BitBullyDatabases.get_database_path(BOOK)))
        self._found: dict[tuple[int, ...], int] = {}

    def value(self, board: BoardCore) -> int:
        """Returns the theoretical value for the player to move."""
        return self._searched(board, LOST, WON)

    def keeps(self, board: BoardCore, column: int) -> bool:
        """True if a move keeps the theoretical value, as every move in a lost position does."""
        value = self.value(board)
        return value == LOST or self._searched(board.playMoveOnCopy(column), -value, 1 - value) <= -value

    def keeping(self, board: BoardCore) -> list[int]:
        """Returns the moves that keep the theoretical value."""
        return [column for column in legal(board) if self.keeps(board, column)]

    def longest(self, board: BoardCore) -> list[int]:
        """Returns the moves that delay the end of a lost game the longest."""
        scores, columns = self._core.scoreMoves(board), legal(board)
        return [column for column in columns if scores[column] == max(scores[other] for other in columns)]

    def _searched(self, board: BoardCore, least: int, most: int) -> int:
        """Returns the theoretical value clipped to `least` and `most`; a narrow window takes less time."""
        key = (*board.rawState(), least, most)
        if key not in self._found:
            self._found[key] = min(max(self._search(board, least, most), least), most)
        return self._found[key]

    def _search(self, board: BoardCore, least: int, most: int) -> int:
        if board.hasWin():
            return LOST
        if board.movesLeft() == 0:
            return DRAWN
        if board.canWin():
            return WON
        return self._core.negamax(board, least, most, 0)


def board_after(game: Game) -> BoardCore:
    """Returns the solver's board after these moves."""
    board = BoardCore()
    for column in game:
        if not board.play(column):
            raise ValueError(f"column {column} is full in {game}.")
    return board


def legal(board: BoardCore) -> list[int]:
    """Returns the columns that are not full."""
    return [column for column in range(COLUMNS) if board.isLegalMove(column)]


def is_over(board: BoardCore) -> bool:
    """True if a player has won, or the board is full."""
    return board.hasWin() or board.movesLeft() == 0


def turn_passed(board: BoardCore) -> BoardCore:
    """Returns the same stones with the other player to move."""
    stones, own, moves_left = board.rawState()
    other = BoardCore()
    other.setRawState(stones, stones ^ own, moves_left)
    return other


def contested_positions(solver: Solver, number: int, seed: int) -> list[Contested]:
    """Finds different contested positions, spread evenly over `PLIES`, half of them quiet; one of a game at most.

    Half of the games are of random players, half of players who mostly win or block where they can.
    """
    draw = random.Random(seed)
    kinds = [(plies, quiet) for plies in PLIES for quiet in (True, False)]
    wanted = Counter({kind: number // len(kinds) for kind in kinds})
    wanted.update(draw.sample(kinds, number % len(kinds)))
    found: dict[tuple[int, ...], Contested] = {}
    while len(found) < number:
        game = random_game(draw, RANDOM_MOVES if draw.random() < 0.5 else 1.0)
        for plies in draw.sample(PLIES, len(PLIES)):
            if plies >= len(game) or board_after(game[:plies]).rawState() in found:
                continue
            board = board_after(game[:plies])
            kind = plies, is_quiet(board)
            if wanted[kind] and len(keeping := solver.keeping(board)) < len(legal(board)):
                found[board.rawState()] = Contested(game[:plies], frozenset(keeping), kind[1])
                wanted[kind] -= 1
                break
    return sorted(found.values(), key=lambda position: len(position.game))


def random_game(draw: random.Random, share: float) -> Game:
    """Returns a whole game of two equal players who make this share of their moves at random."""
    board, game = BoardCore(), ()
    while not is_over(board):
        columns = legal(board) if draw.random() < share else sensible(board)
        game += (draw.choice(columns),)
        board.play(game[-1])
    return game


def sensible(board: BoardCore) -> list[int]:
    """Returns the moves that win at once; else those that prevent the opponent from it; else all."""
    columns, threats = legal(board), turn_passed(board)
    wins = [column for column in columns if board.canWin(column)]
    return wins or [column for column in columns if threats.canWin(column)] or columns


def is_quiet(board: BoardCore) -> bool:
    """True if neither player could win with a single move now."""
    return not board.canWin() and not turn_passed(board).canWin()


def random_player(seed: int) -> Chooser:
    """Draws uniformly among legal moves."""
    draw = random.Random(seed)
    return lambda games: [draw.choice(legal(board_after(game))) for game in games]


def perfect_player(solver: Solver, seed: int) -> Chooser:
    """Draws uniformly among the moves that keep the value, or that delay a loss the longest."""
    draw = random.Random(seed)

    def best(game: Game) -> int:
        board = board_after(game)
        if solver.value(board) == LOST:
            return draw.choice(solver.longest(board))
        columns = draw.sample(legal(board), len(legal(board)))
        return next(column for column in columns if solver.keeps(board, column))

    return lambda games: [best(game) for game in games]


def lookahead_player(plies: int, seed: int) -> Chooser:
    """Plays best over the next plies, and draws among equals."""
    decide, _ = opponent(connect_four(), f"lookahead-{plies}")
    return chooser(compiled_moves(decide), (), seed)


def moves_of_search(loaded: LoadedRun, simulations: int) -> Callable[..., Array]:
    """Returns the moves of a run's search without noise, or of the network alone, by weights, keys and games."""
    config = {**loaded.graph.settings["config"], "num_simulations": simulations}
    return compiled_moves(rollmill.alphazero(GAME, config).greedy)


def compiled_moves(decide: Callable[..., Any]) -> Callable[..., Array]:
    """Returns a policy's moves in many games, by weights, keys and games."""

    def move_of(weights: PyTree, key: Key, columns: Int[Array, "42"]) -> Int[Array, ""]:
        state = state_after(columns)
        now = Position(legal_columns(state), state, ())
        return decide(weights, key, (), observe(state), now).action

    return jax.jit(jax.vmap(move_of, in_axes=(None, 0, 0)), compiler_options=EXACT_PRECISION)


def state_after(columns: Int[Array, "42"]) -> ConnectFourState:
    """Returns the state after a game's moves; -1 stands for none."""

    def play(state: ConnectFourState, column: Int[Array, ""]) -> tuple[ConnectFourState, None]:
        after = move(state, column).state
        return jax.tree.map(partial(jnp.where, column >= 0), after, state), None

    return jax.lax.scan(play, empty(), columns)[0]


def chooser(moves: Callable[..., Array], weights: PyTree, seed: int) -> Chooser:
    """Returns a player whose policy is computed with JAX; always in batches of the same size."""
    keys = map(partial(jax.random.fold_in, jax.random.key(seed)), itertools.count())

    def choose(games: Sequence[Game]) -> list[int]:
        chosen: list[int] = []
        for start in range(0, len(games), AT_ONCE):
            columns = np.full((AT_ONCE, SQUARES), -1, np.int32)
            for row, game in zip(columns, games[start : start + AT_ONCE], strict=False):
                row[: len(game)] = game
            chosen += map(int, jax.device_get(moves(weights, jax.random.split(next(keys), AT_ONCE), columns)))
        return chosen[: len(games)]

    return choose


def judged_positions(player: Chooser, positions: Sequence[Contested]) -> dict[str, Any]:
    """Returns the shares of contested positions in which a player keeps the theoretical value."""
    moves = player([position.game for position in positions])
    judged = [(position, chosen in position.keeping) for position, chosen in zip(positions, moves, strict=True)]
    return {
        "all": share(kept for _, kept in judged),
        "quiet": share(kept for position, kept in judged if position.quiet),
    }


def judged_games(player: Chooser, solver: Solver, games: int, seed: int) -> dict[str, Any]:
    """Plays games of a player against the perfect player, the same number for each way to begin."""
    found = {}
    for side, first in SIDES.items():
        draw = random.Random(seed)
        others = [column for column in range(COLUMNS) if column != CENTRE]
        starts = [(draw.choice(others),) if side == "second_off_centre" else () for _ in range(games)]
        played = play_games(player, perfect_player(solver, seed + 1), solver, starts, first=first)
        kept = [each for game in played for each in game.kept]
        found[side] = {
            **outcomes(game.result for game in played),
            "decisions": {"number": len(kept), "share": sum(kept) / len(kept) if kept else None},
        }
    return found


def play_games(
    player: Chooser, perfect: Chooser, solver: Solver, starts: Sequence[Game], *, first: bool
) -> list[Played]:
    """Plays games side by side from these starts."""
    moves, indices = list(starts), range(len(starts))
    kept: list[list[bool]] = [[] for _ in indices]
    for _ in range(SQUARES):
        running = [index for index in indices if not is_over(board_after(moves[index]))]
        own = [index for index in running if (len(moves[index]) % 2 == 0) == first]
        others = [index for index in running if index not in own]
        chosen: dict[int, int] = {}
        for side, turn in ((player, own), (perfect, others)):
            chosen |= dict(zip(turn, side([moves[index] for index in turn]), strict=True))
        for index in own:
            kept[index] += judgement_of(solver, moves[index], chosen[index])
        for index, column in chosen.items():
            moves[index] += (column,)
    return [Played(result_of(game, first), tuple(each)) for game, each in zip(moves, kept, strict=True)]


def judgement_of(solver: Solver, game: Game, column: int) -> list[bool]:
    """Returns whether a move keeps the theoretical value; nothing where the position is not contested."""
    board = board_after(game)
    kept = solver.keeps(board, column)
    return [kept] if not kept or len(solver.keeping(board)) < len(legal(board)) else []


def result_of(game: Game, first: bool) -> int:
    """Returns the result of a game that is over, for the player who moved first or second."""
    if not board_after(game).hasWin():
        return DRAWN
    return WON if (len(game) % 2 == 1) == first else LOST


def share(kept: Iterable[bool]) -> dict[str, float | int | None]:
    """Returns the share of independent decisions that kept the value, with its standard error."""
    values = list(kept)
    if not values:
        return {"share": None, "standard_error": None, "number": 0}
    mean = sum(values) / len(values)
    return {"share": mean, "standard_error": (mean * (1 - mean) / len(values)) ** 0.5, "number": len(values)}


def outcomes(results: Iterable[int]) -> dict[str, int]:
    """Returns the numbers of games won, drawn and lost."""
    counts = Counter(int(result) for result in results)
    return {"won": counts[WON], "drawn": counts[DRAWN], "lost": counts[LOST]}


def judged_match(run: Path, games: int, plies: int, seed: int) -> dict[str, Any]:
    """Plays a match of the run's last checkpoint, with its own search, against `lookahead-1`."""
    match = rollmill.match(run, "lookahead-1", games=games, opening_plies=plies, env=GAME, seed=seed)
    return {
        "opponent": "lookahead-1",
        "opening_plies": plies,
        "score": match.score,
        "standard_error": match.standard_error,
        "moving_first": outcomes(match.moving_first),
        "moving_second": outcomes(match.moving_second),
    }


def loaded_checkpoints(run: Path, names: Sequence[str]) -> list[LoadedRun]:
    """Returns the weights of these checkpoints, each once, by iteration; `all` means every one that was kept."""
    with Checkpoints(RunDirectory.open(run).checkpoints, read_only=True) as checkpoints:
        present = checkpoints.iterations()
    wanted = [name for given in names for name in (map(str, present) if given == "all" else [given])]
    loaded = {found.iteration: found for found in (load_weights(run, checkpoint=name) for name in wanted)}
    for found in loaded.values():
        settings = found.graph.settings
        if (settings["algorithm"], settings["environment"]) != ("alphazero", GAME):
            raise SystemExit(f"{run} is no run of alphazero on {GAME}.")
    return [loaded[iteration] for iteration in sorted(loaded)]


def env_steps(run: Path, iteration: int) -> int:
    """Environment steps of the training before a checkpoint."""
    with Checkpoints(RunDirectory.open(run).checkpoints, read_only=True) as checkpoints:
        return checkpoints.metadata(iteration)["env_steps"]


def judge(chosen: Any) -> dict[str, Any]:
    """Judges all players; prints each when it is done."""
    loaded = loaded_checkpoints(chosen.run, chosen.checkpoint)
    solver = Solver()
    began = time.perf_counter()
    positions = contested_positions(solver, chosen.positions, chosen.seed)
    seconds = time.perf_counter() - began
    print(f"{len(positions)} contested positions in {seconds:.1f} s", flush=True)

    def row(policy: str, player: Chooser, **facts: Any) -> dict[str, Any]:
        began = time.perf_counter()
        found = {"policy": policy, **facts, "positions": judged_positions(player, positions)}
        if chosen.games:
            found["games"] = judged_games(player, solver, chosen.games // 2, chosen.seed)
        kept = found["positions"]["all"]["share"]
        print(f"{policy} {facts or ''}: {kept:.1%} in {time.perf_counter() - began:.1f} s", flush=True)
        return found

    baselines = [
        row("random", random_player(chosen.seed)),
        row("lookahead-2", lookahead_player(2, chosen.seed)),
        row("perfect", perfect_player(solver, chosen.seed + 2)),
    ]
    searches = {simulations: moves_of_search(loaded[-1], simulations) for simulations in chosen.simulations}
    checkpoints = [
        row(
            f"iteration {run.iteration}",
            chooser(moves, run.weights, chosen.seed),
            iteration=run.iteration,
            env_steps=env_steps(chosen.run, run.iteration),
            simulations=simulations,
        )
        for run in loaded
        for simulations, moves in searches.items()
    ]
    return {
        "run": chosen.run.name,
        "config": dict(loaded[-1].graph.settings["config"]),
        "training": training_of(chosen.run),
        "seed": chosen.seed,
        "positions": facts_of(positions, seconds),
        "baselines": baselines,
        "checkpoints": checkpoints,
        "match": judged_match(chosen.run, chosen.games, chosen.opening_plies, chosen.seed)
        if chosen.games
        else None,
    }


def training_of(run: Path) -> dict[str, Any]:
    """Returns the duration of the training, its machine and its openings."""
    made_by = json.loads((run / "versions.json").read_text())
    return {
        "summary": RunDirectory.open(run).read_summary(),
        "versions": made_by["versions"],
        "hardware": made_by["hardware"],
        "env_options": json.loads((run / "config.json").read_text())["graph"]["environment_options"],
    }


def facts_of(positions: Sequence[Contested], seconds: float) -> dict[str, Any]:
    """Returns the numbers of contested positions by kind, and the time to find them."""
    return {
        "number": len(positions),
        "quiet": sum(position.quiet for position in positions),
        "by_plies": dict(sorted(Counter(len(position.game) for position in positions).items())),
        "seconds": seconds,
        "book": BOOK,
    }


def record_by_name(run: Path) -> None:
    """Leaves only the run's name in the command line that is written beside the figures."""
    sys.argv = [sys.argv[0], *(run.name if Path(word) == run else word for word in sys.argv[1:])]


def main() -> None:
    chosen = options(
        __doc__,
        {"run": Path},
        checkpoint=(["last"], "last, best, all or iterations"),
        simulations=[0, 32, 128],
        positions=2000,
        games=(100, "even; half moving first; 0 plays none"),
        opening_plies=(2, "random moves of the match with lookahead-1"),
        seed=0,
        result="connect-four-judge",
    )
    if chosen.games % 2:
        raise SystemExit(f"--games {chosen.games} is odd; half of the games are played moving first.")
    enable_compilation_cache()
    result = judge(chosen)
    record_by_name(chosen.run)
    write_result(chosen.result, result, chosen.output)


if __name__ == "__main__":
    main()

"""The command `rollmill play RUN`, in which a person plays against a policy in the terminal."""

import sys
from dataclasses import dataclass

from rollmill.cli.parsing import parse
from rollmill.cli.shared_options import PolicyOptions
from rollmill.core.errors import UsageError
from rollmill.policies.playing import GameAgainstPolicy

HELP = "Type the number of an action, ? for the policy's choice, or q to quit."

MAX_LISTED = 12
"""Maximum number of legal actions that the prompt lists."""


@dataclass(frozen=True)
class Play(PolicyOptions):
    """Play a game for two players against the policy of a run."""

    second: bool = False
    """Let the policy make the first move."""


def run(arguments: list[str]) -> int:
    """Plays one game, reading the person's moves from standard input, one per line. Returns the exit code."""
    options = parse(Play, arguments, prog="rollmill play")
    game = GameAgainstPolicy(options.load(), person_first=not options.second, **options.play)
    print(f"{game.env.name}: {_role(game, options.second)}. {HELP}\n\n{game.board}\n")
    while not game.over:
        if game.persons_turn:
            if not _persons_move(game):
                print("game abandoned")
                return 0
        else:
            print(f"policy: {game.reply()}")
        print(f"\n{game.board}\n")
    print({"won": "You won.", "lost": "You lost.", "drawn": "A draw."}[game.result or "drawn"])
    return 0


def _role(game: GameAgainstPolicy, is_second: bool) -> str:
    """Returns who the person is: `you are X and move first`."""
    order = "second" if is_second else "first"
    return f"you move {order}" if game.symbol is None else f"you are {game.symbol} and move {order}"


def _persons_move(game: GameAgainstPolicy) -> bool:
    """Makes a legal move that the person types. Returns False at the end of input, or if the person quits."""
    while True:
        print(f"you ({_list_actions(game.legal_actions)}): ", end="", flush=True)
        line = sys.stdin.readline()
        if not sys.stdin.isatty():
            print(line.rstrip("\n"))  # a terminal already shows the typed line
        word = line.strip()
        if not line or word in ("q", "quit", "exit"):
            return False
        if word == "?":
            print(f"the policy would play {game.suggestion()}")
            continue
        try:
            game.move(_number(word))
            return True
        except UsageError as error:
            print(error)


def _list_actions(actions: list[int]) -> str:
    """Returns the legal actions in few characters."""
    if len(actions) > MAX_LISTED:
        return f"{len(actions)} actions between {actions[0]} and {actions[-1]}"
    return ", ".join(map(str, actions))


def _number(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise UsageError(f"{word!r} is not a number. {HELP}") from None

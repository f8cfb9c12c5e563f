"""The command `rollmill completion SHELL`, which prints a script that completes commands and options in a
shell.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, get_args, get_origin

from rollmill.cli.help import meaning_of
from rollmill.cli.help_search import OPTIONS
from rollmill.cli.parsing import parse
from rollmill.cli.requests import training_options
from rollmill.core.options import Arg, Option, options_of
from rollmill.envs import TRANSFORMS, registered
from rollmill.networks import registered_networks
from rollmill.recipes import RECIPES
from rollmill.runs.algorithms import ALGORITHMS

TRAINS = ("train", "sweep", "plan", "warm", "profile")
"""Commands that take an algorithm, an environment and the options of `rollmill train`."""

Shell: TypeAlias = Literal["bash", "zsh", "fish"]


@dataclass(frozen=True)
class Completion:
    """Print the script with which a shell completes commands, names and options."""

    shell: Annotated[Shell, Arg(metavar="SHELL", positional=True)]
    """Shell that reads the script: bash, zsh or fish."""


class _Vocabulary(NamedTuple):
    """All words that a shell can complete."""

    commands: Mapping[str, str]
    """Summaries by command."""
    algorithms: Sequence[str]
    environments: Sequence[str]
    options: Mapping[str, Sequence[Option]]
    """By command, or by `train ALGORITHM`."""
    values: Mapping[str, Sequence[str]]
    """Names that may follow an option, by `--option`."""


def run(arguments: list[str]) -> int:
    """Prints the completion script, and returns the exit code."""
    shell = parse(Completion, arguments, prog="rollmill completion").shell
    print("\n".join(_WRITERS[shell](_vocabulary())))
    return 0


def _vocabulary() -> _Vocabulary:
    from rollmill.cli.main import COMMANDS

    algorithms = sorted(name for name, _ in ALGORITHMS.items())
    options = {f"train {name}": training_options(name) for name in algorithms}
    for place, source in OPTIONS.items():
        module, _, kind = source.partition(":")
        known = options_of(getattr(import_module(f"rollmill.cli.{module}"), kind))
        command = place.partition(" ")[0]
        options[command] = [*options.get(command, []), *known]
    values = {
        f"--{one.name}": names for each in options.values() for one in each if (names := _choices(one.value_hint))
    }
    values |= {"--recipe": [*RECIPES], "--transform": [*TRANSFORMS]}
    values |= {"--network": [name for name, _ in registered_networks()]}
    summaries = {name: command.summary for name, command in COMMANDS.items()}
    return _Vocabulary(summaries, algorithms, [name for name, _ in registered()], options, values)


def _choices(hint: Any) -> list[str]:
    """Returns the strings that a type allows as `Literal`, also inside a union."""
    if get_origin(hint) is Literal:
        return [each for each in get_args(hint) if isinstance(each, str)]
    return [name for part in get_args(hint) for name in _choices(part)]


def _format_options(options: Sequence[Option]) -> str:
    """Returns the options as words of a command, separated by blanks."""
    named = [one for one in options if not one.arg.positional]
    forms = [f"--{name}" for one in named for name in (one.name, one.negated) if name]
    return " ".join(dict.fromkeys([*forms, "--help"]))


def _bash(words: _Vocabulary) -> Iterator[str]:
    trains = "|".join(TRAINS)
    yield '# Completion for bash: eval "$(rollmill completion bash)"'
    yield "_rollmill() {"
    yield '    local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}" words=""'
    yield '    local command="${COMP_WORDS[1]}" algorithm="${COMP_WORDS[2]}"'
    yield '    case "$previous" in'
    for option, names in words.values.items():
        yield f'        {option}) words="{" ".join(names)}" ;;'
    yield "    esac"
    yield '    if [[ -z "$words" && "$COMP_CWORD" == 1 ]]; then'
    yield f'        words="{" ".join(words.commands)} --help --version"'
    yield '    elif [[ -z "$words" && "$current" == -* ]]; then'
    yield f'        case "$command" in {trains}) case "$algorithm" in'
    for name in words.algorithms:
        yield f'            {name}) words="{_format_options(words.options[f"train {name}"])}" ;;'
    yield "        esac ;; esac"
    yield '        case "$command" in'
    for command in words.commands:
        yield f'            {command}) words="$words {_format_options(words.options.get(command, ()))}" ;;'
    yield "        esac"
    yield '    elif [[ -z "$words" ]]; then'
    yield '        case "$COMP_CWORD:$command" in'
    yield f'            {"|".join(f"2:{name}" for name in TRAINS)}) words="{" ".join(words.algorithms)}" ;;'
    yield f'            {"|".join(f"3:{name}" for name in TRAINS)}) words="{" ".join(words.environments)}" ;;'
    yield '            2:completion) words="bash zsh fish" ;;'
    yield "        esac"
    yield "    fi"
    yield '    COMPREPLY=($(compgen -W "$words" -- "$current"))'
    yield "}"
    yield "complete -o default -F _rollmill rollmill"


def _zsh(words: _Vocabulary) -> Iterator[str]:
    yield '# Completion for zsh, after `compinit`: eval "$(rollmill completion zsh)"'
    yield "autoload -U +X bashcompinit && bashcompinit"
    yield from list(_bash(words))[1:]


def _fish(words: _Vocabulary) -> Iterator[str]:
    yield "# Completion for fish: rollmill completion fish | source"
    trains, position = " ".join(TRAINS), "test (count (commandline -opc)) -eq"
    for name, summary in words.commands.items():
        yield f"complete -c rollmill -n '{position} 1' -f -a {name} -d {shlex.quote(summary.partition(':')[0])}"
    for place, names in ((2, words.algorithms), (3, words.environments)):
        condition = f"'{position} {place}; and __fish_seen_subcommand_from {trains}'"
        yield f"complete -c rollmill -n {condition} -f -a {shlex.quote(' '.join(names))}"
    completed = f"'{position} 2; and __fish_seen_subcommand_from completion'"
    yield f"complete -c rollmill -n {completed} -f -a 'bash zsh fish'"
    for entry, owners in _fish_options(words).items():
        algorithms = [name for _, _, name in (owner.partition(" ") for owner in owners) if name]
        commands = [*(TRAINS if algorithms else ()), *(owner for owner in owners if " " not in owner)]
        condition = f"__fish_seen_subcommand_from {' '.join(commands)}"
        if 0 < len(algorithms) < len(words.algorithms):
            condition += f"; and __fish_seen_subcommand_from {' '.join(algorithms)}"
        yield f"complete -c rollmill -n '{condition}' {entry}"


def _fish_options(words: _Vocabulary) -> dict[str, list[str]]:
    """Returns the part of a line that describes an option, with the commands that have it."""
    owners: dict[str, list[str]] = {}
    for owner, options in words.options.items():
        for option in options:
            if option.arg.positional:
                continue
            meaning = shlex.quote(meaning_of(option).partition(". ")[0].rstrip("."))
            names = words.values.get(f"--{option.name}")
            taken = f" -x -a {shlex.quote(' '.join(names))}" if names else "" if option.is_flag else " -r"
            for name in filter(None, (option.name, option.negated)):
                owners.setdefault(f"-l {name}{taken} -d {meaning}", []).append(owner)
    return owners


_WRITERS = {"bash": _bash, "zsh": _zsh, "fish": _fish}

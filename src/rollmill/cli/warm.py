"""The command `rollmill warm ALGORITHM ENVIRONMENT`, which compiles a run ahead of time."""

from rollmill.cli.parsing import HELP
from rollmill.cli.requests import parse_training
from rollmill.cli.train import usage
from rollmill.core.errors import UsageError
from rollmill.core.installation import cache_root
from rollmill.training.request import prepare_request


def run(arguments: list[str]) -> int:
    """Compiles a run, and prints where the result is stored. Returns the exit code."""
    if not arguments or arguments[0] in HELP:
        print(usage("warm"))
        return 0 if arguments else 2
    parsed = parse_training(arguments, command="warm")
    if parsed.searching.search_plan:
        raise UsageError(
            "--search-plan cannot be combined with warm. hint: search with `rollmill plan`, then warm with "
            "--plan FILE."
        )
    if "run_dir" in parsed.request.settings:
        raise UsageError("--run-dir has no effect, because nothing is trained. hint: leave it out.")
    program = prepare_request(parsed.request).program
    if program is None:
        raise UsageError(
            "only a run in a single program can be compiled ahead of time, but this plan has workers that "
            "compile their own programs. hint: leave the placement options out."
        )
    print(f"compiled in {program.compile_seconds:.1f} s; the next start of this run loads the program from:")
    print(cache_root())
    return 0

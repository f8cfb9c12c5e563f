"""`rollmill warm ALGORITHM ENVIRONMENT [OPTIONS]`: compiles a training and stores it, for later starts."""

from rollmill.cli.parsing import HELP
from rollmill.cli.requests import parse_training
from rollmill.cli.train import usage
from rollmill.core.errors import UsageError
from rollmill.core.installation import cache_root
from rollmill.training.request import prepare_request


def run(arguments: list[str]) -> int:
    """Compiles, and prints where the result is."""
    if not arguments or arguments[0] in HELP:
        print(usage("warm"))
        return 0 if arguments else 2
    parsed = parse_training(arguments, command="warm")
    if parsed.searching.search_plan:
        raise UsageError("--search-plan: search first with `rollmill plan`, and warm with --plan FILE.")
    if "run_dir" in parsed.request.settings:
        raise UsageError("--run-dir has no effect: nothing is trained. hint: leave it out.")
    program = prepare_request(parsed.request).program
    if program is None:
        raise UsageError(
            "only trainings in one program can be compiled ahead; those of this plan are compiled by their "
            "workers. hint: leave the options of the placement out."
        )
    print(f"compiled in {program.compile_seconds:.1f} s; the next start of this training finds it in:")
    print(cache_root())
    return 0

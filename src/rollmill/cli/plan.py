"""The command `rollmill plan`, which draws a plan or searches for the fastest one."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rollmill.cli.help import two_columns
from rollmill.cli.parsing import HELP
from rollmill.cli.requests import MERGED, parse_training
from rollmill.core.errors import UsageError
from rollmill.core.local_paths import check_new_file
from rollmill.core.options import Arg
from rollmill.plan_search.compiled_program import MemoryNeed, memory_need
from rollmill.plan_search.finding import SearchRequest, find_plan, leave_devices
from rollmill.plan_search.orders import SearchOrder
from rollmill.plan_search.search.result_table import PlanTable, draw_table, memory_text, speed_text
from rollmill.planning.distribution import list_distributions
from rollmill.planning.picture import draw
from rollmill.planning.plan import Plan, write_plan
from rollmill.training.placing import choose_plan, prepare_devices
from rollmill.training.request import TrainingRequest, prepare_request, resolve

MORE = 4
"""Factor by which to suggest a longer search, if it ended before all candidates were measured."""


@dataclass(frozen=True)
class Showing:
    """Options for showing a plan, and for writing it to a file."""

    show: bool = True
    """Draw the groups of fragments, and the data that passes between them."""
    rate: float = 100_000.0
    """Assumed environment steps per second, from which bytes per second are computed."""
    memory: bool = False
    """Also compile the run, and print the memory that it will need. Nothing is trained."""
    output: Path | None = None
    """File to write the plan to, for `rollmill train --plan FILE`."""
    force: Annotated[bool, Arg(only_on=True)] = False
    """Replace an existing file."""

    def check(self, *, searches: bool) -> None:
        """Checks the options, before anything is searched for or compiled.

        Raises a `UsageError` if one is out of bounds or has no effect, or if the file cannot be written.
        """
        if self.rate <= 0:
            raise UsageError(f"rate={self.rate} steps per second must be greater than 0.")
        if self.memory and searches:
            raise UsageError(
                "--memory has no effect with --search-plan, whose table already shows memory. hint: leave it out."
            )
        if self.output is not None:
            check_new_file(self.output, force=self.force)


def run(arguments: list[str]) -> int:
    """Draws a plan, searches for one, or lists the distribution policies. Returns the exit code."""
    if not arguments or arguments[0] in HELP:
        print(_usage())
        return 0
    parsed = parse_training(arguments, command="plan", more=("showing", Annotated[Showing, MERGED], Showing()))
    request, searching, showing = parsed.request, parsed.searching, parsed.more
    showing.check(searches=searching.search_plan)
    if searching.search_plan:
        plan = search_plan(SearchRequest(request, searching.objective, searching.budget, searching.fresh))
    else:
        plan = _show_chosen_plan(request, showing)
    if showing.output is not None:
        write_plan(plan, showing.output)
        print(f"wrote {showing.output}")
    return 0


def write_found(order: SearchOrder) -> int:
    """Searches for a plan, prints the table of candidates, writes the plan, and returns the exit code."""
    plan = search_plan(SearchRequest(order.request, order.objective, order.budget, order.fresh))
    write_plan(plan, Path(order.output))
    return 0


def search_plan(search: SearchRequest) -> Plan:
    """Searches for a plan on this machine, and prints the table of candidates."""
    environment = leave_devices()
    prepare_devices(search.options, environment=search.training.environment)
    quiet = search.options.quiet
    say = (lambda line: None) if quiet else (lambda line: print(line, file=sys.stderr, flush=True))
    found = find_plan(resolve(search.training).graph, search, environment=environment, say=say)
    if not quiet:
        _print(found.table, is_stored=found.is_stored, budget=search.budget)
    return found.plan


def _show_chosen_plan(request: TrainingRequest, showing: Showing) -> Plan:
    """Draws the plan that the options choose, prints its memory, and returns it."""
    if showing.memory:
        leave_devices()
    prepare_devices(request.options, environment=request.environment)
    resolved = resolve(request)
    plan = choose_plan(resolved.graph(), resolved.options)
    memory = _memory_text(request) if showing.memory else None
    if showing.show:
        print(draw(plan, resolved.graph(), steps_per_second=showing.rate))
    if memory is not None:
        print(f"\n{memory}")
    return plan


def _memory_text(request: TrainingRequest) -> str:
    """Returns the needed and the available memory."""
    prepared = prepare_request(request)
    need = memory_need(prepared)
    if need is None:
        where = (
            "on this device XLA does not report it"
            if prepared.program is not None
            else (f"the workers of {request.options.distribution} compile programs of their own")
        )
        raise UsageError(
            f"--memory shows the memory of a single program, but {where}. hint: use `--search-plan`, which "
            "measures it."
        )
    return format_memory(need)


def format_memory(need: MemoryNeed) -> str:
    """Formats the memory that a program needs, and the available memory."""
    if need.process is None:
        of_what = f"on each of {need.devices} devices" if need.devices > 1 else "on the device"
        found = f"memory: {memory_text(need.device)} {of_what}"
    else:
        count = f"{need.devices} x " if need.devices > 1 else ""
        parts = f"{count}{memory_text(need.device)} for training, {memory_text(need.process)} for the process"
        found = f"memory: {memory_text(need.total)} ({parts})"
    if need.limit is None:
        return found
    warning = (
        "\nThis does not fit. hint: lower num_envs, num_steps or buffer_size." if need.total > need.limit else ""
    )
    return f"{found}, of {memory_text(need.limit)} available{warning}"


def _print(table: PlanTable, *, is_stored: bool, budget: float) -> None:
    print(draw_table(table))
    chosen = table.chosen
    assert chosen is not None, "a search without a choice is an error"
    when = ", by an earlier search. --fresh repeats it." if is_stored else ""
    print(f"\nsearched {table.seconds:.0f} s{when}")
    if left := sum(row.status == "not reached" for row in table.rows):
        longer = f"{'--fresh ' if is_stored else ''}--budget {MORE * budget:g}"
        print(f"{left} of {len(table.rows)} candidates were not measured. {longer} might find a faster plan.")
    print(f"chosen: {chosen.candidate}, {speed_text(chosen.measured_speed)} steps/s: {chosen.reason}")
    print(f"        {' '.join(chosen.candidate.words)}")
    if chosen.candidate.num_envs is not None:
        print(
            f"        num_envs={chosen.candidate.num_envs}: a different batch size changes how the algorithm "
            "learns"
        )


def _usage() -> str:
    return "\n".join(
        [
            "usage: rollmill plan ALGORITHM ENVIRONMENT [--distribution NAME] [OPTIONS]",
            "       rollmill plan ALGORITHM ENVIRONMENT --search-plan [OPTIONS]",
            "",
            "distribution policies:",
            *two_columns(list_distributions().items()),
            "",
            "`rollmill plan ALGORITHM --help` lists the options.",
        ]
    )

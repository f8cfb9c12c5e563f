"""The options of a search for a plan, in `rollmill plan` and `rollmill train`."""

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from rollmill.core.errors import RollmillError, UsageError
from rollmill.core.temporary import temporary_folder
from rollmill.plan_search.search.machine import DECIDED, DEFAULT_BUDGET, Objective
from rollmill.training.request import TrainingRequest

OWN = ("budget", "objective", "fresh")
ELSEWHERE = ("plan", "cluster", "host")
"""Options that leave nothing to search for, or not on this machine."""


@dataclass(frozen=True)
class SearchOptions:
    """Options of the search for a plan."""

    search_plan: bool = False
    """First search for the fastest way to run the training, by short trainings; placement options that are given
    narrow the search. The result is kept for the next time."""
    budget: float = DEFAULT_BUDGET
    """Seconds that the search may take; the first candidate is measured in any case."""
    objective: Objective = "keep-batch"
    """`keep-batch` changes nothing of what is learned; `grow-batch` may also raise the number of environments."""
    fresh: bool = False
    """Search although there is a result of an earlier search."""

    def check(self, given: Collection[str]) -> None:
        """Raises a `UsageError` if an option is out of bounds, or has no effect with the `given` ones."""
        if not self.search_plan:
            for name in sorted({*given} & {*OWN}):
                raise UsageError(
                    f"--{name} has no effect without --search-plan. hint: add --search-plan, or leave it out."
                )
            return
        if not 0 < self.budget < float("inf"):
            raise UsageError(f"budget={self.budget:g} seconds must be greater than 0 and finite.")
        for name in sorted({*given} & {*ELSEWHERE}):
            raise UsageError(
                f"--{name} has no effect with --search-plan, which chooses a plan for this machine. hint: leave "
                "one of them out."
            )


class PlanSearchFailed(RollmillError):
    """The search ended without a plan, and has printed the reason."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("the search found no plan (see above). Nothing was written.")
        self.exit_code = exit_code


@contextlib.contextmanager
def planned(request: TrainingRequest, searching: SearchOptions) -> Iterator[TrainingRequest]:
    """Yields the request, with the plan of a search if requested.

    The search runs in its own process, because it starts JAX with other devices than the training may need. Raises
    `PlanSearchFailed` if it failed, after it has printed why.
    """
    if not searching.search_plan:
        yield request
        return
    from rollmill.plan_search.orders import Order, SearchOrder, start_child

    with temporary_folder("plan") as folder:
        file = folder / "plan.json"
        order = SearchOrder(
            request=request.without(("run_dir", "resume_if_exists")),
            objective=searching.objective,
            budget=searching.budget,
            fresh=searching.fresh,
            output=str(file),
        )
        search = start_child(Order(search=order), name="plan")
        try:
            code = search.wait()
        except BaseException:
            search.terminate()
            search.wait()
            raise
        if code or not file.is_file():
            raise PlanSearchFailed(code or 1)
        grows = ("num_envs",) if searching.objective == "grow-batch" else ()
        yield request.without((*DECIDED, *grows)).changed({"plan": str(file)})

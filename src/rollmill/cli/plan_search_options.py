"""The options of a plan search, in `rollmill plan` and `rollmill train`."""

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from rollmill.core.errors import RollmillError, UsageError
from rollmill.core.temporary import temporary_folder
from rollmill.plan_search.search.machine import DECIDED, DEFAULT_BUDGET, Objective
from rollmill.record.display import Lines
from rollmill.training.request import TrainingRequest

OWN = ("budget", "objective", "fresh")
ELSEWHERE = ("plan", "cluster", "host")
"""Options that cannot be combined with a plan search on this machine."""


@dataclass(frozen=True)
class SearchOptions:
    """Options of a plan search."""

    search_plan: bool = False
    """First search for the fastest way to train, using short training runs. Other placement options restrict the
    search. The result is stored for later runs."""
    budget: float = DEFAULT_BUDGET
    """Maximum duration of the search in seconds. The first candidate is always measured."""
    objective: Objective = "keep-batch"
    """`keep-batch` does not change what is learned; `grow-batch` may also raise the number of environments."""
    fresh: bool = False
    """Search again, even if an earlier search has a result."""

    def check(self, given: Collection[str]) -> None:
        """Raises a `UsageError` if an option is out of bounds, or has no effect with the `given` options."""
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
    """Raised if a plan search ended without a plan. The search has printed the reason."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("the search found no plan (see above). Nothing was written.")
        self.exit_code = exit_code


@contextlib.contextmanager
def request_with_plan(request: TrainingRequest, searching: SearchOptions) -> Iterator[TrainingRequest]:
    """Context manager that yields the request, with the plan of a search if one was requested.

    The search runs in a separate process, because it starts JAX with other devices than the run may need.
    Raises `PlanSearchFailed` if the search found no plan and has printed why.
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


def with_physics(request: TrainingRequest, searching: SearchOptions) -> TrainingRequest:
    """Returns the request, with the faster physics engine if it contains `physics=auto`.

    The engine is chosen by timing short training runs.

    Raises a `UsageError` if a plan is to be searched or given, too.
    """
    if request.environment_options.get("physics") != "auto":
        return request
    from rollmill.plan_search.physics import choose_physics, leaves_physics_open

    if not leaves_physics_open(request):
        return request
    for name in ("search_plan", *ELSEWHERE):
        if getattr(searching, name, False) or name in request.settings:
            raise UsageError(
                f"physics=auto cannot be combined with {name}, because it measures short training runs on this "
                "machine with the given placement. hint: use physics=jax or physics=warp."
            )
    quiet = request.settings.get("quiet", False)
    return choose_physics(request, (lambda line: None) if quiet else Lines().note)

"""The search for a plan beside an exhaustive sweep of all its candidates, on this machine.

    python benchmarks/planner.py cartpole alphazero tag --rounds 3
    python benchmarks/planner.py        # writes the table of docs/planning.md from the results

Every candidate is measured as the search measures it, but without rules, bounds or a budget: once in each
round, all in turns. Then the search itself runs, as `rollmill plan --search-plan --fresh` does. Its choice is
judged by the sweep's medians: what the search itself has measured does not count. Predicted memory is compared
with measured.

Other processes of the machine disturb single figures; ratios of medians of turns are less disturbed.
"""

import argparse
import json
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from measure import RESULTS, spread, table_of, write_result, write_table

from rollmill.api.plan_search.finding import (
    DEFAULT_BUDGET,
    FoundPlan,
    SearchRequest,
    find_plan,
    list_candidates,
    this_machine,
    workload_of,
)
from rollmill.api.plan_search.process import START_SECONDS
from rollmill.api.plan_search.trials import ProcessTrials
from rollmill.cli.train import GivenTraining, parse_training
from rollmill.planning.search import Candidate, CannotRun, OutOfTime, PlanTable, Trials, search

WORKS = {
    "cartpole": "ppo CartPole-v1 --num-envs 64 --num-steps 64 --total-timesteps 20000000",
    "cartpole-wide": "ppo CartPole-v1 --num-envs 2048 --num-steps 32 --total-timesteps 20000000",
    "tag": "ippo TagContinuous-v0 --num-envs 8 --num-steps 32 --total-timesteps 20000000",
    "alphazero": "alphazero TicTacToe-v0 --num-envs 32 --num-steps 16 --total-timesteps 2000000",
    "host": "ppo gymnasium:CartPole-v1 --num-envs 8 --num-steps 128 --total-timesteps 2000000",
}

PAGE = Path(__file__).parents[1] / "docs/planning.md"


class Swept(NamedTuple):
    """What the rounds of the sweep have measured of a candidate."""

    speeds: list[float]
    memory: list[float]
    reason: str = ""
    """Why it cannot run."""


def measure_alone(trials: ProcessTrials, candidate: Candidate) -> tuple[float, float | None]:
    """Throughput and memory of one candidate."""
    unknown = lambda _: None
    alone = Trials(trials.check, unknown, trials.predict_memory, unknown, trials.measure)
    table = search([candidate], alone, budget_seconds=START_SECONDS)
    trials.close()
    row = table.rows[0]
    if row.measured_speed is None:
        raise CannotRun(row.reason)
    return row.measured_speed, row.measured_memory


def sweep(trials: ProcessTrials, found: Sequence[Candidate], *, rounds: int) -> dict[Candidate, Swept]:
    """All candidates, in turns."""
    swept = {candidate: Swept([], []) for candidate in found}
    for number in range(rounds):
        for candidate in found:
            if swept[candidate].reason:
                continue
            try:
                speed, memory = measure_alone(trials, candidate)
            except (CannotRun, OutOfTime) as error:
                swept[candidate] = swept[candidate]._replace(reason=str(error) or "too slow to start")
                print(f"{number} {candidate}: {swept[candidate].reason}", flush=True)
                continue
            swept[candidate].speeds.append(speed)
            swept[candidate].memory.extend([] if memory is None else [memory])
            print(f"{number} {candidate}: {speed:,.0f} steps/s", flush=True)
    return swept


def judged(found: FoundPlan, swept: dict[Candidate, Swept]) -> dict[str, Any]:
    """The search's choice beside the sweep's best, and its predictions beside what it measured."""
    medians = {candidate: median(each.speeds) for candidate, each in swept.items() if each.speeds}
    best = max(medians, key=lambda candidate: medians[candidate])
    chosen = found.table.chosen
    assert chosen is not None
    return {
        "chosen": str(chosen.candidate),
        "chosen_steps_per_second": medians[chosen.candidate],
        "best": str(best),
        "best_steps_per_second": medians[best],
        "chosen_over_best": medians[chosen.candidate] / medians[best],
        "search_seconds": found.table.seconds,
        "measured_by_search": sum(row.measured_speed is not None for row in found.table.rows),
        "candidates": len(found.table.rows),
        "predicted_over_measured_memory": _memory_ratios(found.table),
    }


def _memory_ratios(table: PlanTable) -> dict[str, float]:
    return {
        str(row.candidate): row.predicted_memory / row.measured_memory
        for row in table.rows
        if row.predicted_memory and row.measured_memory
    }


def compare(name: str, *, rounds: int, budget: float) -> dict[str, Any]:
    words = WORKS[name].split()
    given, _ = parse_training(words)
    graph_of = cache(given.graph_of)
    request = SearchRequest(words=words, options=given.options, fixed={}, budget=budget, fresh=True)
    swept = sweep(_trials(given, words), list_candidates(graph_of(None), request, this_machine()), rounds=rounds)
    found = find_plan(graph_of, request, environment=dict(os.environ), say=print)
    result = judged(found, swept)
    print(f"{name}: {result}", flush=True)
    rows = {
        str(candidate): {"reason": each.reason}
        if each.reason
        else {
            "steps_per_second": spread(each.speeds),
            "memory_bytes": spread(each.memory) if each.memory else None,
        }
        for candidate, each in swept.items()
    }
    return {"command": " ".join(words), "rounds": rounds, "budget": budget, **result, "sweep": rows}


def _trials(given: GivenTraining, words: Sequence[str]) -> ProcessTrials:
    graph = given.graph_of(None)
    return ProcessTrials(
        cache(given.graph_of),
        words,
        given.options,
        this_machine(),
        workload_of(graph, given.options),
        lambda: None,
        dict(os.environ),
    )


def table_of_results(folder: Path) -> str:
    """The table of all results of this script, in Markdown."""
    head = (
        "Training",
        "Choice of the search",
        "Share of the best",
        "Measured",
        "Seconds",
        "Memory, predicted / measured",
    )
    rows = []
    for file in sorted(folder.glob("planner-*.json")):
        for result in json.loads(file.read_text())["result"].values():
            ratios = result["predicted_over_measured_memory"].values()
            rows.append(
                (
                    f"`{result['command']}`",
                    result["chosen"],
                    f"{result['chosen_over_best']:.2f}",
                    f"{result['measured_by_search']} of {result['candidates']}",
                    f"{result['search_seconds']:.0f}",
                    f"{min(ratios):.2f} to {max(ratios):.2f}",
                )
            )
    return table_of(head, rows, numbers=(2, 3, 4, 5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "works", nargs="*", help=f"of {', '.join(WORKS)}; without any, the table of results is written"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=DEFAULT_BUDGET)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--name", default="planner-cpu")
    chosen = parser.parse_args()
    if unknown := set(chosen.works) - WORKS.keys():
        parser.error(f"{', '.join(unknown)}: known are {', '.join(WORKS)}")
    if not chosen.works:
        write_table(table_of_results(chosen.output), PAGE)
        return
    results = {name: compare(name, rounds=chosen.rounds, budget=chosen.budget) for name in chosen.works}
    write_result(chosen.name, results, directory=chosen.output)


if __name__ == "__main__":
    main()

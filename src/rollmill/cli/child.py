"""Process of a sweep's trial or of a plan search: `python -m rollmill.cli.child PARENT CORES NAME`.

It reads a job as JSON from standard input. It runs on some of the machine's cores, so that XLA creates one thread
for each, and stops with a checkpoint when the process that started it dies.
"""

import os
import signal
import sys
from pathlib import Path
from typing import NoReturn


def run(parent: str, cores: str, name: str) -> NoReturn:
    """Runs the job from standard input on some of the cores, for as long as the parent process lives."""
    from rollmill.core.interruption import take_held_requests
    from rollmill.core.process_tree import end_with_parent, name_process

    take_held_requests()
    name_process(f"rollmill {Path(name).name}")  # a forked process still has the name of the sweep's command
    if cores:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    # JAX is imported after the cores are set, because it creates its threads then.
    from rollmill.cli.main import run_and_exit

    end_with_parent(int(parent), signal.SIGTERM)
    run_and_exit(_handle_order, keeps_result=True)


def _handle_order() -> int:
    from rollmill.cli.plan import write_found
    from rollmill.cli.train import report
    from rollmill.plan_search.orders import read_order
    from rollmill.training.population import Population, train_population
    from rollmill.training.request import train_request
    from rollmill.training.resuming import resume

    order = read_order(sys.stdin.buffer.read())
    if order.search is not None:
        return write_found(order.search)
    if order.resume is not None:
        return report(resume(order.resume, track=order.track))
    if order.together:
        how = order.population
        population = how and Population(how.rule, Path(how.folder), how.members, how.total)
        return max(report(run) for run in train_population(order.together, population))
    return report(train_request(order.trained))


if __name__ == "__main__":
    run(*sys.argv[1:])

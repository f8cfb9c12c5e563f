"""The process of one trial of a sweep: `python -m rollmill.cli.trial PARENT CORES COMMAND ...`.

It runs on some of the machine's cores, so that XLA makes as many threads, and stops with a checkpoint when the
process that started it dies.
"""

import os
import signal
import sys


def run(parent: str, cores: str, *command: str) -> None:
    """Runs a command of `rollmill` on some cores, as long as the parent lives."""
    if cores:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    # JAX is imported with the cores that it is to use.
    from rollmill.cli.main import main
    from rollmill.execution.processes.process_tree import end_with_parent

    end_with_parent(int(parent), signal.SIGTERM)
    main(command)


if __name__ == "__main__":
    run(*sys.argv[1:])

"""Worker process of a server: `python -m rollmill.cli.serve_worker ARGUMENTS PARENT ...`."""

import os
import signal
import socket
import sys

from rollmill.core.errors import RollmillError
from rollmill.core.json_data import parse_json


def run(arguments: str, parent: str, listener: str, counts: str, index: str, cores: str, pipe: str) -> int:
    """Serves on a socket of the parent process for as long as that process lives, and returns the exit code.

    `arguments` are the arguments of `rollmill serve` as a JSON list. `listener`, `counts` (the file of statistics)
    and `pipe` (through which the worker reports that it serves) are file descriptors. It runs on the
    comma-separated `cores`, or on any core if empty.
    """
    if cores:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    # JAX is imported after the cores are set, because it creates its threads then.
    from rollmill.cli.parsing import parse
    from rollmill.cli.serve import GAVE_UP, Serve
    from rollmill.core.process_tree import end_with_parent
    from rollmill.record.signals import stop_on_signals
    from rollmill.serving import READY, Server, ServerStatistics, read_token

    end_with_parent(int(parent), signal.SIGTERM)
    options: Serve = parse(Serve, parse_json(arguments, where="arguments"), prog="rollmill serve")
    policy = options.policy(int(index))
    statistics = ServerStatistics(options.workers, int(index), int(counts))
    token = read_token(options.token_file, options.address)
    server = Server(policy, options.rule, options.limits(policy), statistics, token=token)
    with stop_on_signals() as stop, socket.socket(fileno=int(listener)) as inherited:
        fine = server.run(inherited, lambda: stop.requested, ready=lambda: _report(int(pipe), READY))
    return 0 if fine else GAVE_UP


def _report(pipe: int, word: bytes) -> None:
    os.write(pipe, word)
    os.close(pipe)


if __name__ == "__main__":
    try:
        sys.exit(run(*sys.argv[1:]))
    except RollmillError as error:
        print(f"rollmill: {error}", file=sys.stderr)
        sys.exit(error.exit_code)

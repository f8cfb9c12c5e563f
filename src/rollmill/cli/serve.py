"""The command `rollmill serve RUN`, which serves a policy over HTTP."""

import contextlib
import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from rollmill.cli.parsing import parse
from rollmill.cli.shared_options import Imports, Trust
from rollmill.core.errors import UsageError
from rollmill.core.folder import open_replacement
from rollmill.core.machine import GpuSharing
from rollmill.core.options import Arg
from rollmill.core.stored_paths import RunPath
from rollmill.gpus.machine_parts import divide_machine
from rollmill.policies.loading import load_weights
from rollmill.record.signals import stop_on_signals
from rollmill.serving import (
    LOOPBACK,
    Address,
    BatchedPolicy,
    BatchingRule,
    Server,
    ServerLimits,
    ServerStatistics,
    check_rule,
    limits_for_batches,
    listen,
    listener_url,
    raise_descriptor_limit,
    read_token,
    run_workers,
    statistics_bytes,
)

GAVE_UP = 1
"""Exit code if several batches in a row failed."""

GAVE_UP_SENTENCE = "rollmill: the server stopped because one batch after another failed."

MAX_WORKERS = 256


@dataclass(frozen=True)
class Serve:
    """Serve a run's policy over HTTP. Requests from several clients are batched."""

    run: Annotated[RunPath, Arg(metavar="RUN", positional=True)]
    """Directory of the run."""
    checkpoint: str = "last"
    """Checkpoint of the policy: last; best, with the best return during training; or the number of an
    iteration."""
    host: str = LOOPBACK
    """Address to listen at. An address that other machines can reach needs a token."""
    port: int = 0
    """Port to listen at; 0 picks a free one."""
    socket: Path | None = None
    """Listen at this path as a Unix socket instead, which only this user can access."""
    token_file: Path | None = None
    """File with a token that clients must send (Authorization: Bearer)."""
    address_file: Path | None = None
    """Write the server's address to this file once it is ready."""
    max_batch: int = 64
    """Maximum number of observations in a batch, a power of two."""
    max_wait_ms: float = 0.0
    """Milliseconds that a request may wait for others while the device is idle; 0 computes immediately."""
    workers: int = 1
    """Number of processes that serve, each with its own copy of the policy."""
    gpu_sharing: GpuSharing = "auto"
    """How several processes share a GPU: mps, mig, turns, or auto."""
    max_sessions: int = 1024
    """Maximum number of open sessions of a recurrent policy."""
    session_seconds: float = 600.0
    """Seconds without a request after which a session may be evicted for a new one."""
    stochastic: bool = False
    """Sample actions as in training, instead of taking the most likely one."""
    seed: int = 0
    """Seed for sampling actions."""
    train_seed: int | None = None
    """Training seed of the policy, if the run trained several. Default: the first."""
    trust: Trust = False
    """Let the run in this directory import the modules that it names, now and later. Runs made on this machine
    always may."""
    imports: Imports = ()
    """Module to import first, because it registers the environment, the network or the algorithm."""

    @property
    def address(self) -> Address:
        """Address at which the server listens."""
        return Address(self.host, self.port, self.socket)

    @property
    def rule(self) -> BatchingRule:
        """Rule by which requests are combined into batches."""
        return check_rule(BatchingRule(self.max_batch, self.max_wait_ms / 1e3))

    def check(self) -> None:
        """Raises a `UsageError` if an option is out of range."""
        bounds = {"port": (0, 65535), "workers": (1, MAX_WORKERS), "max_sessions": (1, 2**20)}
        for name, (least, most) in bounds.items():
            if not least <= (value := getattr(self, name)) <= most:
                option = name.replace("_", "-")
                raise UsageError(f"--{option} {value} must be between {least} and {most:,}.")
        if not 0 <= self.seed < 2**32:
            raise UsageError(f"--seed {self.seed} must be between 0 and {2**32 - 1}.")
        if not 0 < self.session_seconds < float("inf"):
            raise UsageError(f"--session-seconds {self.session_seconds:g} must be positive and finite.")

    def policy(self, worker: int = 0) -> BatchedPolicy:
        """Loads and compiles the run's policy. Workers sample different actions."""
        loaded = load_weights(
            self.run, checkpoint=self.checkpoint, seed=self.train_seed, imports=self.imports, trust=self.trust
        )
        policy = BatchedPolicy(
            loaded,
            max_batch=self.rule.max_batch,
            sessions=self.max_sessions,
            stochastic=self.stochastic,
            seed=(self.seed + worker) % 2**32,
        )
        if policy.recurrent and self.workers > 1:
            raise UsageError(
                f"--workers {self.workers} is not supported for a recurrent policy, because its sessions live in "
                "one process. hint: use --workers 1, or start several servers and send each client to the same "
                "one."
            )
        policy.compile()
        return policy

    def limits(self, policy: BatchedPolicy) -> ServerLimits:
        """Returns the limits on requests and connections that the server enforces."""
        found = limits_for_batches(self.rule.max_batch, policy.num_scalars)
        return replace(found, sessions=self.max_sessions, session_seconds=self.session_seconds)


def run(arguments: list[str]) -> int:
    """Serves the policy until a signal arrives, and returns the exit code."""
    options = parse(Serve, arguments, prog="rollmill serve")
    options.check()
    raise_descriptor_limit(ServerLimits(1).connections)
    token = read_token(options.token_file, options.address)
    _ = options.rule
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listen(options.address))
        if options.socket is not None:
            stack.callback(options.socket.unlink, missing_ok=True)

        def ready() -> None:
            announce(options, listener)
            if options.address_file is not None:  # the file belongs to this server only from now on
                stack.callback(options.address_file.unlink, missing_ok=True)

        if options.workers > 1:
            return _serve_by_workers(options, arguments, listener, ready)
        return _serve_here(options, listener, token, ready)


def _serve_here(options: Serve, listener: socket.socket, token: bytes | None, ready: Callable[[], None]) -> int:
    policy = options.policy()
    server = Server(policy, options.rule, options.limits(policy), ServerStatistics(), token=token)
    with stop_on_signals() as stop:
        fine = server.run(listener, lambda: stop.requested, ready=ready)
    print(f"stopped by {stop.signal_name}" if fine else GAVE_UP_SENTENCE, file=sys.stderr)
    return stop.exit_code if fine else GAVE_UP


def _serve_by_workers(
    options: Serve, arguments: Sequence[str], listener: socket.socket, ready: Callable[[], None]
) -> int:
    with tempfile.TemporaryFile() as counts, stop_on_signals() as stop:
        counts.truncate(statistics_bytes(options.workers))
        descriptors = listener.fileno(), counts.fileno()
        command = [
            *("-m", "rollmill.cli.serve_worker"),
            *(json.dumps(list(arguments)), str(os.getpid()), *map(str, descriptors)),
        ]
        with divide_machine(options.workers, options.workers, options.gpu_sharing) as parts:
            code = run_workers(
                command,
                parts.each,
                descriptors=descriptors,
                stop=stop,
                ready=ready,
                patience=ServerLimits(1).drain_seconds + 5,
            )
    if code:
        return code
    print(f"stopped by {stop.signal_name}", file=sys.stderr)
    return stop.exit_code


def announce(options: Serve, listener: socket.socket) -> None:
    """Prints the address of the server, and writes it to the file that the user requested."""
    url = listener_url(listener)
    if options.address_file is not None:
        try:
            with open_replacement(options.address_file) as file:
                file.write(f"{url}\n".encode())
        except OSError as error:
            raise UsageError(
                f"--address-file {options.address_file} cannot be written: {error.strerror}."
            ) from error
    print(f"serving {options.run} at {url}", flush=True)

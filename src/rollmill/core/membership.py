"""Reads this process's rank in a job from the environment variables of SLURM, Open MPI or torchrun."""

import hashlib
import os
import re
import socket
from collections.abc import Mapping
from typing import NamedTuple

from rollmill.core.errors import UsageError

HOSTS = "hosts"
"""Value of the option `cluster` if a batch system has started the processes of the run."""
TOKEN = "ROLLMILL_HOSTS_TOKEN"
"""Environment variable with the secret that the processes of a job share."""
PORT = 29500
"""Default port on which the process with rank 0 listens."""
MIN_TOKEN = 16

_SYSTEMS = (
    ("SLURM", "SLURM_PROCID", "SLURM_NTASKS"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("torchrun's variables", "RANK", "WORLD_SIZE"),
)
"""Each system's variables for the rank and the number of processes. torchrun's variables may also be set by hand,
so they are read first."""

HINT = (
    "hint: start the command with `srun`, or set RANK, WORLD_SIZE and MASTER_ADDR (the address of the host with "
    "rank 0) for each process"
)


class Membership(NamedTuple):
    """The position of this process in a job: its `rank` among `count` processes."""

    rank: int
    count: int
    first: str
    """Address of the host with rank 0."""
    port: int
    token: bytes

    @property
    def address(self) -> str:
        """Host and port at which the process with rank 0 listens."""
        return f"tcp:{self.first}:{self.port}"


def read_membership(variables: Mapping[str, str] = os.environ) -> Membership:
    """Reads the position of this process in its job from environment variables.

    Raises a `UsageError` if the variables do not contain the rank, or if the processes have no common secret.
    """
    rank, count = _rank_and_count(variables)
    first = variables.get("MASTER_ADDR") or _first_of_slurm(variables)
    if not first:
        raise UsageError(
            f"cluster={HOSTS}: no environment variable gives the address of the host with rank 0. {HINT}."
        )
    port = variables.get("MASTER_PORT", str(PORT))
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UsageError(f"MASTER_PORT={port} must be a port between 1 and 65535.")
    secret = variables.get(TOKEN, "")
    if len(secret) < MIN_TOKEN:
        raise UsageError(
            f"cluster={HOSTS} needs a secret of at least {MIN_TOKEN} characters in {TOKEN}, the same on all "
            f"hosts. hint: put export {TOKEN}=$(openssl rand -hex 16) before srun in the job script."
        )
    return Membership(rank, count, _resolve(first), int(port), hashlib.sha256(secret.encode()).digest())


def own_address(towards: str) -> str:
    """Returns the address at which another host reaches this host."""
    family = socket.AF_INET6 if ":" in towards else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing
        probe.connect((towards, 9))
        return probe.getsockname()[0]


def _rank_and_count(variables: Mapping[str, str]) -> tuple[int, int]:
    for _, rank, count in reversed(_SYSTEMS):
        if rank in variables and count in variables:
            texts = variables[rank], variables[count]
            if all(text.isdecimal() for text in texts) and int(texts[0]) < int(texts[1]):
                return int(texts[0]), int(texts[1])
            raise UsageError(f"{rank}={texts[0]} must be at least 0 and less than {count}={texts[1]}.")
    systems = ", ".join(system for system, _, _ in _SYSTEMS)
    raise UsageError(
        f"cluster={HOSTS}: the environment variables of {systems} that give the rank of this process are not "
        f"set. {HINT}."
    )


def _first_of_slurm(variables: Mapping[str, str]) -> str:
    """Returns the first host in SLURM's list, such as `gpu[07-09,12],login1`."""
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST", "")
    found = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", nodes)
    return "" if found is None else f"{found[1]}{found[2] or ''}"


def _resolve(host: str) -> str:
    try:
        return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]  # pyright: ignore[reportReturnType]
    except OSError as error:
        raise UsageError(
            f"cluster={HOSTS}: the address of the host with rank 0, {host}, cannot be resolved: {error}."
        ) from error

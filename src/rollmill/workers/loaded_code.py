"""Compares the code that each replica has loaded with the coordinator's code, and records it in the run."""

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from rollmill.core.code_identity import SHOWN_DIGITS, digests_of, own_code
from rollmill.core.errors import UnfitHost
from rollmill.dataflow import Graph, fingerprint
from rollmill.processes.clocks import Clock
from rollmill.processes.control import Control
from rollmill.record.json_files import write_json
from rollmill.record.run_directory import RunDirectory
from rollmill.workers.protocol import Loaded, send
from rollmill.workers.run_spec import RunSpec

RECORD = "workers.json"
"""File in the run directory that describes the code of each worker."""


def tell_loaded(control: Control, spec: RunSpec, graph: Graph | None = None) -> None:
    """Reports to the coordinator which code this process has loaded, with the graph's fingerprint if given.

    On the coordinator's own host, digests of the code suffice, and no graph is needed.
    """
    send(
        control,
        Loaded(
            host=platform.node(),
            pid=os.getpid(),
            platform="" if graph is None else jax.default_backend(),  # a mesh starts its backend later
            code=own_code()._asdict(),
            modules=digests_of(spec.graph.imports),
            fingerprint=None if graph is None else fingerprint(graph),
        ),
    )


@dataclass
class LoadedCode:
    """Compares the code that replicas have loaded with the coordinator's code, and records it in the run."""

    spec: RunSpec
    run: RunDirectory
    modules: Mapping[str, str] = field(init=False)
    _record: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.modules = digests_of(self.spec.graph.imports)

    def check(self, worker: str, loaded: Loaded, clock: Clock) -> None:
        """Checks and records the code of a replica, and records its clock.

        Raises `UnfitHost` if the code differs from the coordinator's.
        """
        self._record[worker] = {**loaded._asdict(), "clock": clock._asdict()}
        write_json(self.run.folder, RECORD, self._record)
        differences = [
            f"source of {name} {digest[:SHOWN_DIGITS]} here, {loaded.modules[name][:SHOWN_DIGITS]} there"
            for name, digest in self.modules.items()
            if loaded.modules.get(name, digest) != digest
        ]
        ours, theirs = self.spec.graph.described.get("fingerprint"), loaded.fingerprint
        comparable = loaded.platform == self.spec.platform
        if not differences and comparable and ours and theirs and ours != theirs:
            here, there = ours[:SHOWN_DIGITS], theirs[:SHOWN_DIGITS]
            differences.append(f"fingerprint of the graph {here} here, {there} there")
        if differences:
            raise UnfitHost(
                f"{worker} on {loaded.host} runs different code from the driver: {'; '.join(differences)}. "
                "hint: install the same version on all hosts"
            )

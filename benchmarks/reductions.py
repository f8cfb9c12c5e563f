"""Means over the processes of a mesh at several sizes, in every way.

    python benchmarks/reductions.py --gpus 2 --instances 2 4 [--parameters 10000 100000 1000000 10000000]
    python benchmarks/reductions.py --gpus 4 --instances 1 --name reductions-one-shot

Where each process has a GPU they are flat and one-shot; where they share GPUs, flat, hierarchical and by the host.
Processes are started as those of a training are, and join one `jax.distributed` job. At each size the way is
chosen as a training chooses it, by one timing; then all are timed again, several times in turns, and the choice is
judged by these medians. Each way is also computed with other numbers in each process, and compared with their
mean. Needs GPUs, and NCCL 2.30 or newer where they are shared; seconds are those of the slowest process.
"""

import contextlib
import json
import os
import subprocess
import sys
from statistics import median
from typing import Any

import numpy as np
from measure import options, write_result

from rollmill.channels.broker.client import RemoteBroker
from rollmill.channels.broker.local import LocalBroker
from rollmill.channels.broker.server import BrokerServer
from rollmill.channels.shm.wire import MemoryWire
from rollmill.channels.transport.handshake import new_token
from rollmill.programs.meshes import mesh_of
from rollmill.programs.reductions import (
    MeshAllReduce,
    algorithms_for,
    fastest,
    means_in_a_row,
    mesh_all_reduce,
    time_reductions,
)
from rollmill.workers.replica.mesh import HostMean, RendezvousPort
from rollmill.workers.worker_gpus import gpus_of_workers

WAIT_SECONDS = 300


def measure(gpus: int, instances: int, chosen: Any) -> list[dict[str, Any]]:
    """Returns rows of all sizes for a number of instances on each GPU."""
    processes, token = gpus * instances, new_token()
    with (
        gpus_of_workers(processes, "mps", mesh=True) as shared,
        contextlib.closing(LocalBroker()) as broker,
        contextlib.closing(BrokerServer(broker, token)) as server,
        contextlib.closing(RendezvousPort()) as meeting,
    ):
        common = {
            "address": meeting.address,
            "processes": processes,
            "instances": instances,
            "broker": server.address,
            "token": token,
            "parameters": chosen.parameters,
            "rounds": chosen.rounds,
        }
        started = []
        for rank, environment in enumerate(shared.environments):
            command = [sys.executable, __file__, "--worker", json.dumps({"rank": rank, **common})]
            own = {"env": os.environ | dict(environment), "stdout": subprocess.PIPE, "text": True}
            started.append(subprocess.Popen(command, **own))
        try:
            outputs = [process.communicate(timeout=WAIT_SECONDS)[0] for process in started]
        finally:
            for process in started:
                process.kill()
    if any(process.returncode for process in started):
        raise SystemExit(f"A process of {processes} failed.")
    return [json.loads(line) for line in outputs[0].splitlines() if line.startswith("{")]


def work(settings: dict[str, Any]) -> None:
    """One process: prints a row of each size, if it is the first."""
    import jax

    jax.distributed.initialize(
        settings["address"],
        num_processes=settings["processes"],
        process_id=settings["rank"],
        local_device_ids=[0],
        coordinator_bind_address=settings["address"],
    )
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    mesh = mesh_of(devices, instances=settings["instances"])
    with contextlib.closing(RemoteBroker(settings["broker"], settings["token"])) as broker:
        host = HostMean(MemoryWire(broker), rank=settings["rank"], size=settings["processes"])
        for parameters in settings["parameters"]:
            means = {
                way: mesh_all_reduce(mesh, way, host, num_parameters=parameters)
                for way in algorithms_for(mesh, parameters)
            }
            chosen = fastest(time_reductions(mesh, parameters, means))
            rounds = [time_reductions(mesh, parameters, means) for _ in range(settings["rounds"])]
            seconds = {way: median(each[way] for each in rounds) for way in means}
            errors = {way: largest_error(mesh, mean, settings, parameters) for way, mean in means.items()}
            row = {
                "instances": settings["instances"],
                "gpus": mesh.shape["gpu"],
                "parameters": parameters,
                "seconds": seconds,
                "largest_errors": errors,
                "chosen": chosen,
                "chosen_over_fastest": seconds[chosen] / min(seconds.values()),
            }
            if settings["rank"] == 0:
                print(json.dumps(row), flush=True)


def largest_error(mesh: Any, mean: MeshAllReduce, settings: dict[str, Any], parameters: int) -> float:
    """Largest difference of a mean from that of the numbers of all processes, which lie about 1."""
    numbers = np.random.default_rng(0).normal(1.0, 0.1, (settings["processes"], parameters)).astype(np.float32)
    found = means_in_a_row(mesh, mean, numbers)().addressable_data(0)
    return float(np.abs(np.asarray(found) - np.mean(numbers, axis=0)).max())


def main() -> None:
    chosen = options(
        __doc__,
        gpus=(1, "visible GPUs"),
        instances=[2, 4],
        parameters=[10**4, 10**5, 10**6, 10**7],
        rounds=5,
        name="reductions-gpu",
        worker=(str, "settings of one of the processes that this script starts, as JSON"),
    )
    if chosen.worker:
        work(json.loads(chosen.worker))
        return
    rows: list[dict[str, Any]] = []
    for instances in chosen.instances:
        rows += measure(chosen.gpus, instances, chosen)
        for row in rows[-len(chosen.parameters) :]:
            print(row, flush=True)
        write_result(chosen.name, {"rows": rows}, chosen.output)


if __name__ == "__main__":
    main()

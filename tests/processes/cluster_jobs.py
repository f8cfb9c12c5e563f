"""Jobs of test workers that Ray places, and a coordinator of such workers to be killed."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

from worker_jobs import obeys, several

from rollmill.processes.jobs import Job
from rollmill.processes.supervisor import Supervisor


def job(function, replica=0, *, environment=None):
    entry = f"{function.__module__}:{function.__name__}"
    return Job(f"actor/{replica}", "actor", replica, entry, {}, environment or {})


def tells_node(job, control):
    import jax
    import ray

    print("hello from", job.name)
    node, devices = ray.get_runtime_context().get_node_id(), len(jax.devices())
    control.send("node", {"node": node, "devices": devices, "pid": os.getpid()})
    control.wait("go")


def has_a_child(job, control):
    child = subprocess.Popen(["sleep", "1000"])
    control.send("child", {"child": child.pid, "pid": os.getpid()})
    obeys(job, control)


def crashes_when_told(job, control):
    control.wait("go")
    os.kill(os.getpid(), signal.SIGSEGV)


def coordinate_on_ray():
    """The same on a Ray instance of its own."""
    from rollmill.processes.cluster.joining import connect_to_ray
    from rollmill.processes.cluster.launcher import RayLauncher

    jobs = [job(has_a_child, replica) for replica in range(2)]
    os.environ["RAY_ADDRESS"] = "local"
    with connect_to_ray("ray", workers=2) as cluster, RayLauncher(cluster) as launcher:
        address = f"tcp:{cluster.host}:0"
        with Supervisor(jobs, launcher=launcher, address=address, display=lambda line: None) as supervisor:
            supervisor.start()
            told = several(supervisor, "child", len(jobs))
            print(*(message.fields[name] for message in told for name in ("pid", "child")), flush=True)
            print(*descendants(os.getpid()), flush=True)
            time.sleep(1000)


def descendants(pid):
    """Process ids of all that a process has started, and what that has."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {pid})

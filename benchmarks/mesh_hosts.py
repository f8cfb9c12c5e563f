"""Trains on a mesh over three hosts, which vanish and come back, and compares what is learned.

    sudo python benchmarks/mesh_hosts.py --losses 30
    sudo python benchmarks/mesh_hosts.py --losses 30 --add
    sudo python benchmarks/mesh_hosts.py --way ray --losses 6 --each 6

The hosts are namespaces of this machine (host_namespaces.py), and the link between them is slow: slow_link.py
forwards each frame `--delay-ms` later and at most `--mbit` a second. On each host the same command is started with
torchrun's variables, as a batch system does, and started again after it has ended. PPO trains on CartPole,
tiny, with `--cluster hosts --resume-if-exists`. At random moments a host loses its power and comes back after
some seconds, or its link is cut for 25 s. The host with rank 0, which trains, is among them. At the end the
weights have to be those of an undisturbed mesh of three processes on one host, and the log has each iteration
once.
With `--way ray` the hosts are nodes of a Ray cluster, started again where Ray has ended on a host, and the command
runs on the first of them with `--cluster auto --place mesh`. Its results are in mesh-hosts-ray.json.
"""

import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from host_namespaces import Host, SlowLink, hosts, start_ray
from measure import count_lines, one_of, options, read_result, summary_of, this_commit, words, write_result

ITERATIONS, COUNT, OFF_SECONDS, CUT_SECONDS = 240, 3, 5.0, 25.0
TRAIN = (
    f"train ppo CartPole-v1 --num-envs 6 --num-steps 4 --num-minibatches 1 --num-shards {2 * COUNT} "
    "--network.hidden-sizes 8 --fusion off --resume-if-exists --checkpoint-iterations 20 --no-tensorboard "
    "--log-every 1 --start-seconds 900"
)
ROLLMILL = str(Path(sys.executable).with_name("rollmill"))
RAY = (sys.executable, "-m", "ray.scripts.scripts")
STUCK_SECONDS, LOOK_SECONDS = 900.0, 5.0


class Job:
    """The processes of a job, one on each host."""

    def __init__(self, made: list[Host], run: Path) -> None:
        self.made, self.run, self.log = made, run, run.with_suffix(".log")
        self.command = words(TRAIN, cluster="hosts", total_timesteps=ITERATIONS * 24, run_dir=run)
        self.processes: dict[int, Any] = {}
        for rank in range(COUNT):
            self.start(rank)

    def start(self, rank: int) -> None:
        """Starts the process of a host."""
        host = self.made[rank]
        host.environment |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(COUNT),
            "MASTER_ADDR": self.made[0].address,
            "ROLLMILL_HOSTS_TOKEN": "the secret of this benchmark",
        }
        with self.log.open("a") as output:
            self.processes[rank] = host.start(ROLLMILL, *self.command, stdout=output, stderr=output)

    def end(self) -> None:
        """Waits for processes that end by themselves, and ends the others."""
        for process in self.processes.values():
            with contextlib.suppress(Exception):
                process.wait(30)
            process.kill()

    def lose(self, rank: int, kind: str) -> None:
        """Lets a host vanish and come back."""
        host = self.made[rank]
        if kind == "cut":
            host.link(False)
            time.sleep(CUT_SECONDS)
            host.link(True)
            return
        host.kill()
        time.sleep(OFF_SECONDS)
        host.up()

    def look_after(self) -> bool:
        """Starts again what has ended before the training has, and returns whether that has ended."""
        for rank, process in self.processes.items():
            if process.poll() is not None:
                if rank == 0 and process.returncode == 0:
                    return True
                if rank == 0 or summary_of(self.run).get("status") != "finished":
                    self.start(rank)
        return False

    def wait(self, iteration: float) -> bool:
        """Waits until the training has made so many iterations, and returns whether it came there in time."""
        deadline = time.monotonic() + STUCK_SECONDS
        while not (ended := self.look_after()) and count_lines(self.run) < iteration:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)
        return ended or iteration != float("inf")


class RayJob(Job):
    """A Ray cluster of the hosts, and the command on the first of them."""

    def __init__(self, made: list[Host], run: Path) -> None:
        self._looked = 0.0
        super().__init__(made, run)

    def start(self, rank: int) -> None:
        """Starts Ray on a host, and on the first one the command as well."""
        self.made[rank].environment |= {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        if rank == 0:
            command = words(TRAIN, cluster="auto", place="mesh", learners=COUNT, run_dir=self.run,
                            total_timesteps=ITERATIONS * 24)  # fmt: skip
            self._keep_nodes()
            with self.log.open("a") as output:
                self.processes[0] = self.made[0].start(ROLLMILL, *command, stdout=output, stderr=output)

    def look_after(self) -> bool:
        """Starts Ray again where it has ended; see `Job`."""
        if time.monotonic() - self._looked > LOOK_SECONDS:
            self._keep_nodes()
            self._looked = time.monotonic()
        return super().look_after()

    def end(self) -> None:
        """Ends the command, and Ray."""
        super().end()
        for host in self.made:
            host.run(*RAY, "stop", "--force", check=False)

    def _keep_nodes(self) -> None:
        """Starts Ray where it does not run, and everywhere if the head does not."""
        alive = [host.run("pgrep", "-f", "raylet/raylet", check=False).returncode == 0 for host in self.made]
        for host, lives in zip(self.made, alive, strict=True):
            if lives and alive[0]:
                continue
            host.run(*RAY, "stop", "--force", check=False)
            with contextlib.suppress(subprocess.CalledProcessError):  # the head is not ready: the next look tries
                start_ray(sys.executable, self.made[0], host, cpus=1)


WAYS = {"hosts": (Job, "mesh-hosts", "rmm"), "ray": (RayJob, "mesh-hosts-ray", "rmn")}
"""The job of each way, the name of the result, and that of the hosts."""


def endure(kind: type[Job], made: list[Host], run: Path, losses: int, seed: int) -> dict:
    """Trains to the end while hosts vanish so many times, and returns the outcome."""
    rng, lost, faults, began = random.Random(seed), [], [], time.monotonic()
    moments = sorted(rng.uniform(0, 0.9 * ITERATIONS) for _ in range(losses))
    job = kind(made, run)
    for moment in moments:
        if not job.wait(moment):
            break
        rank, kind = rng.randrange(COUNT), rng.choice(("power", "cut"))
        before = count_lines(run)
        job.lose(rank, kind)
        lost.append({"rank": rank, "kind": kind, "iteration": before})
    if not job.wait(float("inf")):
        faults.append(f"it stands still: {job.log.read_text()[-1500:]}")
    job.end()
    lines = [json.loads(line)["iteration"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    if lines != list(range(1, ITERATIONS + 1)):
        faults.append(f"{len(lines)} lines of metrics")
    seconds = round(time.monotonic() - began, 1)
    return {"seed": seed, "lost": lost, "weights": summary_of(run).get("weights_sha256"), "seconds": seconds,
            "faults": faults}  # fmt: skip


def undisturbed(host: Host, run: Path) -> str:
    """Trains the same on one host, and returns the weights."""
    command = words(TRAIN, place="mesh", learners=COUNT, total_timesteps=ITERATIONS * 24, run_dir=run)
    host.run(ROLLMILL, *command)
    return summary_of(run)["weights_sha256"]


def counted(done: list[dict]) -> dict:
    """Returns the counts of all trainings, and each of them."""
    lost = [loss for training in done for loss in training["lost"]]
    return {
        "losses": len(lost),
        "of_rank_0": sum(loss["rank"] == 0 for loss in lost),
        "of_power": sum(loss["kind"] == "power" for loss in lost),
        "on_slow_link": sum(len(training["lost"]) for training in done if training.get("link")),
        "trainings": len(done),
        "equal": sum(training["equal"] for training in done),
        "faults": [fault for training in done for fault in training["faults"]],
        "each": done,
    }


def main() -> None:
    chosen = options(
        __doc__,
        way=one_of(*WAYS, default="hosts"),
        losses=(30, "losses of hosts in all"),
        each=(5, "limit of one training"),
        minutes=(20.0, "no training begins after this time"),
        seed=0,
        delay_ms=(2.0, "milliseconds from one host to another"),
        mbit=(50.0, "megabits a second of each link"),
        add=(False, "keep the trainings that are in the result"),
    )
    kind, name, prefix = WAYS[chosen.way]
    done = read_result(name, chosen.output).get("each", []) if chosen.add else []
    deadline = time.monotonic() + 60 * chosen.minutes
    link = SlowLink(chosen.delay_ms, chosen.mbit)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder, hosts(COUNT, prefix=prefix, slow=link) as made:
        os.environ |= {
            "JAX_PLATFORMS": "cpu",
            "ROLLMILL_CACHE_DIR": f"{folder}/cache",
            "ROLLMILL_STATE_DIR": folder,
        }
        right = undisturbed(made[0], Path(folder, "undisturbed"))
        while (left := chosen.losses - counted(done)["losses"]) > 0 and time.monotonic() < deadline:
            seed = chosen.seed + len(done) + 1
            training = endure(kind, made, Path(folder, f"run{seed}"), min(chosen.each, left), seed)
            training |= {
                "link": link._asdict(),
                "iterations": ITERATIONS,
                "equal": training["weights"] == right,
                "commit": this_commit(),
            }
            done.append(training)
            print(json.dumps(training), flush=True)
            write_result(name, counted(done), chosen.output)
    sys.exit(1 if counted(done)["faults"] or counted(done)["equal"] < len(done) else 0)


if __name__ == "__main__":
    main()

"""Trainings over two hosts: different code, clocks far apart, a link that is cut, and a host that is killed.

    sudo python benchmarks/hosts.py code modules profile cuts

The hosts are namespaces of this machine. `code` and `modules` record the messages of a training where host 2 has
another Rollmill, or lacks the user's module. `profile` compares the clocks and the profile of hosts 100,000 s
apart with those of one clock. `cuts` cuts the link of host 2 for 8, 30 and 120 s, and kills the host, under
several trainings at a time, and records the messages with their times and the time at which the training
continued. `slow` does the same over a link on which each frame takes 2 ms, at 50 megabits a second (slow_link.py).
Each part is one object of results/hosts.json, but `slow` is in hosts-slow.json.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from host_namespaces import Host, SlowLink, hosts, start_ray
from measure import options, read_result, some_of, summary_of, write_result

import rollmill

SOURCE = Path(rollmill.__file__).parent
APART_SECONDS = 100_000
SMALL = (
    *("--num-envs", 8, "--num-steps", 16, "--num-minibatches", 2, "--update-epochs", 1, "--seed", 3),
    *("--cluster", "auto"),
)
COARSE = ("--distribution", "single-learner-coarse", "--actors", 2)
EVENTS = {"link cut for 8 s": 8.0, "link cut for 30 s": 30.0, "link cut for 120 s": 120.0, "host killed": None}
"""Seconds for which the link is down."""
MAX_MOVES = 5
"""Replacements after which a training keeps its actors where they are."""
TAIL_BYTES = 8192
"""Bytes at the end of a log that hold a whole line."""
CORES = 12
"""Workers of each host."""
PATIENT = ("--hang-seconds", 60, "--max-failures", 1000)
"""A replica that has worked for a minute begins a new row of losses."""
PATIENCE_SECONDS = 150.0
FIRST_SECONDS = 400.0
SAID = {
    "silence": "has not responded for",
    "heard": "responds again after",
    "lost": "was lost",
    "placed": "was placed",
    "replaced": "was replaced",
    "again": "all workers restart",
}
"""Words that mark the lines with times worth keeping."""


@dataclass
class Told:
    """A command on a host, and the lines that it prints with their times."""

    process: subprocess.Popen
    run: Path
    lines: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with self.process.stdout as output:
            for line in output:
                self.lines.append((time.monotonic(), line.strip()))

    def iteration(self) -> int:
        """Returns the last iteration of the log; 0 before the first."""
        log = self.run / "metrics.jsonl"
        with contextlib.suppress(OSError, ValueError, IndexError), log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return int(json.loads(file.read().rsplit(b"\n", 2)[-2])["iteration"])
        return 0

    def workers_on(self, address: str, group: str = "") -> list[str]:
        """Returns the workers that were placed on a host last."""
        found = [re.match(r"(\S+) was placed on (\S+)", text) for _, text in self.lines]
        places = {match[1]: match[2] for match in found if match}
        return sorted(name for name, host in places.items() if host == address and name.startswith(group))

    def pid_of(self, worker: str) -> str:
        """Returns the number of a worker's process on its host; empty before it is known."""
        found = [re.fullmatch(rf"{worker} is process (\d+)", text) for _, text in self.lines]
        return next((match[1] for match in reversed(found) if match), "")

    def since(self, began: float) -> list[tuple[float, str]]:
        """Returns the seconds and text of the lines since then, progress lines excluded."""
        return [(round(at - began, 1), text) for at, text in self.lines if at >= began and "steps/s" not in text]


def train(host: Host, run: Path, *words: object, **environment: str) -> Told:
    """Starts a small training with its driver on a host."""
    command = [sys.executable, "-m", "rollmill", "train", "ppo", *words, *SMALL, "--run-dir", run]
    host.environment = {"RAY_worker_niceness": "0", **environment}
    return Told(host.start(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT), run)


@contextlib.contextmanager
def cluster(**options: Any) -> Iterator[tuple[Host, Host]]:
    """Two hosts, each a node of one Ray cluster that holds all workers by itself."""
    with hosts(2, **options) as (first, second):
        for host in (first, second):
            host.environment = {"RAY_worker_niceness": "0"}
            start_ray(sys.executable, first, host, cpus=CORES)
        yield first, second


def ended(told: Told, began: float) -> dict[str, Any]:
    """Waits for a command, and returns how it ended."""
    code = told.process.wait(600)
    time.sleep(0.5)
    return {"exit_code": code, "seconds": round(time.monotonic() - began, 1), "said": told.since(began)[-6:]}


LEARNERS = ("--distribution", "multi-learner", "--workers", 2, "--learners", 2, "--total-timesteps", 4096)


def different_code(folder: Path) -> dict[str, Any]:
    """Trains while host 2 has another file of Rollmill, and then none at all."""
    other, original = folder / "returns.py", SOURCE / "algorithms" / "returns.py"
    other.write_text(original.read_text() + "\n# another one\n")
    with cluster() as (first, second):
        second.run("mount", "--bind", other, original)
        began = time.monotonic()
        found = {"another source": ended(train(first, folder / "other", "CartPole-v1", *LEARNERS), began)}
        second.run("umount", original)
        second.run("mount", "-t", "tmpfs", "tmpfs", SOURCE)
        began = time.monotonic()
        found["rollmill missing"] = ended(train(first, folder / "none", "CartPole-v1", *LEARNERS), began)
    return found


def sent_module(folder: Path) -> dict[str, Any]:
    """Trains with a module of the user that is on host 1 alone."""
    mine = folder / "mine"
    mine.mkdir()
    made = "rollmill.register(my_name.NAME, lambda **_: rollmill.make('CartPole-v1'))"
    (mine / "my_game.py").write_text(f"import my_name\nimport rollmill\n{made}\n")
    (mine / "my_name.py").write_text("NAME = 'mine'\n")
    with cluster() as (first, second):
        second.run("mount", "-t", "tmpfs", "tmpfs", mine)
        began = time.monotonic()
        words = ("mine", "--import", "my_game", *LEARNERS)
        result = ended(train(first, folder / "sent", *words, PYTHONPATH=str(mine)), began)
        workers = json.loads((folder / "sent/workers.json").read_text())
    summary = {name: summary_of(folder / "sent")[name] for name in ("status", "steps_per_second")}
    modules = {each["host"]: each["modules"]["my_game"] for each in workers.values()}
    return {**result, **summary, "modules_of_hosts": modules}


def profiles(folder: Path) -> dict[str, Any]:
    """Takes the same profile with one clock, and with clocks of the hosts far apart."""
    return {
        "one clock": _profile(folder / "one", 0),
        f"clocks {APART_SECONDS:,} s apart": _profile(folder / "apart", APART_SECONDS),
    }


def _profile(folder: Path, apart: int) -> dict[str, Any]:
    folder.mkdir()
    output = folder / "profile"
    with cluster(offsets={2: apart}) as (first, _):
        words = [sys.executable, "-m", "rollmill", "profile", "ppo", "gymnasium:CartPole-v1", *COARSE, *SMALL]
        words += ["--total-timesteps", 100_000_000, "--output", output]
        done = first.run(*words, check=False, timeout=900)
        if done.returncode:
            raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
        clock = _clock_error(first, folder, apart)
    profile = json.loads((output / "profile.json").read_text())
    overlaps = {each["name"]: each["overlap"] for each in profile["processes"]}
    return {
        "clock": clock,
        "iteration_seconds": profile["iteration"]["unprofiled"],
        "processes": overlaps,
        "seconds_accounted_for": {name: sum(each.values()) for name, each in overlaps.items()},
        "notes": profile["notes"],
    }


def _clock_error(first: Host, folder: Path, apart: int) -> dict[str, Any]:
    """Returns the error of the measured offset of workers' clocks, from a short training."""
    told = train(first, folder / "run", "gymnasium:CartPole-v1", *COARSE, "--total-timesteps", 4096)
    told.process.wait(300)
    workers = json.loads((folder / "run/workers.json").read_text())
    return {
        name: {
            "host": each["host"],
            "error_ms": round((each["clock"]["ahead_ns"] - 1e9 * apart * each["host"].endswith("-2")) / 1e6, 4),
            "round_trip_ms": round(each["clock"]["round_trip_ns"] / 1e6, 4),
        }
        for name, each in workers.items()
    }


SLOW, SLOW_RESULT = SlowLink(delay_ms=2.0, mbit=50.0), "hosts-slow"


def cuts(folder: Path, rounds: dict[str, int], at_once: int, slow: SlowLink | None = None) -> list[dict[str, Any]]:
    """Cuts the link of host 2, or kills it, under trainings that continue from one event to the next."""
    results: list[dict[str, Any]] = []
    with cluster(slow=slow) as (first, second):
        words = ("gymnasium:CartPole-v1", *COARSE, "--total-timesteps", 100_000_000, "--log-every", 4, *PATIENT)
        trainings = [train(first, folder / f"run-{number}", *words) for number in range(at_once)]
        try:
            for event in in_turns(rounds):
                results += _disturbed(first, second, event, trainings)
                print(json.dumps(results[-at_once:], indent=1), flush=True)
        finally:
            for each in trainings:
                _end(first, each)
    return results


def in_turns(rounds: dict[str, int]) -> list[str]:
    """Each event as often as it is to be, the kinds taking turns."""
    longest = max(rounds.values())
    return [event for number in range(longest) for event, count in rounds.items() if number < count]


def _disturbed(first: Host, second: Host, event: str, trainings: Sequence[Told]) -> list[dict[str, Any]]:
    _settle(first, trainings)
    began, before = time.monotonic(), [each.iteration() for each in trainings]
    there = [each.workers_on(second.address) for each in trainings]
    seconds = EVENTS[event]
    later = threading.Timer(seconds or 0.0, second.link, [True]) if seconds else None
    if later:
        second.link(False)
        later.start()
    else:
        second.kill()
    found = _watch(trainings, began, before, until=began + (seconds or 20.0) + 5.0)
    if later:
        later.join()
    _mend(first, second)
    return [{"event": event, "on_host_2": names, **each} for names, each in zip(there, found, strict=True)]


def _settle(first: Host, trainings: Sequence[Told]) -> None:
    """Waits until each training makes progress, with a worker on host 2 if one gets there within a minute."""
    deadline = time.monotonic() + FIRST_SECONDS
    start = [each.iteration() for each in trainings]
    while time.monotonic() < deadline and any(
        each.iteration() <= at for each, at in zip(trainings, start, strict=True)
    ):
        time.sleep(0.2)
    for each in trainings:
        for _ in range(MAX_MOVES):
            if not _moved(first, each):
                break
    time.sleep(3.0)


def _moved(first: Host, training: Told) -> bool:
    """Kills an actor on host 1 if both are there, since Ray spreads replacements; returns whether it did."""
    actors = training.workers_on(first.address, group="actor")
    if len(actors) < 2 or not training.pid_of(actors[0]):
        return False
    began = time.monotonic()
    first.run("kill", "-9", training.pid_of(actors[0]), check=False)
    while time.monotonic() < began + 60.0:
        if any(SAID["replaced"] in text for _, text in training.since(began)):
            break
        time.sleep(0.2)
    return True


def _watch(trainings: Sequence[Told], began: float, before: Sequence[int], until: float) -> list[dict[str, Any]]:
    """Follows trainings until the event is over and all have continued."""
    progress: list[list[tuple[float, int]]] = [[(0.0, at)] for at in before]
    while True:
        now = time.monotonic()
        for course, training in zip(progress, trainings, strict=True):
            if (at := training.iteration()) != course[-1][1]:
                course.append((now - began, at))
        over = now > until and all(now - began - course[-1][0] < 3.0 and len(course) > 2 for course in progress)
        if over or now > until + PATIENCE_SECONDS:
            break
        time.sleep(0.2)
    return [_outcome(each, course, began) for each, course in zip(trainings, progress, strict=True)]


def _outcome(training: Told, course: Sequence[tuple[float, int]], began: float) -> dict[str, Any]:
    said = training.since(began)
    gaps = [(later[0] - earlier[0], later[0]) for earlier, later in zip(course, course[1:], strict=False)]
    longest, on_again = max(gaps, default=(float("nan"), float("nan")))
    times = {name: next((at for at, text in said if words in text), None) for name, words in SAID.items()}
    return {
        "goes_on": training.process.poll() is None and len(course) > 2,
        "stood_still_seconds": round(longest, 1),
        "on_again_at": round(on_again, 1),
        "seconds": times,
        "said": said,
    }


def _end(first: Host, training: Told) -> None:
    """Ends a training as a driver's crash does, which ends its workers at once."""
    if training.process.poll() is None:
        first.run("pkill", "-9", "-f", f"rollmill train.*{training.run.name}", check=False)
    with contextlib.suppress(subprocess.TimeoutExpired):
        training.process.wait(10)


def _mend(first: Host, second: Host) -> None:
    """Has host 2 join the cluster again, if it has left it."""
    second.link(True)
    if second.process.poll() is not None:
        second.up()
    alive = second.run("pgrep", "-f", "raylet/raylet", check=False).returncode == 0
    if not alive:
        second.run(sys.executable, "-m", "ray.scripts.scripts", "stop", "--force", check=False)
        start_ray(sys.executable, first, second, cpus=CORES)
    time.sleep(2.0)


def table(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns one line for each kind of event, of the trainings that had a worker on host 2."""
    lines, ends = [], lambda values: [min(values), max(values)] if values else None
    for event in dict.fromkeys(each["event"] for each in results):
        trials = [each for each in results if each["event"] == event and each["on_host_2"]]
        times = {name: [s for t in trials if (s := t["seconds"][name]) is not None] for name in SAID}
        lines.append(
            {
                "event": event,
                "trials": len(trials),
                "went_on": sum(each["goes_on"] for each in trials),
                "stood_still_seconds": ends([each["stood_still_seconds"] for each in trials]),
                **{name: ends(seconds) for name, seconds in times.items()},
            }
        )
    return lines


PARTS = {"code": different_code, "modules": sent_module, "profile": profiles}


def main() -> None:
    chosen = options(
        __doc__,
        {"parts": some_of([*PARTS, "cuts", "slow"], [*PARTS, "cuts"])},
        rounds=("4,3,1,2", "events of each kind, under --at-once trainings each"),
        at_once=3,
    )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    rounds = dict(zip(EVENTS, map(int, chosen.rounds.split(",")), strict=True))
    results = {name: read_result(name, chosen.output) for name in ("hosts", SLOW_RESULT)}
    with tempfile.TemporaryDirectory(prefix="rollmill-hosts-", dir="/var/tmp") as name:
        for part in chosen.parts:
            name_of_result = SLOW_RESULT if part == "slow" else "hosts"
            found = results[name_of_result]
            if part in ("cuts", "slow"):
                link = SLOW if part == "slow" else None
                trials = cuts(Path(name), rounds, chosen.at_once, link)
                found[part] = {"link": link and link._asdict(), "trials": trials, "table": table(trials)}
            else:
                found[part] = PARTS[part](Path(name))
            print(json.dumps(found[part], indent=1), flush=True)
            write_result(name_of_result, found, chosen.output)


if __name__ == "__main__":
    main()

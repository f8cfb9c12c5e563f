"""The study of GMI-DRL on robots: one process, several instances of one GPU under MPS, and the planner's choice.

    python benchmarks/robots_study.py [Ant Cartpole Humanoid] [--envs 1024] [--counts 1 2 4] [--limit 240]

Every instance has `--envs` environments, and every task three parts, with the network of its recipe:

- `serving`: decisions of a policy that does not learn, in processes that are independent of each other;
- `synchronous`: PPO by the recipe, one training whose learners are the instances, with means by the host's memory,
  and `mesh` with means by NCCL inside the compiled program (for which NCCL must be at least 2.30);
- `asynchronous`: IMPALA, one learner and as many actors as instances, which do not wait for it.

Beside the instances stands one process with the environments of most of them, `wide`. `planner` is PPO with as
many environments, by the plan that `rollmill plan` finds in what is left of the limit, if that is enough. A task's
processes compile side by side, and each waits until it is measured: workers for a line, trainings stopped by a
signal. A mesh runs alone after them, since kernels of a stopped mesh would wait for each other on the GPU. Figures
are environment steps a second over `--seconds`, and the activity and the memory of the whole GPU meanwhile; the
memory counts waiting processes, too. Writes results/robots-study-DEVICE.json after each figure.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from instances import ONLY, Program, Worker
from measure import count_lines, lines_of, options, rate, some_of, words, write_result
from robots_learning import TASKS

from rollmill.core.machine import visible_gpus
from rollmill.core.process_tree import descendants_of, kill_all
from rollmill.gpus.activity import ActivityMonitor
from rollmill.gpus.devices import find_gpus, open_nvml
from rollmill.gpus.sharing import shared_gpus
from rollmill.recipes import RECIPES

STEPS = 4 * 10**9
"""Steps of a training that does not end while it is measured."""
Keep: TypeAlias = Callable[[str, str, dict[str, Any]], None]
"""Takes a row: the task, the name, and the figures."""
END_SECONDS, PLAN_SECONDS = 10.0, 60.0
"""Seconds that a training has to end, and that a search for a plan needs at least."""


class Training:
    """A training of the command line, which stands still until it is measured."""

    def __init__(self, folder: Path, name: str, command: Sequence[str]) -> None:
        self.run, self.log = folder / name.replace(" ", "-"), folder / f"{name.replace(' ', '-')}.log"
        rest = words("--quiet --no-tensorboard --log-every 2", total_timesteps=STEPS, run_dir=self.run)
        line = [sys.executable, "-m", "rollmill", "train", *command, *rest]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(line, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def look(self) -> bool:
        """Stops the training once it has begun; returns whether it stands, or has ended."""
        if self.process.poll() is None and count_lines(self.run) < 3:
            return False
        self._send(signal.SIGSTOP)
        return True

    def steps_per_second(self, seconds: float) -> float:
        """Lets the training go on for some seconds, and returns its speed."""
        if self.process.poll() is not None:
            raise ChildProcessError(self.log.read_text(errors="replace").strip()[-400:])
        self._send(signal.SIGCONT)
        time.sleep(1.0)
        first = count_lines(self.run)
        time.sleep(seconds)
        return rate(*(lines_of(self.run)[number] for number in (first - 1, -1)))

    def end(self) -> None:
        """Ends the training, so that it ends its workers and MPS."""
        family = descendants_of(self.process.pid)
        self._send(signal.SIGCONT)
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
        kill_all(family)
        self.process.wait()

    def _send(self, number: int) -> None:
        for pid, _ in descendants_of(self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


class Gpu:
    """The activity and memory of the GPU; nothing on a machine without."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml
        self.gpu = find_gpus(nvml)[0] if nvml else None

    @contextmanager
    def watched(self, row: dict[str, Any]) -> Iterator[None]:
        """Adds to a row what is measured in the context."""
        if self.gpu is None:
            yield
            return
        with ActivityMonitor(self.nvml, self.gpu.index) as monitor:
            yield
            row |= monitor.read()._asdict()
            handle = self.nvml.nvmlDeviceGetHandleByIndex(self.gpu.index)
            row["memory_bytes"] = self.nvml.nvmlDeviceGetMemoryInfo(handle).used


def network_words(network: Any) -> list[str]:
    """Returns the options of a network of a recipe."""
    sizes = map(str, network.hidden_sizes)
    options = ["--network.activation", network.activation, "--network.shared-torso"]
    return ["--network.hidden-sizes", *sizes, *options]


def sharing_words() -> list[str]:
    """Returns the options of a training whose processes share the GPU."""
    return words("--hang-seconds 1000", **({"gpu_sharing": "mps"} if visible_gpus() else {}))


def synchronous(task: str, chosen: Any, count: int, place: str) -> list[str]:
    """Returns the command of PPO with a number of instances."""
    sizes = words("", recipe=TASKS[task].recipe, num_envs=count * chosen.envs)
    spread = [*words("", learners=count, place=place), *sharing_words()] if count > 1 else []
    return ["ppo", f"robots:{task}", "--fusion", chosen.fusion, *sizes, *spread]


def trainings_of(task: str, chosen: Any) -> dict[str, list[str]]:
    """Returns the command of each training by its name."""
    recipe = TASKS[task].recipe
    network, most = RECIPES[recipe]().config.network, max(chosen.counts)
    common, shared = [f"robots:{task}", "--fusion", chosen.fusion], sharing_words()
    found = {}
    for count in chosen.counts:
        found[f"synchronous {count}"] = synchronous(task, chosen, count, "processes" if count > 1 else "program")
        actors = words("--distribution single-learner-coarse --asynchronous", actors=count)
        impala = [*common, *words("", num_envs=count * chosen.envs, num_steps=16), *network_words(network)]
        found[f"asynchronous {count}"] = ["impala", *impala, *actors, *shared]
    wide = words("", num_envs=most * chosen.envs)
    found["synchronous wide"] = ["ppo", *common, *words("", recipe=recipe), *wide]
    return found


def serving_of(task: str, envs: int) -> Program:
    """Returns the program that serves a task's policy."""
    network = RECIPES[TASKS[task].recipe]().config.network
    described = {
        "hidden_sizes": list(network.hidden_sizes),
        "activation": network.activation,
        "shared_torso": True,
    }
    sizes = {"num_envs": envs, "num_steps": 16, "num_minibatches": 1, "network": described}
    return Program("ppo", f"robots:{task}", sizes, serves=True)


def served(workers: Sequence[Worker], seconds: float) -> float:
    """Returns the decisions a second of all workers at once."""
    begin = time.monotonic() + 0.2
    for worker in workers:
        worker.ask(program=ONLY, begin=begin, seconds=seconds)
    return sum(answer["steps"] / answer["seconds"] for answer in (json.loads(worker.read()) for worker in workers))


def started_workers(task: str, chosen: Any, gpu: Gpu, stack: ExitStack) -> list[Worker]:
    """Starts the processes that serve: one for each instance, and one with the environments of all."""
    most = max(chosen.counts)
    environments: list[Mapping[str, str]] = [{}] * most
    if gpu.gpu is not None:
        shared = stack.enter_context(shared_gpus([gpu.gpu], "mps"))
        environments = [instance.environment() for instance in shared.divide(most)]
    places = [*((chosen.envs, each) for each in environments), (most * chosen.envs, {})]
    workers = []
    for seed, (envs, environment) in enumerate(places):
        variables = {**environment, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        workers.append(Worker({ONLY: serving_of(task, envs)}, seed, variables, ""))
        stack.callback(workers[-1].end)
    return workers


def standing_of(trainings: Mapping[str, Training], until: float) -> dict[str, Training]:
    """Returns the trainings that have begun by a time, and stand."""
    while not all([training.look() for training in trainings.values()]) and time.monotonic() < until:
        time.sleep(0.2)
    return {name: training for name, training in trainings.items() if training.look()}


def measured(gpu: Gpu, speed: Callable[[], float]) -> dict[str, Any]:
    """Returns a speed and what the GPU did meanwhile, or why there is none."""
    row: dict[str, Any] = {}
    try:
        with gpu.watched(row):
            row["steps_per_second"] = speed()
    except Exception as error:  # the other rows are worth as much without it
        row["failed"] = f"{type(error).__name__}: {error}"
    return row


def measure_task(task: str, chosen: Any, gpu: Gpu, ends: float, keep: Keep) -> None:
    """Measures all parts of a task, and keeps each row."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers = started_workers(task, chosen, gpu, stack)
        trainings = {name: Training(folder, name, command) for name, command in trainings_of(task, chosen).items()}
        for training in trainings.values():
            stack.callback(training.end)
        standing = standing_of(trainings, min(time.monotonic() + chosen.ready, ends))
        for worker in workers:
            worker.read("ready")
        print(f"{task}: {len(standing)} of {len(trainings)} trainings stand", flush=True)
        sides = {f"serving {count}": workers[:count] for count in chosen.counts} | {"serving wide": workers[-1:]}
        for name, some in sides.items():
            keep(task, name, measured(gpu, partial(served, some, chosen.seconds)))
        for name, training in trainings.items():
            if name in standing:
                keep(task, name, measured(gpu, partial(training.steps_per_second, chosen.seconds)))
            else:
                keep(task, name, {"failed": "it did not begin in time"})
            training.end()


def measure_mesh(task: str, chosen: Any, gpu: Gpu, count: int, keep: Keep) -> None:
    """Measures PPO in a mesh of several processes."""
    with tempfile.TemporaryDirectory() as name:
        training = Training(Path(name), "mesh", synchronous(task, chosen, count, "mesh"))
        try:
            standing_of({"mesh": training}, time.monotonic() + chosen.ready)
            keep(task, f"mesh {count}", measured(gpu, partial(training.steps_per_second, chosen.seconds)))
        finally:
            training.end()


def measure_plan(task: str, chosen: Any, gpu: Gpu, budget: float, keep: Keep) -> None:
    """Searches for a plan of PPO with the most environments, and measures it."""
    recipe, envs = TASKS[task].recipe, max(chosen.counts) * chosen.envs
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = ["ppo", f"robots:{task}", *words("", recipe=recipe, num_envs=envs)]
        search = words("--search-plan --fresh", budget=round(budget), output=folder / "plan.json")
        done = subprocess.run(
            [sys.executable, "-m", "rollmill", "plan", *command, *words("", total_timesteps=STEPS), *search],
            capture_output=True,
            text=True,
            check=False,
        )
        row: dict[str, Any] = {"table": done.stdout.splitlines()[-40:]}
        if done.returncode:
            keep(task, "planner", row | {"failed": done.stderr[-400:]})
            return
        row["plan"] = json.loads((folder / "plan.json").read_text())
        training = Training(folder, "planned", [*command, "--plan", str(folder / "plan.json")])
        try:
            standing_of({"planned": training}, time.monotonic() + chosen.ready)
            keep(task, "planner", row | measured(gpu, partial(training.steps_per_second, chosen.seconds)))
        finally:
            training.end()


def main() -> None:
    """Measures the tasks one after the other, and then plans as many as the limit allows."""
    chosen = options(
        __doc__,
        {"tasks": some_of(TASKS, ["Cartpole", "Ant", "Humanoid"])},
        envs=1_024,
        counts=[1, 2, 4],
        seconds=3.0,
        fusion="off",
        ready=(90.0, "seconds that the processes of a task have to compile"),
        budget=(90.0, "most seconds of a search for a plan; 0 for none"),
        limit=(3_600.0, "seconds of everything"),
    )
    ends = time.monotonic() + chosen.limit
    result: dict[str, Any] = {"environments_of_an_instance": chosen.envs, "fusion": chosen.fusion, "tasks": {}}
    device = "gpu" if visible_gpus() else "cpu"

    def keep(task: str, name: str, row: dict[str, Any]) -> None:
        result["tasks"].setdefault(task, {})[name] = row
        shown = {key: value for key, value in row.items() if key not in ("table", "plan")}
        print(task, name, json.dumps(shown)[:400], flush=True)
        write_result(f"robots-study-{device}", result, chosen.output)

    with open_nvml() if device == "gpu" else nullcontext() as nvml:
        gpu = Gpu(nvml)
        for task in chosen.tasks:
            if time.monotonic() < ends:
                measure_task(task, chosen, gpu, ends, keep)
        for task, count in itertools.product(chosen.tasks, [count for count in chosen.counts if count > 1]):
            if time.monotonic() < ends:
                measure_mesh(task, chosen, gpu, count, keep)
        for task in chosen.tasks:
            budget = min(chosen.budget, ends - time.monotonic() - PLAN_SECONDS / 2)
            if budget > PLAN_SECONDS / 2:
                measure_plan(task, chosen, gpu, budget, keep)


if __name__ == "__main__":
    main()

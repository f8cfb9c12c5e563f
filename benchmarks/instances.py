"""Several trainings on one GPU, each a process: in turns, under MPS, and beside one process with as much work.

    python benchmarks/instances.py ppo [--counts 1 2 4 8 16]
    python benchmarks/instances.py alphazero --counts 1 2 7 16

Every process trains the same program, with its own seed. `turns` and `mps` start the largest count of processes,
some of them idle. `wide` is one process with the environments of all, `vmap` one process with all trainings side
by side. Figures are environment steps a second in all, over a few seconds after everything is compiled; beside
them the utilisation by NVML, the activity of the multiprocessors (GPM), and the memory in use, all of the whole
GPU. Repeats take turns; figures are medians. Writes results/instances-ppo.json or
results/instances-alphazero.json.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any, NamedTuple, TypeAlias

from measure import in_turns, one_of, options, spread, write_result

from rollmill.gpus.activity import ActivityMonitor
from rollmill.gpus.devices import Gpu, find_gpus, open_nvml
from rollmill.gpus.sharing import shared_gpus


class Program(NamedTuple):
    """A training."""

    algorithm: str
    environment: str
    config: Mapping[str, Any]
    fusion: Any = "off"
    seeds: int = 1
    """Trainings side by side in the one program."""
    serves: bool = False
    """Whether it only makes decisions: rollouts of a policy that does not learn."""


PPO = {"num_minibatches": 4, "update_epochs": 4, "learning_rate": 2.5e-4}
NETWORK = {"torso": "resnet", "num_blocks": 2, "channels": 32, "hidden_sizes": [64], "activation": "relu"}
NETWORK |= {"shared_torso": True}
SEARCH = {"num_steps": 16, "num_simulations": 32, "num_minibatches": 4, "network": NETWORK}
STUDIES = {
    "ppo": {
        f"{envs} x {steps}, {'fused' if fusion == 'full' else 'XLA'}": Program(
            "ppo", "CartPole-v1", {"num_envs": envs, "num_steps": steps, **PPO}, fusion
        )
        for envs, steps in ((64, 64), (4096, 128))
        for fusion in ("off", "full")
    },
    "alphazero": {"64 games, 32 simulations": Program("alphazero", "ConnectFour-v0", {"num_envs": 64, **SEARCH})},
}
ONLY = "only"
ITERATIONS = 2**24
"""Iterations of a training that does not end while it is measured."""
ROLLOUTS = 4
"""Rollouts in a row of a program that serves."""


def graph_of(program: Program) -> Any:
    """Returns the graph of a training that does not end while it is measured."""
    import rollmill

    config = dict(program.config)
    if "network" in config:
        config["network"] = rollmill.NetworkConfig(**config["network"])
    total = config["num_envs"] * config["num_steps"] * ITERATIONS
    env = rollmill.make(program.environment)
    return getattr(rollmill, program.algorithm)(env, total_timesteps=total, **config)


Run: TypeAlias = Callable[[float], tuple[int, float]]
"""Runs a program until a time; returns the environment steps, and the time at which the last of them was known."""


def training_of(program: Program, seed: int) -> Run:
    """Compiles a training; returns what trains on."""
    import jax

    from rollmill.programs.compiled import lower
    from rollmill.programs.dispatch import dispatch_ahead

    graph = graph_of(program)
    compiled = lower(graph, seeds=tuple(range(seed, seed + program.seeds)), fusion=program.fusion)
    state, size = compiled.start(), graph.loops.batch_size * program.seeds
    state, _ = jax.block_until_ready(compiled.advance(state))

    def train(until: float) -> tuple[int, float]:
        nonlocal state
        iterations, last = 0, time.monotonic()
        for window in dispatch_ahead(compiled, state, first=1, until=ITERATIONS):
            state, iterations, last = window.after, window.last - 1, time.monotonic()
            if last > until:
                break
        jax.block_until_ready(state)  # of the window that was dispatched ahead
        return iterations * size, last

    return train


def serving_of(program: Program, seed: int) -> Run:
    """Compiles rollouts; returns what plays on."""
    import jax
    import jax.numpy as jnp

    from rollmill.dataflow import collect, init_state
    from rollmill.fusion import consecutive_rollouts

    graph = graph_of(program)
    state = init_state(graph, jax.random.key(seed), jnp.arange(graph.loops.num_envs, dtype=jnp.int32))
    weights, collector, key = graph.weights(state.learner), state.collector, state.key
    play = jax.jit(partial(consecutive_rollouts, ROLLOUTS, partial(collect, graph)))
    play = play.lower(weights, collector, key).compile()
    collector, _ = jax.block_until_ready(play(weights, collector, key))

    def serve(until: float) -> tuple[int, float]:
        nonlocal collector
        calls = 0
        while time.monotonic() < until:
            collector, _ = jax.block_until_ready(play(weights, collector, key))
            calls += 1
        return calls * ROLLOUTS * graph.loops.batch_size, time.monotonic()

    return serve


def work(programs: Mapping[str, Program], seed: int) -> None:
    """Compiles the programs, and then runs the one that is named in each line of the input, for as long."""
    from rollmill.programs.cache import enable_compilation_cache

    enable_compilation_cache()
    runs = {
        name: (serving_of if program.serves else training_of)(program, seed) for name, program in programs.items()
    }
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        time.sleep(max(0.0, asked["begin"] - time.monotonic()))
        began = time.monotonic()
        steps, last = runs[asked["program"]](asked["begin"] + asked["seconds"])
        print(json.dumps({"steps": steps, "seconds": last - began}), flush=True)


class Worker:
    """A process that trains on request."""

    def __init__(
        self, programs: Mapping[str, Program], seed: int, environment: Mapping[str, str], core: str
    ) -> None:
        # As many XLA threads and compilers as its share of the cores.
        pinned = ["taskset", "-c", core] if core else []
        order = json.dumps({name: program._asdict() for name, program in programs.items()})
        command = [*pinned, sys.executable, __file__, "worker", order, str(seed)]
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process: Any = subprocess.Popen(command, env=os.environ | dict(environment), **streams)

    def read(self, expected: str | None = None) -> str:
        """Returns its next line; `ready` once it has compiled its programs."""
        line = self.process.stdout.readline().strip()
        if not line or (expected and line != expected):
            raise SystemExit(f"a worker ended: {line!r}, exit code {self.process.wait()}")
        return line

    def ask(self, **asked: Any) -> None:
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def together(nvml: Any, gpu: Gpu, workers: Sequence[Worker], program: str, seconds: float) -> dict[str, Any]:
    """Returns the steps a second of all workers at once, and the activity of the GPU meanwhile."""
    begin = time.monotonic() + 0.2
    for worker in workers:
        worker.ask(program=program, begin=begin, seconds=seconds)
    time.sleep(max(0.0, begin + 0.2 * seconds - time.monotonic()))
    with ActivityMonitor(nvml, gpu.index) as monitor:
        time.sleep(0.7 * seconds)
        activity = monitor.read()
        used = nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(gpu.index)).used
    answers = [json.loads(worker.read()) for worker in workers]
    rates = [answer["steps"] / answer["seconds"] for answer in answers]
    return {"steps_per_second": sum(rates), "slowest": min(rates), "memory_bytes": used, **activity._asdict()}


def summary(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    known = {name: [one[name] for one in found if one[name] is not None] for name in found[0]}
    rates = spread(known.pop("steps_per_second"))
    return {"steps_per_second": rates, **{name: median(values) for name, values in known.items() if values}}


def measure_shared(nvml: Any, gpu: Gpu, way: Any, programs: Mapping[str, Program], chosen: Any) -> dict[str, Any]:
    """Returns the figures by program and by number of processes that share the GPU."""
    most = max(chosen.counts)
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        shared = stack.enter_context(shared_gpus([gpu], way))
        began = time.monotonic()
        instances = shared.divide(most)
        workers = []
        for seed, instance in enumerate(instances):
            # The first one compiles with all cores, for the cache; then the others start side by side.
            core = str(cores[seed % len(cores)]) if seed else ""
            environment = instance.environment() | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
            workers.append(Worker(programs, seed, environment, core))
            stack.callback(workers[-1].end)
            if seed == 0:
                workers[0].read("ready")
        for worker in workers[1:]:
            worker.read("ready")
        seconds = time.monotonic() - began
        print(f"{way}: {most} processes in {seconds:.1f} s", flush=True)
        found: dict[str, Any] = {"start_up": {"daemon_seconds": shared.start_seconds, "workers_seconds": seconds}}
        for name in programs:
            turn = lambda count, name=name: together(nvml, gpu, workers[:count], name, chosen.seconds)
            runs = in_turns({count: partial(turn, count) for count in chosen.counts}, chosen.repeats)
            found[name] = {count: summary(each) for count, each in runs.items()}
            for count, figures in found[name].items():
                show(f"{way}, {name}, {count} processes", figures)
    return found


def measure_alone(nvml: Any, gpu: Gpu, programs: Mapping[str, Program], chosen: Any) -> dict[str, Any]:
    """Returns the figures of one process with the work of as many as the largest count."""
    count, found = max(chosen.counts), {}
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}

        def start(name: str, program: Program) -> None:
            workers[name] = Worker({ONLY: program}, 0, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, "")
            stack.callback(workers[name].end)

        for name, program in programs.items():
            wide = dict(program.config) | {"num_envs": count * program.config["num_envs"]}
            start(f"{name}, wide, {count}", program._replace(config=wide))
            if program.fusion == "off":
                start(f"{name}, vmap, {count}", program._replace(seeds=count))
        for worker in workers.values():
            worker.read("ready")
        for name, worker in workers.items():
            runs = [together(nvml, gpu, [worker], ONLY, chosen.seconds) for _ in range(chosen.repeats)]
            found[name] = summary(runs)
            show(name, found[name])
    return found


def show(name: str, figures: Mapping[str, Any]) -> None:
    known = [key for key in ("utilisation", "sm_activity", "sm_occupancy") if key in figures]
    more, memory = {key: round(figures[key], 4) for key in known}, figures["memory_bytes"] / 2**30
    print(f"{name}: {figures['steps_per_second']['median']:,.0f} steps/s, {more}, {memory:.1f} GiB", flush=True)


def main() -> None:
    if sys.argv[1:2] == ["worker"]:
        work({name: Program(**program) for name, program in json.loads(sys.argv[2]).items()}, int(sys.argv[3]))
        return
    chosen = options(
        __doc__,
        {"study": one_of(*STUDIES)},
        counts=[1, 2, 4, 8, 16],
        seconds=3.0,
        repeats=3,
        ways=["mps", "turns"],
        alone=True,
    )
    programs = STUDIES[chosen.study]
    with open_nvml() as nvml:
        gpu = find_gpus(nvml)[0]
        result: dict[str, Any] = {"programs": {name: program._asdict() for name, program in programs.items()}}
        for way in chosen.ways:
            result[way] = measure_shared(nvml, gpu, way, programs, chosen)
        if chosen.alone:
            result["one process"] = measure_alone(nvml, gpu, programs, chosen)
    write_result(f"instances-{chosen.study}", result, chosen.output)


if __name__ == "__main__":
    main()

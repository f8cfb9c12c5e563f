"""Serving a policy over HTTP: decisions a second and latency, for several settings; and 10,000 mixed requests.

    python benchmarks/serving.py [--platform cpu|gpu] [--workers 1 2] [--hidden-sizes 64 64] [--seconds 3]

A small training on CartPole-v1 gives the policy; each setting is a `rollmill serve` in processes of its own, and
the load comes from other processes on the same machine (`serving_load.py`), over loopback. Servers of one part run
side by side, idle but for the one that is asked, and take turns; figures are medians over the turns.

Parts:

- `batching`: closed loops of 1, 8 and 64 clients with one observation a request, by largest batch and wait;
- `lists`: the same with 64 observations a request; and open loops at a quarter, a half and three quarters of what
  64 clients reach;
- `workers`: servers of one worker and of several, 64 clients, over that of one worker;
- `mixed`: 10,000 requests of which 5 % are malformed, in 48 ways, and clients that never finish their requests.

Server and clients share the cores of the machine, so ratios mean more than absolute figures. Writes
results/serving-cpu.json or results/serving-gpu.json after each part, or the result that `--name` names.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import urlopen

from measure import HERE, in_turns, one_of, options, rollmill, some_of, words, write_result
from serving_load import HOST, drive, malformed_shots, mixed, summary

OBSERVATION = [0.01, 0.1, -0.02, -0.1]
ONE = json.dumps({"observation": OBSERVATION})
ROWS = 64
LIST = json.dumps({"observations": [OBSERVATION] * ROWS})
SETTINGS = [(1, 0.0), (64, 0.0), (64, 1.0), (64, 5.0)]
"""Largest batch, and milliseconds that a request waits for others."""
CLIENTS = (1, 8, 64)
SLOW_CLIENTS = 20


def train(folder: Path, hidden_sizes: Sequence[int]) -> Path:
    """Returns a run whose policy is worth nothing, and costs as much as any other of its size."""
    sizes = "--num-envs 8 --num-steps 8 --num-minibatches 1 --total-timesteps 128"
    command = words(f"train ppo CartPole-v1 {sizes} --quiet --no-tensorboard", run_dir=folder / "run")
    rollmill(*command, "--network.hidden-sizes", *hidden_sizes)
    return folder / "run"


@contextlib.contextmanager
def server(run: Path, *settings: Any) -> Iterator[int]:
    """Runs a server, and yields its port."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "address")
        command = ["serve", str(run), "--address-file", str(file), *map(str, settings)]
        process = subprocess.Popen([sys.executable, "-m", "rollmill", *command], stdout=subprocess.DEVNULL)
        try:
            while not file.exists():
                if process.poll() is not None:
                    raise SystemExit(f"rollmill {' '.join(command)} exited with {process.returncode}")
                time.sleep(0.05)
            yield int(file.read_text().rpartition(":")[2])
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def load(port: int, chosen: Any, *, clients: int, rows: int = 1, rate: float | None = None) -> dict[str, Any]:
    """Puts one load on a server, from one process or several."""
    processes = min(chosen.load_processes, clients)
    order = {"port": port, "connections": clients // processes, "seconds": chosen.seconds, "warm_up": 0.5}
    order |= {"body": ONE if rows == 1 else LIST, "rate": None if rate is None else rate / processes}
    command = [sys.executable, str(HERE / "serving_load.py"), json.dumps(order)]
    before = metrics(port)
    with ThreadPoolExecutor(processes) as pool:
        run = lambda _: json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        found = list(pool.map(run, range(processes)))
    after = metrics(port)
    times = [number / 1e6 for part in found for number in part["microseconds"]]
    batches = after["batches"] - before["batches"]
    refused = sum(sum(part["answers"].values()) for part in found) - len(times)
    result = summary(times, seconds=max(part["seconds"] for part in found), rows=rows)
    return result | {"mean_batch": (after["decisions"] - before["decisions"]) / batches, "refused": refused}


def metrics(port: int) -> dict[str, Any]:
    with urlopen(f"http://{HOST}:{port}/metrics") as answer:
        return json.load(answer)


def medians(measurements: dict[Any, Callable[[], dict]], turns: int) -> dict[Any, dict[str, Any]]:
    """Returns medians of several measurements of each kind, in turns."""

    def measured(name: Any) -> dict[str, float]:
        found = measurements[name]()
        print(name, {key: round(value, 3) for key, value in found.items()}, flush=True)
        return found

    runs = in_turns({name: partial(measured, name) for name in measurements}, turns)
    return {
        name: {key: median(one[key] for one in each) for key in each[0]}
        | {"runs": [one["decisions_per_second"] for one in each]}
        for name, each in runs.items()
    }


def batching(run: Path, chosen: Any) -> dict[str, Any]:
    """Closed loops of one observation a request, by largest batch, wait and number of clients."""
    with contextlib.ExitStack() as stack:
        measurements = {}
        for batch, wait in SETTINGS:
            port = stack.enter_context(server(run, "--max-batch", batch, "--max-wait-ms", wait))
            for clients in CLIENTS:
                measurements[batch, wait, clients] = partial(load, port, chosen, clients=clients)
        found = medians(measurements, chosen.turns)
    names = ("max_batch", "max_wait_ms", "clients")
    return {"batching": [dict(zip(names, key, strict=True)) | value for key, value in found.items()]}


def lists_and_rates(run: Path, chosen: Any) -> dict[str, Any]:
    """Closed loops of lists of observations, and open loops of one observation a request."""
    with server(run, "--max-batch", ROWS) as port:
        loads = {clients: partial(load, port, chosen, clients=clients, rows=ROWS) for clients in (1, 8)}
        lists = medians(loads, chosen.turns)
        most = load(port, chosen, clients=64)["decisions_per_second"]
        open_loop = lambda share: partial(load, port, chosen, clients=64, rate=share * most)
        rates = medians({share: open_loop(share) for share in (0.25, 0.5, 0.75)}, chosen.turns)
    return {
        "lists": [{"clients": clients, "observations": ROWS} | value for clients, value in lists.items()],
        "rates": [{"share_of_closed_loop": share, "rate": share * most} | value for share, value in rates.items()],
    }


def workers(run: Path, chosen: Any) -> dict[str, Any]:
    """Servers of several workers over that of the first number, 64 clients."""
    with contextlib.ExitStack() as stack:
        serve = lambda count: stack.enter_context(server(run, "--max-batch", 64, "--workers", count))
        loads = {count: partial(load, serve(count), chosen, clients=64) for count in chosen.workers}
        found = medians(loads, chosen.turns)
    one = found[chosen.workers[0]]["decisions_per_second"]
    rows = [{"workers": count, "over_first": v["decisions_per_second"] / one} | v for count, v in found.items()]
    return {"workers": rows}


def mixture(run: Path, chosen: Any) -> dict[str, Any]:
    """Answers of 10,000 requests with malformed ones, beside clients that never end their request."""
    shots = mixed([ONE], chosen.requests, share=0.05)
    with server(run, "--max-batch", 64) as port, contextlib.ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection((HOST, port))) for _ in range(SLOW_CLIENTS)]
        for client in slow:
            client.sendall(b"POST /act HTTP/1.1\r\nName")
        began = time.perf_counter()
        outcomes = asyncio.run(drive(port, iter(shots), connections=64))
        seconds = time.perf_counter() - began
        for client in slow:
            client.settimeout(60)
        told = Counter(client.recv(4096).split(b" ", 2)[1].decode() for client in slow)
        counted = metrics(port)
    good = [outcome for outcome in outcomes if outcome.shot.kind == "good"]
    bad = [outcome for outcome in outcomes if outcome.shot.kind != "good"]
    wrong = [o.shot.kind for o in outcomes if o.status not in o.shot.statuses]
    errors = [o for o in bad if o.status >= 400 and list(json.loads(o.body)) == ["error"]]
    mixed_requests = {
        "requests": len(outcomes),
        "kinds_of_malformed": len(malformed_shots(ONE)),
        "lost": sum(outcome.status == 0 for outcome in outcomes),
        "good": len(good),
        "good_answered": sum(outcome.status == 200 for outcome in good),
        "malformed": len(bad),
        "malformed_answered_with_an_error": len(errors),
        "answered_otherwise_than_expected": wrong,
        "clients_that_never_finish": dict(told),
        "answers_counted_by_the_server": counted["answers"],
        **summary([outcome.seconds for outcome in good], seconds=seconds),
    }
    print(json.dumps(mixed_requests, indent=2))
    return {"mixed": mixed_requests}


PARTS = {"batching": batching, "lists": lists_and_rates, "workers": workers, "mixed": mixture}


def main() -> None:
    chosen = options(
        __doc__,
        platform=one_of("cpu", "gpu", default="cpu"),
        workers=[1, 2],
        hidden_sizes=[64, 64],
        seconds=(3.0, "of each measurement"),
        turns=3,
        requests=10_000,
        load_processes=max(1, (os.cpu_count() or 1) // 4),
        parts=some_of(PARTS),
        name=(str, "of the result; default: serving-PLATFORM"),
    )
    if chosen.platform == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
    with tempfile.TemporaryDirectory() as folder:
        run = train(Path(folder), chosen.hidden_sizes)
        result: dict[str, Any] = {"hidden_sizes": chosen.hidden_sizes, "load_processes": chosen.load_processes}
        for part in chosen.parts:
            result |= PARTS[part](run, chosen)
            write_result(chosen.name or f"serving-{chosen.platform}", result, chosen.output)


if __name__ == "__main__":
    main()

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

import argparse
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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import urlopen

from measure import RESULTS, write_result
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
    """A run whose policy is worth nothing, and costs as much as any other of its size."""
    sizes = ["--num-envs", "8", "--num-steps", "8", "--num-minibatches", "1", "--total-timesteps", "128"]
    network = ["--network.hidden-sizes", *map(str, hidden_sizes)]
    words = ["train", "ppo", "CartPole-v1", *sizes, *network, "--quiet", "--no-tensorboard", "--run-dir"]
    subprocess.run([sys.executable, "-m", "rollmill", *words, str(folder / "run")], check=True)
    return folder / "run"


@contextlib.contextmanager
def server(run: Path, *options: Any) -> Iterator[int]:
    """The port of a server."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "address")
        words = ["serve", str(run), "--address-file", str(file), *map(str, options)]
        process = subprocess.Popen([sys.executable, "-m", "rollmill", *words], stdout=subprocess.DEVNULL)
        try:
            while not file.exists():
                if process.poll() is not None:
                    raise SystemExit(f"rollmill {' '.join(words)} exited with {process.returncode}")
                time.sleep(0.05)
            yield int(file.read_text().rpartition(":")[2])
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def load(
    port: int, options: argparse.Namespace, *, clients: int, rows: int = 1, rate: float | None = None
) -> dict:
    """One load on a server, from one process or several."""
    processes = min(options.load_processes, clients)
    told = {
        "port": port,
        "connections": clients // processes,
        "seconds": options.seconds,
        "warm_up": 0.5,
        "body": ONE if rows == 1 else LIST,
        "rate": None if rate is None else rate / processes,
    }
    command = [sys.executable, str(Path(__file__).with_name("serving_load.py")), json.dumps(told)]
    before = metrics(port)
    with ThreadPoolExecutor(processes) as pool:
        run = lambda _: json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        found = list(pool.map(run, range(processes)))
    after = metrics(port)
    times = [number / 1e6 for part in found for number in part["microseconds"]]
    batches = after["batches"] - before["batches"]
    seconds = max(part["seconds"] for part in found)
    refused = sum(sum(part["answers"].values()) for part in found) - len(times)
    result = summary(times, seconds=seconds, rows=rows)
    return result | {"mean_batch": (after["decisions"] - before["decisions"]) / batches, "refused": refused}


def metrics(port: int) -> dict[str, Any]:
    with urlopen(f"http://{HOST}:{port}/metrics") as answer:
        return json.load(answer)


def in_turns(measurements: dict[Any, Any], turns: int) -> dict[Any, dict[str, float]]:
    """Medians of several measurements of each kind, one kind after the other, several times."""
    found: dict[Any, list[dict]] = {name: [] for name in measurements}
    for _ in range(turns):
        for name, measure in measurements.items():
            found[name].append(measure())
            print(name, {key: round(value, 3) for key, value in found[name][-1].items()}, flush=True)
    return {
        name: {key: median(one[key] for one in each) for key in each[0]}
        | {"runs": [one["decisions_per_second"] for one in each]}
        for name, each in found.items()
    }


def batching(run: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Closed loops of one observation a request, by largest batch, wait and number of clients."""
    with contextlib.ExitStack() as stack:
        ports = {
            setting: stack.enter_context(server(run, "--max-batch", setting[0], "--max-wait-ms", setting[1]))
            for setting in SETTINGS
        }
        measurements = {
            (*setting, clients): lambda port=port, clients=clients: load(port, options, clients=clients)
            for setting, port in ports.items()
            for clients in CLIENTS
        }
        found = in_turns(measurements, options.turns)
    names = ("max_batch", "max_wait_ms", "clients")
    return {"batching": [dict(zip(names, key, strict=True)) | value for key, value in found.items()]}


def lists_and_rates(run: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Closed loops of lists of observations, and open loops of one observation a request."""
    with server(run, "--max-batch", ROWS) as port:
        lists = in_turns(
            {
                clients: lambda clients=clients: load(port, options, clients=clients, rows=ROWS)
                for clients in (1, 8)
            },
            options.turns,
        )
        most = load(port, options, clients=64)["decisions_per_second"]
        rates = in_turns(
            {
                share: lambda share=share: load(port, options, clients=64, rate=share * most)
                for share in (0.25, 0.5, 0.75)
            },
            options.turns,
        )
    return {
        "lists": [{"clients": clients, "observations": ROWS} | value for clients, value in lists.items()],
        "rates": [{"share_of_closed_loop": share, "rate": share * most} | value for share, value in rates.items()],
    }


def workers(run: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Servers of several workers over that of the first number, 64 clients."""
    with contextlib.ExitStack() as stack:
        ports = {
            count: stack.enter_context(server(run, "--max-batch", 64, "--workers", count))
            for count in options.workers
        }
        found = in_turns(
            {count: lambda port=port: load(port, options, clients=64) for count, port in ports.items()},
            options.turns,
        )
    one = found[options.workers[0]]["decisions_per_second"]
    rows = [{"workers": count, "over_first": v["decisions_per_second"] / one} | v for count, v in found.items()]
    return {"workers": rows}


def mixture(run: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Answers of 10,000 requests with malformed ones, beside clients that never end their request."""
    shots = mixed([ONE], options.requests, share=0.05)
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
    options = parsed()
    if options.platform == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
    with tempfile.TemporaryDirectory() as folder:
        run = train(Path(folder), options.hidden_sizes)
        result: dict[str, Any] = {"hidden_sizes": options.hidden_sizes, "load_processes": options.load_processes}
        for part in options.parts:
            result |= PARTS[part](run, options)
            write_result(options.name or f"serving-{options.platform}", result, directory=options.output)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--hidden-sizes", type=int, nargs="+", default=[64, 64])
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--load-processes", type=int, default=max(1, (os.cpu_count() or 1) // 4))
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--name", help="of the result; default: serving-PLATFORM")
    parser.add_argument("--output", type=Path, default=RESULTS, help="directory of the result")
    return parser.parse_args()


if __name__ == "__main__":
    main()

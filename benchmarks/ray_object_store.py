"""The other side of channels.py, in a Python with Ray: packages through the object store to an actor.

One argument, a JSON object: `size` of a package in bytes, `count` of packages, `rounds` and `capacity`.
"""

import json
import sys
import time
from collections import deque

import numpy as np
import ray


@ray.remote
class Consumer:
    """Looks at each package where it lies."""

    def take(self, package: np.ndarray) -> float:
        """Waits for the package."""
        return float(package[0])

    def echo(self, package: np.ndarray) -> np.ndarray:
        """Sends it back."""
        return package


def burst(consumer, package: np.ndarray, count: int, capacity: int) -> float:
    """Returns the seconds until the consumer is done with `count` packages, `capacity` of them in flight."""
    under_way = deque()
    began = time.perf_counter()
    for _ in range(count):
        if len(under_way) == capacity:
            ray.get(under_way.popleft())
        under_way.append(consumer.take.remote(ray.put(package)))
    ray.get(list(under_way))
    return time.perf_counter() - began


def round_trip(consumer, package: np.ndarray) -> float:
    """Returns the seconds for a package there and back."""
    began = time.perf_counter()
    ray.get(consumer.echo.remote(ray.put(package)))
    return time.perf_counter() - began


def main() -> None:
    size, count, rounds, capacity = map(json.loads(sys.argv[1]).get, ("size", "count", "rounds", "capacity"))
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=1 << 30, logging_level="ERROR")
    consumer, package = Consumer.remote(), np.ones(size // 4, np.float32)
    burst(consumer, package, min(count, 50), capacity)
    rates = [size * count / burst(consumer, package, count, capacity) / 1e9 for _ in range(rounds)]
    trips = [round_trip(consumer, package) for _ in range(100)]
    ray.shutdown()
    print(json.dumps({"gigabytes_per_second": rates, "round_trip_seconds": trips}))


if __name__ == "__main__":
    main()

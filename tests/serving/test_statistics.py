"""Counts of several workers in shared memory, and percentiles of latencies."""

import tempfile

import numpy as np
import pytest

from rollmill.serving.statistics import BUCKETS, ServerStatistics, bucket_of, quantile, statistics_bytes


def test_percentiles_are_right_but_for_the_width_of_a_bucket():
    seconds = np.random.default_rng(0).lognormal(-6, 1, 10_000)
    buckets = np.bincount([bucket_of(value) for value in seconds], minlength=BUCKETS)
    for share in (0.5, 0.9, 0.99, 0.999):
        exact = np.quantile(seconds, share, method="inverted_cdf")
        assert exact <= quantile(buckets, share) * (1 + 1e-9) <= exact * 1.0443 * (1 + 1e-9)
    assert quantile(np.zeros(BUCKETS, np.int64), 0.5) is None
    assert bucket_of(0.0) == 0 and bucket_of(1e9) == BUCKETS - 1


def test_workers_are_summed():
    with tempfile.TemporaryFile() as file:
        file.truncate(statistics_bytes(3))
        workers = [ServerStatistics(3, index, file.fileno()) for index in range(3)]
        for index, worker in enumerate(workers):
            worker.add("requests", index + 1)
            worker.count_response(200)
            worker.record_batch(rows=index + 3, size=8)
            worker.set("queued", 10)
            worker.record_latency(0.001)
        workers[1].count_response(503)
        report = workers[0].report()
    assert report["requests"] == 6 and report["decisions"] == 12 and report["padding"] == 12
    assert report["mean_batch"] == 4 and report["largest_batch"] == 5 and report["queued"] == 30
    assert report["answers"] == {"200": 3, "503": 1} and report["errors"] == 1 and report["workers"] == 3
    assert report["latency_ms"]["median"] == pytest.approx(1, rel=0.05)

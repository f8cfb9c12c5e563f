"""Measures how busy a GPU is: its utilisation (NVML), and its activity (GPM, from Hopper on).

Utilisation is the share of time in which at least one kernel ran, however small. The activity of the
multiprocessors is the share of multiprocessors and cycles with work. A loop of tiny kernels has a high utilisation
and a very low activity. Both refer to the whole GPU, not to one process or instance.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from rollmill.gpus.devices import find_gpus, open_nvml

POLL_SECONDS = 0.2
"""Seconds between two readings of utilisation, which NVML averages over at least a sixth of a second."""
READINGS = 5
"""Number of readings over which recent utilisation is averaged."""

COUNTERS_LOCK = threading.Lock()
"""Lock that is held while utilisation or hardware counters are read.

Counters support one client at a time. With driver 580, reading them in two threads at once read unmapped memory,
which ended the process.
"""

GPM_METRICS = {
    "graphics_activity": "NVML_GPM_METRIC_GRAPHICS_UTIL",
    "sm_activity": "NVML_GPM_METRIC_SM_UTIL",
    "sm_occupancy": "NVML_GPM_METRIC_SM_OCCUPANCY",
    "tensor_activity": "NVML_GPM_METRIC_ANY_TENSOR_UTIL",
    "memory_activity": "NVML_GPM_METRIC_DRAM_BW_UTIL",
}


class Activity(NamedTuple):
    """Average utilisation and activity of a GPU over an interval, as fractions of 1 or None if not measured."""

    utilisation: float | None = None
    """Share of time in which any kernel ran, as in `nvidia-smi`."""
    graphics_activity: float | None = None
    """Share of time in which the compute engine had work."""
    sm_activity: float | None = None
    """Share of multiprocessors with at least one warp."""
    sm_occupancy: float | None = None
    """Number of warps on the multiprocessors, relative to the maximum."""
    tensor_activity: float | None = None
    """Share of cycles in which tensor cores worked."""
    memory_activity: float | None = None
    """Share of the memory bandwidth in use."""

    def __str__(self) -> str:
        parts = {
            "utilisation (NVML)": self.utilisation,
            "SM activity": self.sm_activity,
            "occupancy": self.sm_occupancy,
            "tensor cores": self.tensor_activity,
            "memory": self.memory_activity,
        }
        return ", ".join(f"{name} {_percent(value)}" for name, value in parts.items() if value is not None)


class ActivityMonitor:
    """Context manager that measures the activity of one GPU from its creation until `close`."""

    def __init__(self, nvml: Any, index: int) -> None:
        self.index = index
        self.recent = Activity()
        """Averages over the last second or so."""
        self._lock = threading.Lock()
        self._counters = _Counters(nvml, nvml.nvmlDeviceGetHandleByIndex(index))
        self._first = self._counters.sample()
        self._sum, self._number = 0.0, 0
        self._ended = threading.Event()
        self._looking = threading.Thread(target=self._look, name="rollmill-gpu-activity", daemon=True)
        self._looking.start()

    def restart(self) -> None:
        """Starts a new interval for `read` to average over."""
        with self._lock:
            self._counters.free(self._first)
            self._first, self._sum, self._number = self._counters.sample(), 0.0, 0

    def read(self) -> Activity:
        """Returns the GPU's average activity since the monitor was created or last restarted."""
        with self._lock:
            utilisation = self._sum / self._number if self._number else None
            last = self._counters.sample()
            counted = self._counters.between(self._first, last)
            self._counters.free(last)
        return Activity(utilisation, **counted)

    def close(self) -> None:
        """Ends the measurement of the GPU."""
        self._ended.set()
        self._looking.join()
        self._counters.free(self._first)
        self._first = None

    def __enter__(self) -> "ActivityMonitor":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _look(self) -> None:
        """Reads utilisation, and every so often the counters since the last time."""
        before, readings = self._counters.sample(), []
        while not self._ended.wait(POLL_SECONDS):
            with contextlib.suppress(Exception):
                readings.append(self._counters.utilisation())
                with self._lock:
                    self._sum, self._number = self._sum + readings[-1], self._number + 1
            if len(readings) >= READINGS:
                now = self._counters.sample()
                self.recent = Activity(fmean(readings), **self._counters.between(before, now))
                self._counters.free(before)
                before, readings = now, []
        self._counters.free(before)


class _Counters:
    """Counters of the hardware. All samples are None where a GPU has none, or its driver fails.

    Errors of the driver do not stop the measured run.
    """

    def __init__(self, nvml: Any, device: Any) -> None:
        self._nvml, self._device = nvml, device

    def utilisation(self) -> float:
        """Returns the share of the last moments in which a kernel ran."""
        with COUNTERS_LOCK:
            return self._nvml.nvmlDeviceGetUtilizationRates(self._device).gpu / 100

    def sample(self) -> Any:
        nvml = self._nvml
        with COUNTERS_LOCK, contextlib.suppress(Exception):
            if nvml.nvmlGpmQueryDeviceSupport(self._device).isSupportedDevice:
                sample = nvml.nvmlGpmSampleAlloc()
                try:
                    return nvml.nvmlGpmSampleGet(self._device, sample)
                except Exception:
                    nvml.nvmlGpmSampleFree(sample)
        return None

    def free(self, sample: Any) -> None:
        if sample is not None:
            with COUNTERS_LOCK:
                self._nvml.nvmlGpmSampleFree(sample)

    def between(self, first: Any, last: Any) -> dict[str, float]:
        """Averages the GPU's counters between two samples."""
        if first is None or last is None:
            return {}
        try:
            with COUNTERS_LOCK:
                answers = self._nvml.nvmlGpmMetricsGet(nvml_request(self._nvml, first, last)).metrics
        except Exception:  # for example, no time has passed between the two samples
            return {}
        found = {name: answers[number] for number, name in enumerate(GPM_METRICS)}
        return {name: answer.value / 100 for name, answer in found.items() if not answer.nvmlReturn}


class GpuActivity:
    """Measures the activity of all GPUs that are available to a run."""

    def __init__(self, monitors: Sequence[ActivityMonitor] = ()) -> None:
        self._monitors = monitors

    def restart(self) -> None:
        """Starts a new interval for `total` to average over."""
        for monitor in self._monitors:
            monitor.restart()

    def recent(self) -> dict[str, float]:
        """Returns the GPUs' activity over about the last second as metrics, averaged over the GPUs."""
        activities = [monitor.recent._asdict() for monitor in self._monitors]
        names = activities[0] if activities else ()
        known = {name: [one[name] for one in activities if one[name] is not None] for name in names}
        return {f"gpu/{name}": fmean(values) for name, values in known.items() if values}

    def total(self) -> list[dict[str, Any]]:
        """Returns the average activity of each GPU since the beginning or the last `restart`."""
        return [{"gpu": monitor.index, **monitor.read()._asdict()} for monitor in self._monitors]


@contextlib.contextmanager
def watched_gpus() -> Iterator[GpuActivity]:
    """Context manager that measures the activity of visible GPUs, unless NVML is missing or does not answer."""
    with contextlib.ExitStack() as stack:
        monitors: list[ActivityMonitor] = []
        try:
            nvml = stack.enter_context(open_nvml())
            for gpu in find_gpus(nvml):
                monitors.append(stack.enter_context(ActivityMonitor(nvml, gpu.index)))
        except Exception:  # an error of the measurement must not stop the run
            monitors = []
        yield GpuActivity(monitors)


def nvml_request(nvml: Any, first: Any, last: Any) -> Any:
    """Creates the NVML structure that requests the metrics between two samples."""
    request = nvml.c_nvmlGpmMetricsGet_t()
    request.version, request.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(GPM_METRICS)
    request.sample1, request.sample2 = first, last
    for number, constant in enumerate(GPM_METRICS.values()):
        request.metrics[number].metricId = getattr(nvml, constant)
    return request


def _percent(value: float) -> str:
    return f"{100 * value:.2g} %" if value < 0.1 else f"{100 * value:.0f} %"

"""The activity of GPUs, by a driver that counts: each sample is the time, and each metric a rate of it."""

import contextlib
import threading
import time
from types import SimpleNamespace

import pytest

from rollmill.gpus import activity as module
from rollmill.gpus.activity import Activity, ActivityMonitor, GpuActivity, watched_gpus


class CountingNvml:
    """Answers as NVML does, with a utilisation that is set and counters that grow with it."""

    class NVMLError(Exception):
        """An error of the driver's library."""

    NVML_GPM_METRICS_GET_VERSION = 1
    NVML_GPM_METRIC_GRAPHICS_UTIL, NVML_GPM_METRIC_SM_UTIL, NVML_GPM_METRIC_SM_OCCUPANCY = 1, 2, 3
    NVML_GPM_METRIC_ANY_TENSOR_UTIL, NVML_GPM_METRIC_DRAM_BW_UTIL = 5, 10

    def __init__(self, *, counts=True):
        self.counts, self.utilisation, self.samples, self.open_samples = counts, 50, 0, 0

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetUtilizationRates(self, device):
        return SimpleNamespace(gpu=self.utilisation)

    def nvmlGpmQueryDeviceSupport(self, device):
        return SimpleNamespace(isSupportedDevice=self.counts)

    def nvmlGpmSampleAlloc(self):
        self.open_samples += 1
        return SimpleNamespace()

    def nvmlGpmSampleGet(self, device, sample):
        self.samples += 1
        sample.number = self.samples
        return sample

    def nvmlGpmSampleFree(self, sample):
        self.open_samples -= 1

    def c_nvmlGpmMetricsGet_t(self):
        return SimpleNamespace(metrics=[SimpleNamespace(metricId=0, value=0.0, nvmlReturn=0) for _ in range(8)])

    def nvmlGpmMetricsGet(self, asked):
        assert asked.sample1.number < asked.sample2.number and asked.numMetrics == 5
        for metric in asked.metrics[:5]:
            metric.value, metric.nvmlReturn = 10.0 * metric.metricId, int(metric.metricId == 10)
        return asked


def wait_until(happens):
    deadline = time.monotonic() + 30
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(module, "POLL_SECONDS", 0.005)


def test_averages_of_the_driver_and_of_the_counters():
    nvml = CountingNvml()
    with ActivityMonitor(nvml, 0) as monitor:
        wait_until(lambda: monitor.recent.utilisation is not None)
        expected = Activity(0.5, graphics_activity=0.1, sm_activity=0.2, sm_occupancy=0.3, tensor_activity=0.5)
        assert monitor.recent == monitor.read() == expected  # the memory's metric had an error
        nvml.utilisation = 100
        time.sleep(0.02)
        monitor.restart()
        wait_until(lambda: monitor.read().utilisation == 1.0)
    assert nvml.open_samples == 0


def test_a_gpu_without_counters_has_utilisation_alone():
    with ActivityMonitor(CountingNvml(counts=False), 0) as monitor:
        wait_until(lambda: monitor.recent.utilisation is not None)
        assert monitor.read() == Activity(0.5)
        gpus = GpuActivity([monitor, monitor])
        assert gpus.recent() == {"gpu/utilisation": 0.5}
        assert [each["gpu"] for each in gpus.total()] == [0, 0]


def test_a_driver_that_fails_while_it_is_asked_stops_nothing():
    nvml = CountingNvml()
    with ActivityMonitor(nvml, 0) as monitor:
        nvml.nvmlGpmQueryDeviceSupport = lambda device: 1 / 0
        nvml.nvmlDeviceGetUtilizationRates = lambda device: 1 / 0
        gpus = GpuActivity([monitor])
        gpus.restart()
        assert gpus.total() == [{"gpu": 0, **Activity()._asdict()}]
        time.sleep(0.05)
        assert monitor._looking.is_alive()


class ExclusiveNvml(CountingNvml):
    """Its counters refuse a thread that asks while another one does."""

    def __init__(self):
        super().__init__()
        self.asked, self.faults = threading.Lock(), 0

    def nvmlGpmSampleGet(self, device, sample):
        if not self.asked.acquire(blocking=False):
            self.faults += 1
            raise self.NVMLError("In use by another client")
        time.sleep(0.001)
        self.asked.release()
        return super().nvmlGpmSampleGet(device, sample)


def test_the_driver_s_counters_are_asked_by_one_thread_at_a_time():
    nvml = ExclusiveNvml()
    with ActivityMonitor(nvml, 0) as one, ActivityMonitor(nvml, 0) as other:
        for _ in range(50):
            one.restart()
            assert one.read().sm_activity == other.read().sm_activity == 0.2
    assert nvml.faults == nvml.open_samples == 0


def test_a_sample_that_the_driver_refuses_is_freed():
    nvml = CountingNvml()
    nvml.nvmlGpmSampleGet = lambda device, sample: 1 / 0
    with ActivityMonitor(nvml, 0) as monitor:
        monitor.restart()
        assert monitor.read().sm_activity is None
    assert nvml.open_samples == 0


def test_text_tells_small_shares_apart():
    assert str(Activity(0.45, sm_activity=0.0004, tensor_activity=0.7)) == (
        "utilisation (NVML) 45 %, SM activity 0.04 %, tensor cores 70 %"
    )


def test_a_driver_that_fails_stops_nothing(monkeypatch):
    @contextlib.contextmanager
    def failing():
        raise RuntimeError("the driver is gone")
        yield

    monkeypatch.setattr(module, "open_nvml", failing)
    with watched_gpus() as gpus:
        assert gpus.recent() == {} and gpus.total() == []

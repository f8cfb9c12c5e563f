"""Memory that grows with the steps of environments: which growth is told, and which is not."""

import gc
import mmap

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import rollmill
from rollmill.dataflow import StepRequest
from rollmill.workers.coordination.notices import FailureLog
from rollmill.workers.protocol import EnvGrowth
from rollmill.workers.replica import memory_watch
from rollmill.workers.replica.env_client import HostStepper
from rollmill.workers.replica.memory_watch import MemoryWatch
from rollmill.workers.replica.progress import ReplicaControl

MB = 2**20


def told(inside, outside=lambda step: 0, *, steps=17_000, num_envs=4):
    """What is told, and at which step, where memory grows by `inside(step)` within steps and else by `outside`."""
    memory = [100 * MB]
    watch, found = MemoryWatch(num_envs, memory=lambda: memory[0], clock=lambda: 0.0), []
    for step in range(1, steps + 1):
        before = watch.before()
        memory[0] += inside(step)
        growth = watch.after(before)
        memory[0] += outside(step)
        found += [] if growth is None else [(step, growth)]
    return found


def test_a_leak_is_told_once_with_its_bytes_a_step():
    """16,384 bytes a step are 64 MB between 4,096 and 8,192 steps; four environments share them."""
    ((step, growth),) = told(lambda step: 16_384)
    assert 8_192 <= step <= 16_384 + 31  # a mark lies at the first look from then on, so that intervals differ
    assert growth.bytes_per_step == pytest.approx(4096)
    assert growth.resident == pytest.approx(100 * MB + 16_384 * step, abs=16_384)


def test_a_large_leak_is_told_early():
    """A MB in each step of four environments: a GB until then."""
    ((step, growth),) = told(lambda step: MB, steps=1_100)
    assert 1_024 <= step <= 1_024 + 31 and growth.bytes_per_step == MB / 4


def test_a_leak_in_leaps_is_told():
    """A page of 2 MB at every 64th step."""
    ((_, growth),) = told(lambda step: 2 * MB if step % 64 == 0 else 0)
    assert growth.bytes_per_step == pytest.approx(2 * MB / 64 / 4, rel=0.1)


@pytest.mark.parametrize(
    ("inside", "outside"),
    [
        (lambda step: 0, lambda step: 65_536),  # a replay memory that is filled
        (lambda step: 20_000 if step < 5_000 else 0, lambda step: 0),  # a cache that is full
        (lambda step: 65_536, lambda step: -65_536),  # what is collected, and freed when it was learned from
        (lambda step: 999 * 8_192 if step % 1000 == 999 else -8_192, lambda step: 0),  # episodes that are recorded
        (lambda step: 200, lambda step: 0),  # 3 MB between the last two marks
    ],
    ids=["outside", "cache", "passes", "episodes", "little"],
)
def test_other_growth_is_not_told(inside, outside):
    assert told(inside, outside) == []


class Leaking(gymnasium.Env):
    """Keeps 64 kB of each step."""

    observation_space, action_space = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2)
    kept = 65_536

    def reset(self, *, seed=None, options=None):
        self.memory = []
        return np.zeros(2, np.float32), {}

    def step(self, action):
        if self.kept:  # pages of the system's own: an allocator may hand out memory that the process has already
            self.memory.append(mmap.mmap(-1, self.kept, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            self.memory[-1].write(b"x" * self.kept)
        return np.zeros(2, np.float32), 1.0, False, False, {}


class Tidy(Leaking):
    kept = 0


class SilentControl:
    """A worker's line that keeps what is sent."""

    def __init__(self, sent):
        self.send = lambda kind, fields, *rest: sent.append((kind, fields))
        self.latest = self.wait = self.answer = self.at = lambda *_, **__: None
        self.check, self.stopping = lambda: None, lambda: False


def stepped(kind, steps):
    """The messages of a stepper of two environments."""
    sent = []
    control = ReplicaControl(SilentControl(sent), start_seconds=60.0)
    vector = rollmill.from_gymnasium(kind).start([4, 5], seed=0)
    stepper = HostStepper(vector, [4, 5], control, max_failures=5)
    stepper.open()
    request = StepRequest(*[np.zeros(2, np.int64)] * len(StepRequest._fields))
    for _ in range(steps):
        stepper.step(request)
    return sent


def test_a_leaking_environment_is_named(monkeypatch):
    monkeypatch.setattr(memory_watch, "FIRST_MARK", 32)
    monkeypatch.setattr(memory_watch, "MIN_GROWTH", 4 * MB)
    monkeypatch.setattr(memory_watch, "MAX_SHARE", 1.0)
    gc.collect()  # what earlier tests left would be freed between two marks
    assert stepped(Tidy, 1_200) == []
    ((kind, fields),) = stepped(Leaking, 1_200)
    assert (kind, fields["first"], fields["last"]) == ("EnvGrowth", 4, 5)
    assert 0.9 * 65_536 <= fields["bytes_per_step"] <= 2 * 65_536  # pages may have been counted before
    log = FailureLog()
    (notice,) = log.receive("actor/1", EnvGrowth(**fields), "gymnasium:Leaking-v0")
    assert (
        notice.text.startswith("actor/1: its memory grows by about ") and " kB per environment step" in notice.text
    )
    assert "steps environments 4 to 5 of gymnasium:Leaking-v0: the environment does not free memory" in notice.text
    assert list(log.receive("actor/0", EnvGrowth(**fields), "gymnasium:Leaking-v0")) == []

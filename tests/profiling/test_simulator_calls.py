"""Simulators' compiled code, told apart from the Python code around it."""

import math
import sys
import time

import gymnasium
import jax
import numpy as np
import pytest

from rollmill.core.operations import AROUND_SIMULATORS, ThreadActivity, set_recording, stepped_operation
from rollmill.profiling.classes import HostActivity
from rollmill.profiling.recording import TraceRecorder
from rollmill.profiling.simulator_calls import is_simulator

FROM_3_12 = pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring came with Python 3.12")


@pytest.mark.parametrize(
    "function", [len, math.sin, np.dot, np.zeros(3).sum, [].append, "".join, jax.numpy.add, print]
)
def test_functions_of_python_numpy_and_jax_are_no_simulators(function: object) -> None:
    assert not is_simulator(function)


def test_functions_in_python_are_no_simulators() -> None:
    assert not is_simulator(gymnasium.make)
    assert not is_simulator(gymnasium.Env)


def test_compiled_functions_and_methods_of_other_packages_are() -> None:
    mujoco = pytest.importorskip("mujoco")
    ale = pytest.importorskip("ale_py")
    assert is_simulator(mujoco.mj_step)
    assert is_simulator(ale.ALEInterface().act)


def test_a_thread_steps_environments_only_while_it_is_recorded() -> None:
    activity = ThreadActivity()
    activity.become("collect/environment", AROUND_SIMULATORS, stepping=True)
    assert stepped_operation() is None
    set_recording(True)
    try:
        activity.become("collect/environment", AROUND_SIMULATORS, stepping=True)
        assert stepped_operation() == "collect/environment"
        activity.become("collect")
        assert stepped_operation() is None
    finally:
        set_recording(False)


@FROM_3_12
def test_time_in_mujoco_is_the_simulators_and_the_rest_is_pythons() -> None:
    environment = gymnasium.make("HalfCheetah-v5")
    environment.reset(seed=0)
    action = environment.action_space.sample()
    recorder, activity = TraceRecorder(), ThreadActivity()
    recorder.start()
    begin = time.monotonic_ns()
    activity.become("collect/environment", AROUND_SIMULATORS, stepping=True)
    for _ in range(50):
        environment.step(action)
    activity.become("collect")
    times = recorder.stop(begin, time.monotonic_ns()).times
    simulator = times.host[HostActivity("collect/environment", "simulator")]
    python = times.host[HostActivity("collect/environment", "python")]
    assert times.calls["simulator"] >= 50
    assert simulator > 0.2 * (simulator + python)
    assert python > 0.02 * (simulator + python)
    assert sys.monitoring.get_tool(sys.monitoring.PROFILER_ID) is None

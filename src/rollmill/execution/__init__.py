"""Runs graphs: the one-program backend, the loop that drives it, evaluation, and what to do at a fault."""

from rollmill.execution.advance import Window, advance
from rollmill.execution.compilation import cache_directory, enable_compilation_cache
from rollmill.execution.devices import take_devices, telling_memory
from rollmill.execution.evaluation import Episodes, evaluate, evaluate_on_host
from rollmill.execution.faults import Fault, find_fault, is_finite, stop_at_fault
from rollmill.execution.fusing import Fusion, Launches
from rollmill.execution.one_program import Program, lower, state_shapes
from rollmill.execution.replay import Replayed, has_fault, has_message, replay_fault

__all__ = [
    "Episodes",
    "Fault",
    "Fusion",
    "Launches",
    "Program",
    "Replayed",
    "Window",
    "advance",
    "cache_directory",
    "enable_compilation_cache",
    "evaluate",
    "evaluate_on_host",
    "find_fault",
    "is_finite",
    "lower",
    "has_fault",
    "has_message",
    "replay_fault",
    "state_shapes",
    "stop_at_fault",
    "take_devices",
    "telling_memory",
]

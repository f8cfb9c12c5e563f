"""Runs graphs: the one-program backend, the loop that drives it, evaluation, and what to do at a fault."""

from rollmill.execution.evaluation import EvaluationEpisodes, evaluate, evaluate_on_host
from rollmill.execution.faults.find import Fault, find_fault, is_finite, stop_at_fault
from rollmill.execution.faults.replay import Replayed, has_fault, has_message, replay_fault
from rollmill.execution.program.cache import cache_directory, enable_compilation_cache
from rollmill.execution.program.compiled import CompiledProgram, lower, state_shapes
from rollmill.execution.program.devices import take_devices, telling_memory
from rollmill.execution.program.dispatch import Window, dispatch_ahead
from rollmill.execution.program.kernels import Fusion, Launches

__all__ = [
    "EvaluationEpisodes",
    "Fault",
    "Fusion",
    "Launches",
    "CompiledProgram",
    "Replayed",
    "Window",
    "dispatch_ahead",
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

"""Runs graphs: in one compiled program or with workers; evaluation; and what to do at a fault."""

from rollmill.core.convolutions import order_convolutions
from rollmill.core.threefry import unroll_threefry
from rollmill.execution.evaluation.compiled import evaluate, evaluator
from rollmill.execution.evaluation.episodes import EvaluationEpisodes, Evaluator
from rollmill.execution.evaluation.on_host import evaluate_on_host, evaluator_on_host
from rollmill.execution.faults.find import Fault, find_fault, is_finite, stop_at_fault
from rollmill.execution.faults.replay import Replayed, has_fault, has_message, replay_fault
from rollmill.execution.launch import launch
from rollmill.execution.matches import Game, MatchResult, Player, play_match
from rollmill.execution.memory_needs import claim_before_compiling, claim_compiled
from rollmill.execution.program.cache import cache_directory, enable_compilation_cache, names_in_cache
from rollmill.execution.program.compiled import CompiledProgram, check_devices, lower, start_state, state_shapes
from rollmill.execution.program.devices import take_devices, telling_memory
from rollmill.execution.program.dispatch import Pauses, Window, dispatch_ahead
from rollmill.execution.program.kernels import Fusion, Launches, backend_beside_training
from rollmill.execution.program.mean_choice import choose_mean
from rollmill.execution.program.reductions import mesh_of
from rollmill.execution.program_training import ProgramTraining
from rollmill.execution.replay_size import check_message_size, check_replay_size, replay_size
from rollmill.execution.reports import Recorded, Report, Saved, Training
from rollmill.execution.run_spec import RunSpec

unroll_threefry()  # before anything that this package compiles
order_convolutions()

__all__ = [
    "check_devices",
    "check_message_size",
    "check_replay_size",
    "choose_mean",
    "claim_before_compiling",
    "claim_compiled",
    "mesh_of",
    "replay_size",
    "EvaluationEpisodes",
    "Evaluator",
    "Fault",
    "Fusion",
    "Game",
    "Launches",
    "CompiledProgram",
    "MatchResult",
    "Pauses",
    "Player",
    "ProgramTraining",
    "Recorded",
    "Replayed",
    "Report",
    "RunSpec",
    "Saved",
    "Training",
    "Window",
    "dispatch_ahead",
    "backend_beside_training",
    "cache_directory",
    "enable_compilation_cache",
    "evaluate",
    "evaluate_on_host",
    "evaluator",
    "evaluator_on_host",
    "find_fault",
    "is_finite",
    "launch",
    "lower",
    "names_in_cache",
    "play_match",
    "has_fault",
    "has_message",
    "replay_fault",
    "start_state",
    "state_shapes",
    "stop_at_fault",
    "take_devices",
    "telling_memory",
]

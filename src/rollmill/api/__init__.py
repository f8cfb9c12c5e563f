"""The Python way: train a graph, resume a run, load a policy, evaluate it."""

from rollmill.api.algorithms import ALGORITHMS, Algorithm, find_algorithm, register_algorithm
from rollmill.api.changes import parse_assignments
from rollmill.api.diagnosis import Examination, examine, kept_fault, replay
from rollmill.api.matches import game_of, load_opponent, match, match_runs
from rollmill.api.options import WORKER_LIMITS, RunOptions
from rollmill.api.placing import choose_plan, prepare_devices
from rollmill.api.playing import GameAgainstPolicy
from rollmill.api.policies import LoadedRun, Policy, evaluate, evaluate_run, load, load_weights
from rollmill.api.reopening import reopen
from rollmill.api.saved_run import read_options
from rollmill.api.specification import (
    build_graph,
    describe,
    import_modules,
    rebuild_graph,
)
from rollmill.api.sweeps import TRIAL_RESULTS, SweepDirectory, Trial, run_sweep
from rollmill.api.training import Run, resume, train

__all__ = [
    "ALGORITHMS",
    "TRIAL_RESULTS",
    "WORKER_LIMITS",
    "Algorithm",
    "Examination",
    "GameAgainstPolicy",
    "LoadedRun",
    "Policy",
    "Run",
    "RunOptions",
    "SweepDirectory",
    "Trial",
    "build_graph",
    "choose_plan",
    "describe",
    "evaluate",
    "evaluate_run",
    "examine",
    "find_algorithm",
    "game_of",
    "import_modules",
    "kept_fault",
    "load",
    "load_opponent",
    "load_weights",
    "match",
    "match_runs",
    "parse_assignments",
    "prepare_devices",
    "read_options",
    "rebuild_graph",
    "register_algorithm",
    "reopen",
    "replay",
    "resume",
    "run_sweep",
    "train",
]

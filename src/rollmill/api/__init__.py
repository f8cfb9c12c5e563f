"""The Python interface: training, resuming, sweeps, the search for a plan; policies loaded, evaluated, exported,
rendered, and in matches.
"""

from rollmill.api.action_distribution import ActionDistribution
from rollmill.api.algorithms import (
    ALGORITHMS,
    Algorithm,
    find_algorithm,
    plugins_of_algorithms,
    register_algorithm,
)
from rollmill.api.changes import parse_assignments
from rollmill.api.diagnosis import Examination, examine, kept_fault, replay
from rollmill.api.evaluations import unwatched
from rollmill.api.exporting import Export, export
from rollmill.api.matches import game_of, load_opponent, match, match_runs
from rollmill.api.options import WORKER_LIMITS, RunOptions
from rollmill.api.orders import Order, SearchOrder, read_order, start_child
from rollmill.api.placing import choose_plan, prepare_devices
from rollmill.api.plan_search import (
    DECIDED,
    DEFAULT_BUDGET,
    FoundPlan,
    MemoryNeed,
    SearchRequest,
    find_plan,
    leave_devices,
    memory_need,
)
from rollmill.api.playing import GameAgainstPolicy
from rollmill.api.policies import evaluate, evaluate_run, load, load_weights
from rollmill.api.policy import LoadedRun, Policy
from rollmill.api.policy_arguments import mask_struct
from rollmill.api.rendering import Frame, render, render_run
from rollmill.api.reopening import reopen
from rollmill.api.request import (
    ResolvedRequest,
    TrainingRequest,
    default_config,
    prepare_request,
    read_request,
    resolve,
    train_request,
)
from rollmill.api.resuming import resume
from rollmill.api.saved_run import read_options
from rollmill.api.specification import (
    build_graph,
    describe,
    import_modules,
    rebuild_graph,
)
from rollmill.api.sweeps import TRIAL_RESULTS, SweepDirectory, SweepSpec, Trial, run_sweep
from rollmill.api.training import PreparedTraining, Run, begin_training, prepare_training, train
from rollmill.api.trust import remember, trusted_modules
from rollmill.api.watching import WatchedCheckpoint, watch

__all__ = [
    "ALGORITHMS",
    "DECIDED",
    "Order",
    "ResolvedRequest",
    "SearchOrder",
    "TrainingRequest",
    "default_config",
    "prepare_request",
    "read_order",
    "read_request",
    "resolve",
    "start_child",
    "train_request",
    "DEFAULT_BUDGET",
    "TRIAL_RESULTS",
    "WORKER_LIMITS",
    "ActionDistribution",
    "Algorithm",
    "Examination",
    "Export",
    "FoundPlan",
    "Frame",
    "GameAgainstPolicy",
    "LoadedRun",
    "MemoryNeed",
    "Policy",
    "PreparedTraining",
    "Run",
    "RunOptions",
    "SearchRequest",
    "SweepDirectory",
    "SweepSpec",
    "Trial",
    "WatchedCheckpoint",
    "begin_training",
    "build_graph",
    "choose_plan",
    "describe",
    "evaluate",
    "evaluate_run",
    "examine",
    "export",
    "find_algorithm",
    "find_plan",
    "game_of",
    "import_modules",
    "kept_fault",
    "leave_devices",
    "load",
    "load_opponent",
    "load_weights",
    "mask_struct",
    "match",
    "match_runs",
    "memory_need",
    "parse_assignments",
    "plugins_of_algorithms",
    "prepare_devices",
    "prepare_training",
    "read_options",
    "rebuild_graph",
    "register_algorithm",
    "remember",
    "render",
    "render_run",
    "reopen",
    "replay",
    "resume",
    "run_sweep",
    "train",
    "trusted_modules",
    "unwatched",
    "watch",
]

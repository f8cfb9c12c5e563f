"""Hooks are functions that a run calls with its events. This package contains the events, the requests that hooks
return, and built-in hooks.
"""

from rollmill.hooks.csv_log import csv_log
from rollmill.hooks.events import (
    Checkpoint,
    CheckpointSaved,
    FailureKind,
    FailureReported,
    Hook,
    HookRequest,
    MetricsLogged,
    PolicyEvaluated,
    Stop,
    TrainingEvent,
    TrainingFinished,
    TrainingRewound,
    TrainingStarted,
    name_of,
)
from rollmill.hooks.stopping import early_stopping, stop_at_return
from rollmill.hooks.trackers import mlflow_log, wandb_log

__all__ = [
    "Checkpoint",
    "CheckpointSaved",
    "FailureKind",
    "FailureReported",
    "Hook",
    "HookRequest",
    "MetricsLogged",
    "PolicyEvaluated",
    "Stop",
    "TrainingEvent",
    "TrainingFinished",
    "TrainingRewound",
    "TrainingStarted",
    "csv_log",
    "early_stopping",
    "mlflow_log",
    "name_of",
    "stop_at_return",
    "wandb_log",
]

"""Hooks are functions that a run calls with its events. This package contains the events, the requests that hooks
return, and built-in hooks.
"""

from rollmill.hooks.csv_log import csv_log as csv_log
from rollmill.hooks.events import (
    Checkpoint as Checkpoint,
    CheckpointSaved as CheckpointSaved,
    FailureKind as FailureKind,
    FailureReported as FailureReported,
    Hook as Hook,
    HookRequest as HookRequest,
    MetricsLogged as MetricsLogged,
    PolicyEvaluated as PolicyEvaluated,
    Stop as Stop,
    TrainingEvent as TrainingEvent,
    TrainingFinished as TrainingFinished,
    TrainingRewound as TrainingRewound,
    TrainingStarted as TrainingStarted,
    hook_name as hook_name,
)
from rollmill.hooks.stopping import (
    early_stopping as early_stopping,
    evaluation_return as evaluation_return,
    stop_at_return as stop_at_return,
    training_return as training_return,
)
from rollmill.hooks.trackers import mlflow_log as mlflow_log, wandb_log as wandb_log

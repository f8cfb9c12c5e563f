"""The record of a run: its directory, checkpoints and metrics; and the signals that stop it.

Nothing here depends on algorithms, networks, environments or execution: a state is a pytree of arrays,
a configuration is JSON.
"""

from rollmill.core.folder import Folder, ForeignFileError
from rollmill.core.interruption import Interruption
from rollmill.record.checkpoints import Checkpoints, CheckpointWarning, Restored
from rollmill.record.display import Display, Status, choose_display
from rollmill.record.episode_window import EpisodeWindow
from rollmill.record.json_files import plain, read_json, write_json
from rollmill.record.learning_curves import RETURN, MetricsFollower, ReturnAt, thinned_curve
from rollmill.record.leaves import from_host, to_host, tree_digest
from rollmill.record.metric_curves import MetricAt, metric_curve, metric_names
from rollmill.record.metrics import MetricsLog, MetricsWarning, check_metrics, read_metrics
from rollmill.record.row_sums import RowSums, SavedSums
from rollmill.record.run_directory import CONFIG, RunDirectory, name_run
from rollmill.record.signals import StopRequest, stop_on_signals
from rollmill.record.throughput import Throughput

__all__ = [
    "CONFIG",
    "CheckpointWarning",
    "Checkpoints",
    "Display",
    "EpisodeWindow",
    "Folder",
    "ForeignFileError",
    "Interruption",
    "RETURN",
    "MetricAt",
    "MetricsFollower",
    "MetricsLog",
    "MetricsWarning",
    "Throughput",
    "Restored",
    "ReturnAt",
    "RowSums",
    "RunDirectory",
    "SavedSums",
    "Status",
    "StopRequest",
    "check_metrics",
    "choose_display",
    "from_host",
    "metric_curve",
    "metric_names",
    "name_run",
    "plain",
    "read_json",
    "read_metrics",
    "stop_on_signals",
    "thinned_curve",
    "to_host",
    "tree_digest",
    "write_json",
]

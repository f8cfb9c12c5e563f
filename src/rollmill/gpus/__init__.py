"""Instances: the parts of a GPU that several processes have, by MPS, as slices of MIG, or in turns."""

from rollmill.gpus.activity import Activity, ActivityMonitor, GpuActivity, watched_gpus
from rollmill.gpus.devices import Gpu, Slice, find_computing_gpus, find_gpus, open_nvml, read_gpus
from rollmill.gpus.machine_parts import (
    MachinePart,
    MachineParts,
    check_sharing,
    divide_machine,
    parts_on_cores,
    share_of_cores,
)
from rollmill.gpus.mig import MigLayout, check_slices, mig_commands, mig_layout
from rollmill.gpus.mps import MpsDaemon, daemon_answers, find_mps, shared_mps
from rollmill.gpus.sharing import SHARINGS, Instance, SharedGpus, choose_sharing, divide_gpus, shared_gpus

__all__ = [
    "SHARINGS",
    "Activity",
    "ActivityMonitor",
    "Gpu",
    "GpuActivity",
    "Instance",
    "MachinePart",
    "MachineParts",
    "MigLayout",
    "MpsDaemon",
    "SharedGpus",
    "Slice",
    "check_sharing",
    "check_slices",
    "choose_sharing",
    "daemon_answers",
    "divide_gpus",
    "divide_machine",
    "find_computing_gpus",
    "find_gpus",
    "find_mps",
    "mig_commands",
    "mig_layout",
    "open_nvml",
    "parts_on_cores",
    "read_gpus",
    "share_of_cores",
    "shared_gpus",
    "shared_mps",
    "watched_gpus",
]

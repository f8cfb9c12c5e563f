"""Sweeps: trainings with different values of options, each an ordinary run, several at a time."""

from rollmill.sweeps.directory import TRIAL_RESULTS, SweepDirectory
from rollmill.sweeps.ranking import OVER_SEEDS
from rollmill.sweeps.running import run_sweep
from rollmill.sweeps.spec import SweepSpec, Trial, text_of

__all__ = ["OVER_SEEDS", "TRIAL_RESULTS", "SweepDirectory", "SweepSpec", "Trial", "run_sweep", "text_of"]

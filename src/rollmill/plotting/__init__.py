"""Learning curves of runs and sweeps: as values, as a page, and as a PNG."""

from rollmill.plotting.curves import METRIC, check_output, plot, read_curves, write_curves
from rollmill.plotting.groups import CurveGroup, Curves

__all__ = ["METRIC", "CurveGroup", "Curves", "check_output", "plot", "read_curves", "write_curves"]

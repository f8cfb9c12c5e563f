"""Stops trials of a sweep early, based on their returns at the rungs of successive halving."""

from rollmill.record.metric_curves import LineFollower
from rollmill.sweeps.directory import SweepDirectory
from rollmill.sweeps.halving import CurvePoint, HalvingRule, Judgement
from rollmill.sweeps.metrics import curve_of
from rollmill.sweeps.spec import Trial


class EarlyStopping:
    """Follows the learning curves of running trials, and judges each trial when it reaches a rung.

    Results at rungs and decisions are written to a file before a trial is stopped, so they are kept if this
    process is killed. Learning curves are not stored, since no trial is judged twice at the same rung.
    """

    def __init__(self, sweep: SweepDirectory, rule: HalvingRule) -> None:
        self._sweep, self._rule = sweep, rule
        self._metric = curve_of(sweep.spec.metric)
        self._state = sweep.stopping()
        self._followers: dict[str, LineFollower] = {}

    def look(self, trial: Trial) -> Judgement | None:
        """Reads the new metrics of a running trial. Returns the judgement that stops the trial, or None."""
        if trial.name not in self._followers:
            self._followers[trial.name] = LineFollower(self._sweep.run(trial).folder)
        points = self._followers[trial.name].read_points(self._metric)
        curve = [CurvePoint(int(point.env_steps), point.value) for point in points]
        judgements = self._state.judge(self._rule, trial.name, curve)
        if judgements:
            self._sweep.write_stopping(self._state)
        return judgements[-1] if judgements and not judgements[-1].stays else None


def goes_on(sweep: SweepDirectory) -> None:
    """Lets all stopped trials of a sweep continue, and turns early stopping off."""
    state = sweep.stopping()
    state.stopped, state.ended = {}, True
    sweep.write_stopping(state)


def describe_stop(judgement: Judgement) -> str:
    """Returns a description, for the user, of why a trial was stopped."""
    place = f"number {judgement.place} of {judgement.trials}"
    return f"at {judgement.steps:,} steps, where its return of {judgement.result:.4g} was {place}"

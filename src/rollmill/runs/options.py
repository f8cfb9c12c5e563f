"""Options for running and recording. Options of the algorithm and the environment are defined elsewhere."""

from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Annotated, TypeAlias

from rollmill.core.bounds import Count, Range
from rollmill.core.errors import UsageError
from rollmill.core.field_help import with_field_help
from rollmill.core.machine import Numerics
from rollmill.core.membership import HOSTS
from rollmill.core.stored_paths import RunPath
from rollmill.planning.placement import PlacementOptions
from rollmill.programs.evaluation.episodes import MAX_EPISODES
from rollmill.programs.kernels import Fusion

WORKER_LIMITS = ("hang_seconds", "start_seconds", "max_failures")
"""Fields of `RunOptions` that limit workers: beyond these limits, a worker is replaced or the run ends."""

Seeds: TypeAlias = Annotated[Count, Range(high=2**14)]
Iterations: TypeAlias = Annotated[Count, Range(high=2**53)]
"""A number of iterations. The upper bound exceeds what any machine can do, so a larger number is a mistake."""


@with_field_help
@dataclass(frozen=True)
class RunOptions(PlacementOptions):
    """Settings for running and recording.

    Only eight options change the result of a seed by more than rounding. These are `seed`, the options for initial
    weights (`start_from`, `clone`, `clone_updates`, `pool_from`), `asynchronous`, which lets actors use older
    weights, `numerics`, the precision of matrix products in kernels, and `stop_at_return`, which may end the run
    early.
    """

    seed: Annotated[int, Range(0, 2**32 - 1)] = 0
    """Seed of all random numbers of the run."""
    num_seeds: Seeds = 1
    """Train this many seeds in parallel in one program: seed, seed + 1, ..."""
    start_from: str | None = None
    """Begin with the policy weights of another run, given by its directory. Weights with equal names and
    shapes in both networks are copied. Optimiser and environments start from scratch."""
    clone: Path | None = None
    """Begin with weights that imitate recorded episodes. The file comes from `rollmill evaluate --record`. All
    seeds begin with the same weights."""
    clone_updates: Count | None = None
    """Number of Adam updates that `clone` makes, on 256 transitions each. Default: 2,000."""
    pool_from: Path | None = None
    """Fill the pool of earlier opponents of mappo or ippo with the newest checkpoints of another run, given by its
    directory, at most `pool_size`."""
    run_dir: RunPath | None = None
    """Where the run is recorded: a folder, or a URL such as s3://bucket/runs/mine, to which finished checkpoints
    are copied. Default: a folder in runs/, named after algorithm, environment, seed and time."""
    resume_if_exists: bool = False
    """Continue the run in --run-dir if it exists and has the same configuration. Otherwise start a new run. This
    is useful if a batch system repeats the same command."""
    checkpoint_seconds: Annotated[float, Range(0, finite=False)] = 30.0
    """Seconds between two checkpoints. A checkpoint is always saved at the end."""
    checkpoint_iterations: Iterations | None = None
    """Save a checkpoint after this number of iterations, instead of by time."""
    keep_last: Annotated[Count, Range(high=2**31)] = 3
    """Number of newest checkpoints to keep."""
    keep_best: Annotated[int, Range(0), Range(high=2**31)] = 1
    """Number of additional checkpoints to keep, those with the best returns, or with the best evaluations if there
    are evaluations."""
    checkpoint_environments: bool = True
    """Save the states of the environments in checkpoints. Without them, checkpoints are smaller, but a resumed run
    begins new episodes, and its result differs from a run that never stopped."""
    log_every: Iterations | None = None
    """Number of iterations per line of metrics.jsonl. By default, the file has at most 10,000 lines."""
    stop_at_return: Annotated[float, Range()] | None = None
    """Stop as soon as the mean return reaches this value. It is the mean over the latest 100 episodes, or over an
    evaluation with --evaluate-every."""
    return_of: str | None = None
    """Kind of agents whose mean return determines the best checkpoints, and is compared with --stop-at-return.
    Default: the mean over all agents, which says little if kinds have opposing goals."""
    evaluate_every: Iterations | None = None
    """Evaluate the policy after this number of environment steps, at the end of an iteration, and after the last
    iteration. With workers, as for every Gymnasium environment, an evaluation may come an iteration or more later.
    The best checkpoints are then chosen by evaluations."""
    evaluate_episodes: Annotated[Count, Range(high=MAX_EPISODES)] = 20
    """Number of episodes in an evaluation, for each training seed."""
    evaluate_seed: Annotated[int, Range(0, 2**32 - 1)] = 0
    """Seed of the environments in evaluations, which is the same for all evaluations."""
    evaluate_stochastic: bool = False
    """Sample actions in evaluations, as in training, instead of taking the most likely ones."""
    evaluate_env_options: tuple[str, ...] = ()
    """Options of the environment in evaluations, as KEY=VALUE, in addition to the options used in training."""
    tensorboard: bool = True
    """Write TensorBoard events in addition to metrics.jsonl."""
    track: tuple[str, ...] = ()
    """Pass each line of metrics to trackers: csv writes metrics.csv in the run directory, wandb and mlflow log to
    these services, module:function calls a function with the run directory and the line, and video adds episodes
    of new checkpoints to TensorBoard. Several may be given. If a tracker fails, the run continues."""
    hang_seconds: Annotated[float, Range(1, finite=False)] = 120.0
    """Seconds without progress after which a worker counts as hung. Hung worker processes are replaced."""
    start_seconds: Annotated[float, Range(1, finite=False)] = 600.0
    """Seconds that a worker may take to start: to import, build its environments and compile its programs."""
    max_failures: Annotated[int, Range(0, finite=False)] = 5
    """Maximum number of failures in a row. One more failure ends the run. Failures of a Python environment are in
    a row if it completes no episode in between. Losses of an environment worker are in a row if it does not work
    for `hang_seconds` and for a minute in between."""
    checksums: bool = False
    """Add checksums to messages between groups, which the receivers check."""
    unroll: Annotated[Count, Range(high=2**10)] | None = None
    """Number of steps of the environment loop that are compiled as one. Default: depends on the platform."""
    fusion: Fusion = "auto"
    """Fused kernels: `rollout` fuses policy and environment, and `full` also the gradients. `auto` uses each of
    the two kernels if it is possible and faster, in runs that are long enough. `off` leaves everything to XLA."""
    numerics: Numerics = "tf32"
    """Precision of matrix products in kernels: `float32`, `tf32`, which XLA also uses on GPUs, or `bfloat16`."""
    memory_fraction: Annotated[float, Range(0.01, 1)] | None = None
    """Allocate this share of each GPU's memory at once, instead of memory as it is needed. `resume` allocates
    memory as it is needed."""
    dashboard: bool = True
    """Show losses, returns and other metrics at the bottom of the terminal, instead of a progress bar. If the
    output is not a terminal, plain lines are printed."""
    quiet: bool = False
    """Show nothing during training."""

    def __post_init__(self) -> None:
        if isinstance(self.start_from, PathLike):  # a path, or a `Run`, in Python
            object.__setattr__(self, "start_from", fspath(self.start_from))
        super().__post_init__()
        if self.cluster == HOSTS and self.place not in (None, "mesh"):
            raise UsageError(
                f"cluster={HOSTS} trains on a mesh and cannot be combined with place={self.place}. hint: leave "
                "place out."
            )
        if self.cluster not in (None, HOSTS) and self.place not in (None, "ray", "mesh"):
            raise UsageError(
                f"cluster={self.cluster} lets Ray place the workers and cannot be combined with "
                f"place={self.place}. hint: leave one of them out, or give place=mesh."
            )
        if self.resume_if_exists and self.run_dir is None:
            raise UsageError(
                "resume_if_exists needs run_dir, the directory in which a restarted job finds its run. hint: "
                "give run_dir, or leave resume_if_exists out."
            )
        if self.clone is not None and self.start_from is not None:
            raise UsageError(
                "clone and start_from both determine the initial weights. hint: leave one of them out."
            )
        if self.clone_updates is not None and self.clone is None:
            raise UsageError(
                f"clone_updates={self.clone_updates} has no effect without clone, the recording to imitate."
            )
        if self.seed + self.num_seeds > 2**32:
            raise UsageError(f"seed={self.seed} with num_seeds={self.num_seeds} exceeds 2**32.")

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds that the run trains."""
        return tuple(range(self.seed, self.seed + self.num_seeds))

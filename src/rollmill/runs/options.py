"""Options for running and recording, as opposed to those of the algorithm and the environment."""

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

    Only eight options change the result of a seed by more than rounding: `seed`; `start_from`, `clone`,
    `clone_updates` and `pool_from`, other first weights; `asynchronous`, which lets actors use older weights;
    `numerics`, the precision of kernels' matrix products; and `stop_at_return`, which may end the training early.
    """

    seed: Annotated[int, Range(0, 2**32 - 1)] = 0
    """Seed of all random numbers of the run."""
    num_seeds: Seeds = 1
    """Train this many seeds together in one program: seed, seed + 1, ..."""
    start_from: str | None = None
    """Start with the weights of the policy in this run directory, as far as paths and shapes in the networks
    agree. Optimiser and environments are initialised again."""
    clone: Path | None = None
    """Start with weights that imitate recorded episodes, from a file written by `rollmill evaluate --record`. All
    seeds start with the same weights."""
    clone_updates: Count | None = None
    """Number of Adam steps for `clone`, on 256 transitions each. The default is 2,000."""
    pool_from: Path | None = None
    """Fill the pool of earlier opponents of mappo or ippo with the newest checkpoints of this run directory, at
    most `pool_size`."""
    run_dir: RunPath | None = None
    """Directory of the run, or a URL such as s3://bucket/runs/mine, to which finished checkpoints are copied. By
    default, it is named after algorithm, environment, seed and time, in runs/."""
    resume_if_exists: bool = False
    """If --run-dir contains a run with the same configuration, continue it. Otherwise, start a new run. For jobs
    that a batch system starts again with the same command."""
    checkpoint_seconds: Annotated[float, Range(0, finite=False)] = 30.0
    """Seconds between two checkpoints. A checkpoint is always saved at the end."""
    checkpoint_iterations: Iterations | None = None
    """Save a checkpoint every this many iterations, instead of after a time."""
    keep_last: Annotated[Count, Range(high=2**31)] = 3
    """Number of newest checkpoints to keep."""
    keep_best: Annotated[int, Range(0), Range(high=2**31)] = 1
    """Number of further checkpoints to keep: those with the best return, from evaluations if there are any."""
    checkpoint_environments: bool = True
    """Save the states of environments in checkpoints. Without them, checkpoints are smaller, but a resumed run
    begins new episodes, so its result differs slightly from an uninterrupted run."""
    log_every: Iterations | None = None
    """Iterations per line of metrics.jsonl. By default, there are at most 10,000 lines."""
    stop_at_return: Annotated[float, Range()] | None = None
    """Stop as soon as the mean return reaches this value: of the latest 100 episodes, or of an evaluation with
    --evaluate-every."""
    evaluate_every: Iterations | None = None
    """Evaluate the policy every this many environment steps, rounded up to whole iterations, and after the last
    iteration. The best checkpoints are then those with the best evaluations."""
    evaluate_episodes: Annotated[Count, Range(high=MAX_EPISODES)] = 20
    """Number of episodes in an evaluation, for each trained seed."""
    evaluate_seed: Annotated[int, Range(0, 2**32 - 1)] = 0
    """Seed of the environments in evaluations, the same for all evaluations."""
    evaluate_stochastic: bool = False
    """Sample actions in evaluations, as in training, instead of taking the most likely ones."""
    evaluate_env_options: tuple[str, ...] = ()
    """Options of the environment in evaluations, as KEY=VALUE, in addition to those in training."""
    tensorboard: bool = True
    """Write TensorBoard events in addition to metrics.jsonl."""
    track: tuple[str, ...] = ()
    """Send each line of metrics to a tracker: csv (metrics.csv in the run directory), wandb, mlflow, or
    module:function, a function of the run directory and the line. video adds episodes of new checkpoints to
    TensorBoard. Several trackers may be given. A tracker that fails does not end the run."""
    hang_seconds: Annotated[float, Range(1, finite=False)] = 120.0
    """Seconds without progress after which a worker counts as hung. A worker process is then replaced."""
    start_seconds: Annotated[float, Range(1, finite=False)] = 600.0
    """Seconds without progress after which a worker counts as hung while it starts, that is, while it imports
    modules, builds environments and compiles programs."""
    max_failures: Annotated[int, Range(0, finite=False)] = 5
    """How many times in a row a Python environment may fail without a complete episode in between. Also, how many
    times in a row a worker that steps environments may be lost without having worked for at least `hang_seconds`
    and a minute. One more failure ends the run."""
    checksums: bool = False
    """Add checksums to messages between groups, which receivers verify."""
    unroll: Annotated[Count, Range(high=2**10)] | None = None
    """Number of environment steps compiled into one loop iteration. By default, it depends on the platform."""
    fusion: Fusion = "auto"
    """Fused kernels: `rollout` fuses policy and environment; `full` also fuses gradients; `auto` fuses each of
    these if it is possible and faster, in runs that are long enough; `off` leaves everything to XLA."""
    numerics: Numerics = "tf32"
    """Precision of matrix products in kernels: `float32`, `tf32` as in XLA on a GPU, or `bfloat16`."""
    memory_fraction: Annotated[float, Range(0.01, 1)] | None = None
    """Allocate this fraction of each GPU's memory at once, instead of memory on demand. `resume` allocates memory
    on demand."""
    dashboard: bool = True
    """Show a dashboard with losses and returns at the bottom of the terminal, instead of a progress bar. Outside a
    terminal, plain lines are printed."""
    quiet: bool = False
    """Show nothing while training."""

    def __post_init__(self) -> None:
        if isinstance(self.start_from, PathLike):  # a path in Python, or a `Run`
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
            raise UsageError("clone and start_from both give the first weights. hint: leave one of them out.")
        if self.clone_updates is not None and self.clone is None:
            raise UsageError(f"clone_updates={self.clone_updates} has no effect without clone, a recording.")
        if self.seed + self.num_seeds > 2**32:
            raise UsageError(f"seed={self.seed} with num_seeds={self.num_seeds} exceeds 2**32.")

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds that the run trains."""
        return tuple(range(self.seed, self.seed + self.num_seeds))

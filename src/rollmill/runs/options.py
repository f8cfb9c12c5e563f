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
"""Fields of `RunOptions` that limit what workers may do before they are replaced, or end the run."""

Seeds: TypeAlias = Annotated[Count, Range(high=2**14)]
Iterations: TypeAlias = Annotated[Count, Range(high=2**53)]
"""Upper bounds lie beyond what any machine does: a larger number is a slip, or an attempt to use up memory."""


@with_field_help
@dataclass(frozen=True)
class RunOptions(PlacementOptions):
    """Settings for running and recording.

    Only eight options change the result of a seed by more than rounding: `seed`; `start_from`, `clone`,
    `clone_updates` and `pool_from`, other first weights; `asynchronous`, which lets actors use older weights;
    `numerics`, the precision of kernels' matrix products; and `stop_at_return`, which may end the training early.
    """

    seed: Annotated[int, Range(0, 2**32 - 1)] = 0
    """Seed of everything random."""
    num_seeds: Seeds = 1
    """Train this many seeds side by side in one program: seed, seed + 1, ..."""
    start_from: str | None = None
    """Begin with the weights of the policy of this run, a directory, as far as places and shapes in the networks
    agree. Optimiser and environments start from scratch."""
    clone: Path | None = None
    """Begin with weights that imitate recorded episodes, a file by `rollmill evaluate --record`. All seeds
    begin with the same ones."""
    clone_updates: Count | None = None
    """Steps of Adam, on 256 transitions each, by which `clone` learns; 2,000 if left out."""
    pool_from: Path | None = None
    """Fill the pool of earlier opponents of mappo or ippo with the checkpoints of this run, a directory: the
    newest ones, at most `pool_size`."""
    run_dir: RunPath | None = None
    """Where the run is recorded: a folder, or a URL such as s3://bucket/runs/mine, where finished checkpoints are
    copied. If left out, it is named by algorithm, environment, seed and time under runs/."""
    resume_if_exists: bool = False
    """Go on with the run in --run-dir if there is one, of the same configuration, and train if there is none: for
    jobs that a batch system starts again with the same command."""
    checkpoint_seconds: Annotated[float, Range(0, finite=False)] = 30.0
    """Time between two checkpoints. One is always saved at the end."""
    checkpoint_iterations: Iterations | None = None
    """Save a checkpoint every so many iterations, instead of by time."""
    keep_last: Annotated[Count, Range(high=2**31)] = 3
    """Checkpoints kept, the newest ones."""
    keep_best: Annotated[int, Range(0), Range(high=2**31)] = 1
    """Checkpoints kept besides, those with the best return: of evaluations, where there are any."""
    checkpoint_environments: bool = True
    """Save the states of the environments, without which checkpoints are smaller: a resumed run begins new
    episodes then, and its result is not exactly that of a run that never stopped."""
    log_every: Iterations | None = None
    """Iterations that one line of metrics.jsonl is of. If left out, there are 10,000 lines at most."""
    stop_at_return: Annotated[float, Range()] | None = None
    """Stop as soon as the mean return is at least this: that of the latest 100 episodes, or that of an evaluation
    with --evaluate-every."""
    evaluate_every: Iterations | None = None
    """Evaluate the policy every so many environment steps, at the end of an iteration, and after the last one. The
    best checkpoints are those of the best evaluations then."""
    evaluate_episodes: Annotated[Count, Range(high=MAX_EPISODES)] = 20
    """Episodes of an evaluation, for each seed that is trained."""
    evaluate_seed: Annotated[int, Range(0, 2**32 - 1)] = 0
    """Seed of the environments that evaluations play in, the same for all evaluations."""
    evaluate_stochastic: bool = False
    """Sample actions in evaluations as in training, instead of taking the most likely one."""
    evaluate_env_options: tuple[str, ...] = ()
    """Options of the environment that evaluations play in, as KEY=VALUE, beside those that it is trained with."""
    tensorboard: bool = True
    """Write TensorBoard events beside metrics.jsonl."""
    track: tuple[str, ...] = ()
    """Pass each line of metrics on: csv, to metrics.csv in the run directory; wandb or mlflow; module:function, to
    a function of the run directory and the line. video puts episodes of new checkpoints into TensorBoard. Several
    may be given. A tracker that fails ends no training."""
    hang_seconds: Annotated[float, Range(1, finite=False)] = 120.0
    """Time without progress after which a worker counts as hung, and is replaced where it is a process."""
    start_seconds: Annotated[float, Range(1, finite=False)] = 600.0
    """The same while a worker starts: while it imports, builds its environments and compiles its programs."""
    max_failures: Annotated[int, Range(0, finite=False)] = 5
    """How many times in a row an environment of Python may fail with no whole episode in between, or a worker
    that steps environments be lost without having worked for `hang_seconds` and for a minute. One more ends the
    run."""
    checksums: bool = False
    """Let packages between groups carry a checksum, which their receivers check."""
    unroll: Annotated[Count, Range(high=2**10)] | None = None
    """Steps of the environment loop that are compiled as one, or chosen by platform if left out."""
    fusion: Fusion = "auto"
    """Fused kernels: `rollout` fuses policy and environment; `full`, gradients too; `auto`, each if it can be and
    is faster, in trainings that are long enough; `off` leaves all to XLA."""
    numerics: Numerics = "tf32"
    """Matrix products in kernels: `float32`, `tf32` as XLA computes them on a GPU, or `bfloat16`."""
    memory_fraction: Annotated[float, Range(0.01, 1)] | None = None
    """Take this share of each GPU's memory at once, instead of memory as it is needed. `resume` takes memory as it
    is needed."""
    dashboard: bool = True
    """Show losses, returns and the rest at the bottom of the terminal, instead of a bar. Elsewhere there are plain
    lines."""
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

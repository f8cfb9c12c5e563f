"""Options that several commands share: of the environment, of a run's policy, and of imports."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from rollmill.core.errors import UsageError
from rollmill.core.imports import module_of_file
from rollmill.core.options import Arg
from rollmill.core.stored_paths import RunPath
from rollmill.envs import parse_options

if TYPE_CHECKING:
    from rollmill.policies.policy import LoadedRun

ENV_OPTION, TRANSFORM = "env-option", "transform"
"""Names of the options that choose the options and the transforms of an environment."""
TRANSFORMS_KEY = "transforms"
"""Option of an environment that holds its transforms."""

Imports: TypeAlias = Annotated[
    tuple[str, ...],
    Arg(
        name="import",
        metavar="MODULE",
        help=(
            "Module to import first, because it registers the environment, the network or the algorithm: a name, "
            "or a file such as walk.py."
        ),
        repeated=True,
        convert=module_of_file,
    ),
]

NetworkName: TypeAlias = Annotated[
    str | None,
    Arg(
        name="network",
        metavar="NAME",
        help=(
            "Registered network, used instead of the one that --network.torso and related options describe. "
            "`rollmill list` shows the networks."
        ),
    ),
]

Trust: TypeAlias = Annotated[bool, Arg(only_on=True)]
"""Whether a run may import the modules that it names."""


EnvOptions: TypeAlias = Annotated[
    tuple[str, ...],
    Arg(
        name=ENV_OPTION,
        metavar="KEY=VALUE",
        help=(
            "Option of the environment, such as max_steps=100. true, false, null, numbers, lists and objects are "
            "parsed as JSON, and anything else is a string. Can be repeated."
        ),
        repeated=True,
    ),
]

Transforms: TypeAlias = Annotated[
    tuple[str, ...],
    Arg(
        name=TRANSFORM,
        metavar="NAME[:ARGUMENT]",
        help=(
            "Transform of the environment's observations, actions or rewards, such as frame-stack:4. `rollmill "
            "list` shows the transforms. Can be repeated, the innermost first."
        ),
        repeated=True,
    ),
]


def parse_env_options(texts: Sequence[str]) -> dict[str, Any]:
    """Parses the values of `--env-option` into a dictionary."""
    return parse_options(texts, flag="--env-option")


def chosen_environment_options(env_options: Sequence[str], transforms: Sequence[str]) -> dict[str, Any]:
    """Returns the options of an environment, including its transforms.

    Raises a `UsageError` if an option or transform is invalid, or if transforms are given in two ways.
    """
    options = parse_env_options(env_options)
    if not transforms:
        return options
    from rollmill.envs.named_transforms import OPTION, parse_transforms

    if OPTION in options:
        raise UsageError(
            f"--transform and --env-option {OPTION} set the same option. hint: leave one of them out."
        )
    return {**options, OPTION: [str(parsed) for parsed in parse_transforms(transforms)]}


def merge_environment_options(under: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of options from a file, `under`, overridden by those from the command line, by name.

    Options of the environment are overridden one by one. Transforms of the command line replace all transforms of
    the file, in either form.
    """
    merged = {**under, **given}
    own, of_file = given.get(ENV_OPTION, ()), under.get(ENV_OPTION, ())
    replaced = {text.partition("=")[0] for text in own}
    if TRANSFORM in given:
        replaced.add(TRANSFORMS_KEY)
    elif TRANSFORMS_KEY in replaced:
        merged.pop(TRANSFORM, None)
    if kept := tuple(text for text in of_file if text.partition("=")[0] not in replaced):
        merged[ENV_OPTION] = (*kept, *own)
    elif of_file and not own:
        del merged[ENV_OPTION]
    return merged


@dataclass(frozen=True)
class PolicyOptions:
    """Options that select a run, a checkpoint of its policy, and the environment to play in."""

    run: Annotated[RunPath, Arg(metavar="RUN", positional=True)]
    """Directory of the run."""
    checkpoint: str = "last"
    """Checkpoint of the policy: last; best, with the best return during training; or the number of an
    iteration."""
    env: str | None = None
    """Another environment with the same spaces, such as gymnasium:CartPole-v1."""
    env_options: EnvOptions = ()
    transforms: Transforms = ()
    seed: int = 0
    """Seed of the environments, and of a stochastic policy."""
    train_seed: int | None = None
    """Training seed of the policy, if the run trained several. Default: the first."""
    stochastic: bool = False
    """Sample actions as in training, instead of taking the most likely one."""
    trust: Trust = False
    """Let the run in this directory import the modules that it names, now and later. Runs made on this machine
    always may."""
    imports: Imports = ()
    """Module to import first, because it registers the environment, the network or the algorithm."""

    def load(self) -> "LoadedRun":
        """Loads the run's graph, and the weights of its policy."""
        from rollmill.policies.loading import load_weights

        return load_weights(self.run, checkpoint=self.checkpoint, **self.source)

    @property
    def source(self) -> dict[str, Any]:
        """Arguments of `load_weights` that apply to all policies of a command."""
        return {"seed": self.train_seed, "imports": self.imports, "trust": self.trust}

    @property
    def environment(self) -> dict[str, Any]:
        """Arguments that select the environment, for functions that play."""
        return {
            "env": self.env,
            "env_options": chosen_environment_options(self.env_options, self.transforms),
        }

    @property
    def play(self) -> dict[str, Any]:
        """Arguments of functions that play: the environment, and how actions are chosen."""
        return {**self.environment, "seed": self.seed, "stochastic": self.stochastic}

"""The options of commands that load a run's policy and play with it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rollmill.cli.environment_options import EnvOptions, Transforms
from rollmill.cli.named_parts import Imports, Trust
from rollmill.core.options import Arg
from rollmill.policies.policies import load_weights
from rollmill.policies.policy import LoadedRun


@dataclass(frozen=True)
class PolicyOptions:
    """A run, the checkpoint of its policy, and the environment to play in."""

    run: Annotated[Path, Arg(metavar="RUN", positional=True)]
    """Directory of the run."""
    checkpoint: str = "last"
    """The last checkpoint; best, the one with the best return during training; or the number of an iteration."""
    env: str | None = None
    """Another environment with the same spaces, such as gymnasium:CartPole-v1."""
    env_options: EnvOptions = ()
    transforms: Transforms = ()
    seed: int = 0
    """Seed of the environments and, where it is stochastic, of the policy."""
    train_seed: int | None = None
    """Seed whose policy to take, of a run that trained several. Default: the first."""
    stochastic: bool = False
    """Sample actions as in training, instead of taking the most likely one."""
    trust: Trust = False
    """Let the run of this directory import the modules that it names, now and later; runs made here may anyway."""
    imports: Imports = ()
    """Module to import first, because it registers the environment, the network or the algorithm."""

    def load(self) -> LoadedRun:
        """The run's graph and its policy's weights."""
        return load_weights(
            self.run, checkpoint=self.checkpoint, seed=self.train_seed, imports=self.imports, trust=self.trust
        )

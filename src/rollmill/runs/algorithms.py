"""Finds algorithms by name: built-in algorithms, and algorithms registered by the user or an installed package."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import asdict, fields, is_dataclass, replace
from typing import Any, NamedTuple

from rollmill import algorithms
from rollmill.algorithms.building import graph_settings
from rollmill.algorithms.sizes import check_config_sizes
from rollmill.core.errors import RollmillError, UsageError, unknown_name
from rollmill.core.json_data import writable
from rollmill.core.registry import Registry
from rollmill.core.schema import read_as
from rollmill.core.types import Environment, GymnasiumObject, HostEnvironment
from rollmill.core.user_frame import attribute_to_user_code
from rollmill.dataflow import Graph, check_loops, check_outputs
from rollmill.envs import as_environment
from rollmill.record.json_files import plain


class Algorithm(NamedTuple):
    """An algorithm that the command line and saved runs can name."""

    config: type
    build: Callable[..., Graph]
    summary: str


class BuiltInAlgorithm(NamedTuple):
    """A built-in algorithm, whose module is imported only when one of its parts is needed."""

    config_name: str
    """Name of the algorithm's configuration class in `rollmill.algorithms`."""
    build_name: str
    summary: str

    @property
    def config(self) -> type:
        """The class of the algorithm's hyperparameters, as in `Algorithm`."""
        return getattr(algorithms, self.config_name)

    @property
    def build(self) -> Callable[..., Graph]:
        """The function that builds the algorithm's graph, as in `Algorithm`."""
        return getattr(algorithms, self.build_name)


_SUMMARIES = {
    "ppo": ("PPOConfig", "proximal policy optimisation (Schulman et al., 2017)"),
    "a3c": ("A3CConfig", "advantage actor-critic (Mnih et al., 2016)"),
    "a2c": ("A2CConfig", "synchronous advantage actor-critic, with the settings of A2C (Wu et al., 2017)"),
    "impala": ("IMPALAConfig", "actor-critic with V-trace (Espeholt et al., 2018)"),
    "dqn": ("DQNConfig", "deep Q-networks (Mnih et al., 2015), with the usual extensions"),
    "sac": ("SACConfig", "soft actor-critic (Haarnoja et al., 2018), continuous or discrete"),
    "rsac": ("RSACConfig", "recurrent SAC from sequences (Ni et al., 2022), continuous or discrete"),
    "td3": ("TD3Config", "twin delayed deterministic policy gradients (Fujimoto et al., 2018)"),
    "ddpg": ("DDPGConfig", "deep deterministic policy gradients (Lillicrap et al., 2016)"),
    "pqn": ("PQNConfig", "Q-learning without a replay memory (Gallici et al., 2024)"),
    "r2d2": ("R2D2Config", "recurrent DQN from sequences (Kapturowski et al., 2019)"),
    "alphazero": (
        "AlphaZeroConfig",
        "tree search and self-play in games (Silver et al., 2018; Danihelka et al., 2022)",
    ),
    "mappo": ("MAPPOConfig", "multi-agent PPO with a centralised critic (Yu et al., 2022)"),
    "ippo": ("MAPPOConfig", "multi-agent PPO, one critic per agent (de Witt et al., 2020)"),
    "vdn": ("VDNConfig", "Q-learning for a team, whose value is a sum over agents (Sunehag et al., 2018)"),
    "qmix": ("QMIXConfig", "Q-learning for a team with a monotonic mixing network (Rashid et al., 2018)"),
}
BUILTIN = {name: BuiltInAlgorithm(config, name, summary) for name, (config, summary) in _SUMMARIES.items()}
ALGORITHMS: Registry[Algorithm | BuiltInAlgorithm] = Registry("algorithm", BUILTIN)


def find_algorithm(name: str) -> Algorithm | BuiltInAlgorithm:
    """Returns the algorithm with a name, whether it is built in, registered, or provided by an installed package.

    Raises a `UsageError` with the nearest names if there is none, or if its package cannot be used.
    """
    hint = "For an algorithm of your own, add --import FILE.py, the file that calls rollmill.register_algorithm."
    return ALGORITHMS.find(name, hint=hint)


def register_algorithm(
    name: str,
    build: Callable[[Environment | HostEnvironment, Any], Graph],
    config: type,
    *,
    summary: str | None = None,
    overwrite: bool = False,
) -> Callable[..., Graph]:
    """Registers an algorithm under a name, for the command line, for runs, and for the processes that train it.

    Args:
        name: the name, such as `my-ppo`: one word without a colon.
        build: function from an environment and an instance of `config` to a graph. Other processes call it again,
            so it must return the same graph for the same arguments.
        config: a frozen dataclass of hyperparameters with defaults. Its fields become command-line options.
        summary: a line that describes the algorithm. Default: the first line of `build`'s docstring.
        overwrite: replace an algorithm that has the same name.

    Returns:
        A function like `rollmill.ppo`, `(environment, config=None, **overrides) -> Graph`, whose graphs carry the
        name.

    Raises:
        UsageError: the name is taken or invalid, or `config` is not a frozen dataclass that can be stored in a
            file.
    """
    ALGORITHMS.check(name, build, overwrite=overwrite)
    _check_config(name, config)
    named = functools.wraps(build)(functools.partial(_build, name, build, config))
    line = (inspect.getdoc(build) or "").partition("\n")[0]
    ALGORITHMS.register(name, Algorithm(config, named, line if summary is None else summary))
    return named


def _build(
    name: str,
    build: Callable[..., Graph],
    kind: type,
    env: Environment | HostEnvironment | GymnasiumObject | str,
    config: Any = None,
    **overrides: Any,
) -> Graph:
    """Returns the graph of a registered algorithm, under its name."""
    env = as_environment(env)
    known = [field.name for field in fields(kind)]
    for option in overrides:
        if option not in known:
            raise unknown_name("hyperparameter", option, known)
    config = replace(kind() if config is None else config, **overrides)
    check_config_sizes(config)
    with attribute_to_user_code(f"the algorithm {name}"):
        graph: Any = build(env, config)
    if not isinstance(graph, Graph):
        raise UsageError(
            f"the algorithm {name} returned {type(graph).__name__}, expected a rollmill.dataflow.Graph."
        )
    graph = graph._replace(settings=graph_settings(name, env, config))
    check_loops(graph)
    check_outputs(graph)
    return graph


def _check_config(name: str, config: type) -> None:
    if not (isinstance(config, type) and is_dataclass(config)):
        raise UsageError(f"cannot register {name!r}: its config must be a dataclass, got {config!r}.")
    if not getattr(config, "__dataclass_params__").frozen:  # noqa: B009 - no type knows of it
        raise UsageError(
            f"cannot register {name!r}: {config.__name__} is mutable, but runs compare and record "
            "configurations. hint: declare it with @dataclass(frozen=True)."
        )
    try:
        defaults = config()
        same = read_as(config, plain(writable(asdict(defaults))), where=config.__name__) == defaults
    except (RollmillError, TypeError, ValueError) as error:
        raise UsageError(
            f"cannot register {name!r}: {config.__name__} cannot be stored in a file ({error}). hint: give every "
            "field a default that is a number, a string, a boolean, None, a tuple of these, or a dataclass."
        ) from error
    if not same:
        raise UsageError(
            f"cannot register {name!r}: the defaults of {config.__name__} change when they are written to JSON "
            "and read again."
        )

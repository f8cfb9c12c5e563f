"""Rollmill: reinforcement-learning training in JAX.

Environments and algorithms are written once, as pure functions that name no machine; Rollmill
decides how they run, runs them, and records the results.
"""

# Names are imported at their first use, so that `import rollmill` and `--help` do not wait for JAX.
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollmill.algorithms import (
        A3CConfig,
        AlphaZeroConfig,
        DQNConfig,
        IMPALAConfig,
        MAPPOConfig,
        PPOConfig,
        SACConfig,
        TD3Config,
        a3c,
        alphazero,
        dqn,
        impala,
        ippo,
        mappo,
        position,
        ppo,
        sac,
        td3,
    )
    from rollmill.api import (
        ActionDistribution,
        Export,
        Policy,
        Run,
        RunOptions,
        evaluate,
        export,
        load,
        match,
        register_algorithm,
        render,
        replay,
        resume,
        train,
    )
    from rollmill.api.plotting import plot
    from rollmill.api.profiling import ProfileOptions, profile
    from rollmill.api.sweeps.call import Sweep, sweep
    from rollmill.core.drawing import Circle, Drawing, Line, Polygon
    from rollmill.core.errors import RollmillError
    from rollmill.core.interrupted import Interrupted
    from rollmill.core.operations import operation
    from rollmill.core.types import AgentKind, Environment, HostEnvironment, Timestep
    from rollmill.envs import (
        auto_reset,
        check_environment,
        from_gymnasium,
        make,
        register,
        registered,
        time_limit,
        transform,
        vary,
        vectorise,
    )
    from rollmill.hooks import Checkpoint, Stop
    from rollmill.networks import ActorCritic, NetworkConfig, Output, actor_critic, register_network

__all__ = [
    "A3CConfig",
    "ActionDistribution",
    "ActorCritic",
    "AgentKind",
    "AlphaZeroConfig",
    "Checkpoint",
    "Circle",
    "DQNConfig",
    "Drawing",
    "Environment",
    "Export",
    "HostEnvironment",
    "IMPALAConfig",
    "Interrupted",
    "Line",
    "MAPPOConfig",
    "NetworkConfig",
    "Output",
    "PPOConfig",
    "Policy",
    "Polygon",
    "ProfileOptions",
    "RollmillError",
    "Run",
    "RunOptions",
    "SACConfig",
    "Stop",
    "Sweep",
    "TD3Config",
    "Timestep",
    "a3c",
    "actor_critic",
    "alphazero",
    "auto_reset",
    "check_environment",
    "dqn",
    "evaluate",
    "export",
    "from_gymnasium",
    "impala",
    "ippo",
    "load",
    "make",
    "mappo",
    "match",
    "operation",
    "plot",
    "position",
    "ppo",
    "profile",
    "register",
    "register_algorithm",
    "register_network",
    "registered",
    "render",
    "replay",
    "resume",
    "sac",
    "sweep",
    "td3",
    "time_limit",
    "train",
    "transform",
    "vary",
    "vectorise",
]


_MODULES = {
    "rollmill.algorithms": (
        "A3CConfig",
        "AlphaZeroConfig",
        "DQNConfig",
        "IMPALAConfig",
        "MAPPOConfig",
        "PPOConfig",
        "SACConfig",
        "TD3Config",
        "a3c",
        "alphazero",
        "dqn",
        "impala",
        "ippo",
        "mappo",
        "position",
        "ppo",
        "sac",
        "td3",
    ),
    "rollmill.api": (
        "ActionDistribution",
        "Export",
        "Policy",
        "Run",
        "RunOptions",
        "evaluate",
        "export",
        "load",
        "match",
        "register_algorithm",
        "render",
        "replay",
        "resume",
        "train",
    ),
    "rollmill.api.plotting": ("plot",),
    "rollmill.api.profiling": ("ProfileOptions", "profile"),
    "rollmill.api.sweeps.call": ("Sweep", "sweep"),
    "rollmill.core.drawing": ("Circle", "Drawing", "Line", "Polygon"),
    "rollmill.core.errors": ("RollmillError",),
    "rollmill.core.interrupted": ("Interrupted",),
    "rollmill.core.operations": ("operation",),
    "rollmill.core.types": ("AgentKind", "Environment", "HostEnvironment", "Timestep"),
    "rollmill.envs": (
        "auto_reset",
        "check_environment",
        "from_gymnasium",
        "make",
        "register",
        "registered",
        "time_limit",
        "transform",
        "vary",
        "vectorise",
    ),
    "rollmill.hooks": ("Checkpoint", "Stop"),
    "rollmill.networks": ("ActorCritic", "NetworkConfig", "Output", "actor_critic", "register_network"),
}
_ORIGIN = {name: module for module, names in _MODULES.items() for name in names}
_PACKAGES = (
    "algorithms",
    "api",
    "channels",
    "cli",
    "core",
    "dataflow",
    "envs",
    "execution",
    "fusion",
    "hooks",
    "networks",
    "pages",
    "pictures",
    "planning",
    "profiling",
    "recipes",
    "record",
    "serving",
)


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"rollmill.{name}")
    if name not in _ORIGIN:
        raise AttributeError(f"module 'rollmill' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_ORIGIN[name]), name)
    return value


def __dir__() -> list[str]:
    own = {name for name in globals() if name.startswith("__")}
    return sorted({*own, *__all__, *_PACKAGES})

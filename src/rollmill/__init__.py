"""Rollmill: reinforcement-learning training in JAX.

Environments and algorithms are written once, as pure functions that do not mention any machine. Rollmill decides
how to run them, runs them, and records the results.
"""

# Names are imported at their first use, so that `import rollmill` and `--help` do not wait for JAX.
from typing import TYPE_CHECKING, Any

from rollmill.core.lazy_names import lazy_names

if TYPE_CHECKING:
    __version__: str
    from rollmill.algorithms import (
        A2CConfig,
        A3CConfig,
        AlphaZeroConfig,
        DDPGConfig,
        DQNConfig,
        IMPALAConfig,
        MAPPOConfig,
        PPOConfig,
        PQNConfig,
        SACConfig,
        TD3Config,
        a2c,
        a3c,
        alphazero,
        ddpg,
        dqn,
        impala,
        ippo,
        mappo,
        position,
        ppo,
        pqn,
        sac,
        td3,
    )
    from rollmill.core.drawing import Circle, Drawing, Line, Polygon
    from rollmill.core.errors import RollmillError
    from rollmill.core.interruption import Interrupted
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
    from rollmill.envs.robots.own import robot
    from rollmill.hooks import Checkpoint, Stop
    from rollmill.networks import ActorCritic, NetworkConfig, Output, actor_critic, register_network
    from rollmill.plotting.curves import plot
    from rollmill.policies.action_distribution import ActionDistribution
    from rollmill.policies.exporting import Export, export
    from rollmill.policies.matches import match
    from rollmill.policies.policies import evaluate, load
    from rollmill.policies.policy import Policy
    from rollmill.policies.rendering import render
    from rollmill.profiler.profiling import ProfileOptions, profile
    from rollmill.programs.offered import to_gymnasium, to_pettingzoo
    from rollmill.runs.algorithms import register_algorithm
    from rollmill.runs.diagnosis import replay
    from rollmill.runs.options import RunOptions
    from rollmill.sweeps.call import Sweep, sweep
    from rollmill.training.resuming import resume
    from rollmill.training.training import Run, train

__all__ = [
    "A2CConfig",
    "A3CConfig",
    "ActionDistribution",
    "ActorCritic",
    "AgentKind",
    "AlphaZeroConfig",
    "Checkpoint",
    "Circle",
    "DDPGConfig",
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
    "PQNConfig",
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
    "a2c",
    "a3c",
    "actor_critic",
    "alphazero",
    "auto_reset",
    "check_environment",
    "ddpg",
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
    "pqn",
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
    "robot",
    "time_limit",
    "to_gymnasium",
    "to_pettingzoo",
    "train",
    "transform",
    "vary",
    "vectorise",
]

_MODULES = {
    "rollmill.algorithms": (
        "A2CConfig A3CConfig AlphaZeroConfig DDPGConfig DQNConfig IMPALAConfig MAPPOConfig PPOConfig PQNConfig "
        "SACConfig TD3Config a2c a3c alphazero ddpg dqn impala ippo mappo position ppo pqn sac td3"
    ),
    "rollmill.core.drawing": "Circle Drawing Line Polygon",
    "rollmill.core.errors": "RollmillError",
    "rollmill.core.interruption": "Interrupted",
    "rollmill.core.operations": "operation",
    "rollmill.core.types": "AgentKind Environment HostEnvironment Timestep",
    "rollmill.envs": (
        "auto_reset check_environment from_gymnasium make register registered time_limit transform vary vectorise"
    ),
    "rollmill.envs.robots.own": "robot",
    "rollmill.hooks": "Checkpoint Stop",
    "rollmill.networks": "ActorCritic NetworkConfig Output actor_critic register_network",
    "rollmill.plotting.curves": "plot",
    "rollmill.policies.action_distribution": "ActionDistribution",
    "rollmill.policies.exporting": "Export export",
    "rollmill.policies.matches": "match",
    "rollmill.policies.policies": "evaluate load",
    "rollmill.policies.policy": "Policy",
    "rollmill.policies.rendering": "render",
    "rollmill.profiler.profiling": "ProfileOptions profile",
    "rollmill.programs.offered": "to_gymnasium to_pettingzoo",
    "rollmill.runs.algorithms": "register_algorithm",
    "rollmill.runs.diagnosis": "replay",
    "rollmill.runs.options": "RunOptions",
    "rollmill.sweeps.call": "Sweep sweep",
    "rollmill.training.resuming": "resume",
    "rollmill.training.training": "Run train",
}
_PACKAGES = (
    "algorithms channels cli core dataflow envs fusion gpus hooks networks overview pages physics pictures "
    "plan_search planning plotting policies processes profiler profiling programs recipes record runs serving "
    "sweeps training workers"
)
_get, __dir__ = lazy_names(__name__, _MODULES, packages=_PACKAGES)


def __getattr__(name: str) -> Any:
    """Returns the version, or a name that is imported at its first use."""
    if name == "__version__":
        from rollmill.core.machine import version_of

        return version_of("rollmill") or "unknown"
    return _get(name)

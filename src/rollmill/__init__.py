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
        A2CConfig as A2CConfig,
        A3CConfig as A3CConfig,
        AlphaZeroConfig as AlphaZeroConfig,
        DDPGConfig as DDPGConfig,
        DQNConfig as DQNConfig,
        IMPALAConfig as IMPALAConfig,
        MAPPOConfig as MAPPOConfig,
        PPOConfig as PPOConfig,
        PQNConfig as PQNConfig,
        QMIXConfig as QMIXConfig,
        R2D2Config as R2D2Config,
        RSACConfig as RSACConfig,
        SACConfig as SACConfig,
        TD3Config as TD3Config,
        VDNConfig as VDNConfig,
        a2c as a2c,
        a3c as a3c,
        alphazero as alphazero,
        ddpg as ddpg,
        dqn as dqn,
        impala as impala,
        ippo as ippo,
        mappo as mappo,
        position as position,
        ppo as ppo,
        pqn as pqn,
        qmix as qmix,
        r2d2 as r2d2,
        rsac as rsac,
        sac as sac,
        td3 as td3,
        vdn as vdn,
    )
    from rollmill.core.drawing import Circle as Circle, Drawing as Drawing, Line as Line, Polygon as Polygon
    from rollmill.core.errors import RollmillError as RollmillError
    from rollmill.core.interruption import Interrupted as Interrupted
    from rollmill.core.operations import operation as operation
    from rollmill.core.types import (
        AgentKind as AgentKind,
        Environment as Environment,
        HostEnvironment as HostEnvironment,
        Timestep as Timestep,
    )
    from rollmill.envs import (
        auto_reset as auto_reset,
        check_environment as check_environment,
        from_gymnasium as from_gymnasium,
        make as make,
        register as register,
        registered as registered,
        time_limit as time_limit,
        transform as transform,
        vary as vary,
        vectorise as vectorise,
    )
    from rollmill.envs.robots.custom_robot import robot as robot
    from rollmill.hooks import Checkpoint as Checkpoint, Stop as Stop
    from rollmill.networks import (
        ActorCritic as ActorCritic,
        NetworkConfig as NetworkConfig,
        Output as Output,
        actor_critic as actor_critic,
        register_network as register_network,
    )
    from rollmill.offered import to_gymnasium as to_gymnasium, to_pettingzoo as to_pettingzoo
    from rollmill.plotting.curves import plot as plot
    from rollmill.policies.action_distribution import ActionDistribution as ActionDistribution
    from rollmill.policies.evaluation import evaluate as evaluate
    from rollmill.policies.exporting import Export as Export, export as export
    from rollmill.policies.loading import load as load
    from rollmill.policies.matches import match as match
    from rollmill.policies.policy import Policy as Policy
    from rollmill.policies.rendering import render as render
    from rollmill.profiler.profiling import ProfileOptions as ProfileOptions, profile as profile
    from rollmill.runs.algorithms import register_algorithm as register_algorithm
    from rollmill.runs.diagnosis import replay as replay
    from rollmill.runs.options import RunOptions as RunOptions
    from rollmill.sweeps.call import Sweep as Sweep, sweep as sweep
    from rollmill.training.resuming import resume as resume
    from rollmill.training.training import Run as Run, train as train

_PACKAGES = (
    "algorithms channels cli core dataflow envs fusion gpus hooks networks overview pages physics pictures "
    "plan_search planning plotting policies processes profiler profiling programs recipes record runs serving "
    "sweeps training workers"
)
_get, __dir__, __all__ = lazy_names(__name__, packages=_PACKAGES)


def __getattr__(name: str) -> Any:
    """Returns the version, or a name that is imported at its first use."""
    if name == "__version__":
        from rollmill.core.machine import installed_version

        return installed_version("rollmill") or "unknown"
    return _get(name)

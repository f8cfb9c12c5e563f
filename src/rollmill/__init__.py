"""Rollmill: reinforcement-learning training in JAX.

An environment and an algorithm are written once, as pure functions that name no machine; Rollmill
decides how they run, runs them, and records what happened.
"""

from rollmill.algorithms import (
    A3CConfig,
    IMPALAConfig,
    MAPPOConfig,
    PPOConfig,
    a3c,
    impala,
    ippo,
    mappo,
    ppo,
)
from rollmill.api import Policy, Run, RunOptions, evaluate, load, register_algorithm, replay, resume, train
from rollmill.core.errors import RollmillError
from rollmill.core.types import Environment, HostEnvironment, Timestep
from rollmill.envs import (
    auto_reset,
    check_environment,
    make,
    register,
    registered,
    time_limit,
    vary,
    vectorise,
)
from rollmill.networks import ActorCritic, NetworkConfig, Output, actor_critic, register_network

__all__ = [
    "A3CConfig",
    "ActorCritic",
    "Environment",
    "HostEnvironment",
    "IMPALAConfig",
    "MAPPOConfig",
    "NetworkConfig",
    "Output",
    "PPOConfig",
    "Policy",
    "RollmillError",
    "Run",
    "RunOptions",
    "Timestep",
    "a3c",
    "actor_critic",
    "auto_reset",
    "check_environment",
    "evaluate",
    "impala",
    "ippo",
    "load",
    "make",
    "mappo",
    "ppo",
    "register",
    "register_algorithm",
    "register_network",
    "registered",
    "replay",
    "resume",
    "time_limit",
    "train",
    "vary",
    "vectorise",
]

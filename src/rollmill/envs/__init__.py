"""Environments as values: built-in and adapted ones, transforms, running statistics, and the contract check."""

from rollmill.envs.accounting import record_discounted_returns, record_episodes
from rollmill.envs.agents import active_agents, joint_spaces
from rollmill.envs.check import check_environment, check_types
from rollmill.envs.host import host_environment, step_struct
from rollmill.envs.named_transforms import TRANSFORMS, transform
from rollmill.envs.normalisation import (
    RunningStatistics,
    denormalise,
    initial_statistics,
    normalise,
    normalised_struct,
    scale,
    update_statistics,
)
from rollmill.envs.options import parse_options
from rollmill.envs.random_actions import random_action
from rollmill.envs.registry import (
    as_environment,
    check_name,
    from_gymnasium,
    is_on_host,
    make,
    register,
    registered,
)
from rollmill.envs.strong_types import strongly_typed
from rollmill.envs.transforms import (
    auto_reset,
    plannable,
    record_final_mask,
    time_limit,
    vary,
    vectorise,
    wrap,
)

__all__ = [
    "TRANSFORMS",
    "RunningStatistics",
    "active_agents",
    "as_environment",
    "auto_reset",
    "check_environment",
    "check_name",
    "check_types",
    "denormalise",
    "from_gymnasium",
    "host_environment",
    "is_on_host",
    "initial_statistics",
    "joint_spaces",
    "make",
    "normalise",
    "normalised_struct",
    "parse_options",
    "plannable",
    "random_action",
    "record_discounted_returns",
    "record_episodes",
    "record_final_mask",
    "register",
    "registered",
    "scale",
    "step_struct",
    "strongly_typed",
    "time_limit",
    "transform",
    "update_statistics",
    "vary",
    "vectorise",
    "wrap",
]

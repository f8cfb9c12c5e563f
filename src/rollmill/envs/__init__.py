"""Defines environments as values, adapters, transforms, running statistics, and the check of the contract."""

# Names are imported at their first use: a training needs one environment, on the device or on the host.
from typing import TYPE_CHECKING

from rollmill.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from rollmill.envs.accounting import record_discounted_returns, record_episodes
    from rollmill.envs.agents import active_agents, joint_spaces, random_action
    from rollmill.envs.check import check_environment
    from rollmill.envs.check_trace import check_types
    from rollmill.envs.host import host_environment, step_struct
    from rollmill.envs.named_transforms import TRANSFORMS, transform
    from rollmill.envs.normalisation import (
        RunningStatistics,
        denormalise,
        initial_statistics,
        merge_moments,
        normalise,
        normalised_struct,
        scale,
        update_statistics,
    )
    from rollmill.envs.options import parse_options
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
    "merge_moments",
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

_MODULES = {
    "rollmill.envs.accounting": "record_discounted_returns record_episodes",
    "rollmill.envs.agents": "active_agents joint_spaces random_action",
    "rollmill.envs.check": "check_environment",
    "rollmill.envs.check_trace": "check_types",
    "rollmill.envs.host": "host_environment step_struct",
    "rollmill.envs.named_transforms": "TRANSFORMS transform",
    "rollmill.envs.normalisation": (
        "RunningStatistics denormalise initial_statistics merge_moments normalise normalised_struct scale "
        "update_statistics"
    ),
    "rollmill.envs.options": "parse_options",
    "rollmill.envs.registry": "as_environment check_name from_gymnasium is_on_host make register registered",
    "rollmill.envs.strong_types": "strongly_typed",
    "rollmill.envs.transforms": "auto_reset plannable record_final_mask time_limit vary vectorise wrap",
}
__getattr__, __dir__ = lazy_names(__name__, _MODULES)

"""Defines environments as values, adapters, transforms, running statistics, and the check of the contract."""

# A run needs one environment, so each name is imported at its first use.
from typing import TYPE_CHECKING

from rollmill.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from rollmill.envs.accounting import (
        record_discounted_returns as record_discounted_returns,
        record_episodes as record_episodes,
    )
    from rollmill.envs.agents import (
        active_agents as active_agents,
        joint_spaces as joint_spaces,
        random_action as random_action,
    )
    from rollmill.envs.check import check_environment as check_environment
    from rollmill.envs.check_trace import check_types as check_types
    from rollmill.envs.host import host_environment as host_environment, step_struct as step_struct
    from rollmill.envs.named_transforms import TRANSFORMS as TRANSFORMS, transform as transform
    from rollmill.envs.normalisation import (
        RunningStatistics as RunningStatistics,
        denormalise as denormalise,
        initial_statistics as initial_statistics,
        merge_moments as merge_moments,
        normalise as normalise,
        normalised_struct as normalised_struct,
        scale as scale,
        update_statistics as update_statistics,
    )
    from rollmill.envs.options import parse_options as parse_options
    from rollmill.envs.registry import (
        as_environment as as_environment,
        check_name as check_name,
        from_gymnasium as from_gymnasium,
        is_on_host as is_on_host,
        make as make,
        register as register,
        registered as registered,
    )
    from rollmill.envs.strong_types import strongly_typed as strongly_typed
    from rollmill.envs.transforms import (
        auto_reset as auto_reset,
        plannable as plannable,
        record_final_mask as record_final_mask,
        time_limit as time_limit,
        vary as vary,
        vectorise as vectorise,
        wrap as wrap,
    )

__getattr__, __dir__, __all__ = lazy_names(__name__)

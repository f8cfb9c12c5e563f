"""Steps batches of host environments, which are Python objects, in one process, and stores results in arrays."""

# Most processes need few of these names, so each is imported at its first use.
from typing import TYPE_CHECKING

from rollmill.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from rollmill.envs.host.actions import (
        fit_to_space as fit_to_space,
        replace_illegal_actions as replace_illegal_actions,
    )
    from rollmill.envs.host.batch_simulator import batch_environment as batch_environment
    from rollmill.envs.host.copies import EVALUATION as EVALUATION, environment_seed as environment_seed
    from rollmill.envs.host.environment import (
        StartByName as StartByName,
        StartPython as StartPython,
        check_indices as check_indices,
        host_environment as host_environment,
        start_for_evaluation as start_for_evaluation,
    )
    from rollmill.envs.host.filming import Film as Film, film_environment as film_environment
    from rollmill.envs.host.layout import (
        allocate as allocate,
        copy_batch as copy_batch,
        step_struct as step_struct,
        write_reset as write_reset,
    )
    from rollmill.envs.host.parallel import parallel_environment as parallel_environment
    from rollmill.envs.host.row_vector import RowVector as RowVector

__getattr__, __dir__, __all__ = lazy_names(__name__)

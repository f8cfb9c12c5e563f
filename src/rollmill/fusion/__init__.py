"""Fusion: compiles functions of ONE environment into kernels that step many.

JAX traces a function once into a jaxpr, which `lower_function` converts to a program of nodes. Each node is a
scalar or a vector (a *row*) for every environment of a block. A program is a value: the same program serves all
kernels of a run, and `evaluate` runs it with JAX functions on any device as the reference.
"""

# Names are imported at their first use: most trainings need few of them.
from typing import TYPE_CHECKING

from rollmill.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from rollmill.core.errors import CannotFuse
    from rollmill.core.machine import Numerics
    from rollmill.fusion.backends import backend_of
    from rollmill.fusion.backends.base import Backend, check_package
    from rollmill.fusion.backends.cpu.launches import machine_code
    from rollmill.fusion.backends.triton.gradients import GradientLaunch, run_gradients_kernel
    from rollmill.fusion.backends.triton.one_shot import (
        LANE_BYTES,
        MAX_RANKS,
        compile_one_shot_mean,
        lanes_of,
        one_shot_mean,
    )
    from rollmill.fusion.backends.triton.rollout import Launch, run_kernel
    from rollmill.fusion.estimate.chips import CHIPS, Chip, find_chip
    from rollmill.fusion.estimate.pressure import Pressure, pressure_of
    from rollmill.fusion.explanation import (
        Explanation,
        Resources,
        compiled_resources,
        envs_per_multiprocessor,
        explain,
        stages_of,
    )
    from rollmill.fusion.ir import Loop, Node, Program, Region, evaluate, program_text
    from rollmill.fusion.kernels.gradients import (
        GradientStep,
        first_batch,
        fused_gradients,
        lower_gradients,
        run_gradients_reference,
    )
    from rollmill.fusion.kernels.minibatch_loop import fused_minibatch_loop
    from rollmill.fusion.kernels.rollout import (
        RolloutStep,
        fused_collect,
        lower_rollout,
        pressure_of_rollout,
        pressure_of_step,
        rollout_step,
        run_reference,
    )
    from rollmill.fusion.lower.function import LoweredFunction, lower_function
    from rollmill.fusion.lower.prologue import Prologue, UniformArrays
    from rollmill.fusion.lower.rules import register_rule
    from rollmill.fusion.tune.search import (
        minibatch_loop_search,
        num_kernel_rows,
        rollout_search,
        rollouts_in_a_row,
    )
    from rollmill.fusion.tune.timing import Search, Tuned, compile_candidates, fastest, seconds_of_call

__all__ = [
    "CHIPS",
    "LANE_BYTES",
    "MAX_RANKS",
    "Backend",
    "CannotFuse",
    "Chip",
    "Explanation",
    "GradientLaunch",
    "GradientStep",
    "Launch",
    "Loop",
    "LoweredFunction",
    "Node",
    "Numerics",
    "Pressure",
    "Program",
    "Prologue",
    "Region",
    "Resources",
    "RolloutStep",
    "Search",
    "Tuned",
    "UniformArrays",
    "backend_of",
    "check_package",
    "compile_candidates",
    "compile_one_shot_mean",
    "compiled_resources",
    "evaluate",
    "explain",
    "fastest",
    "find_chip",
    "first_batch",
    "fused_collect",
    "fused_minibatch_loop",
    "fused_gradients",
    "lanes_of",
    "lower_function",
    "lower_gradients",
    "lower_rollout",
    "machine_code",
    "minibatch_loop_search",
    "num_kernel_rows",
    "one_shot_mean",
    "pressure_of",
    "pressure_of_rollout",
    "pressure_of_step",
    "program_text",
    "register_rule",
    "envs_per_multiprocessor",
    "rollout_step",
    "rollout_search",
    "rollouts_in_a_row",
    "seconds_of_call",
    "run_gradients_kernel",
    "run_gradients_reference",
    "run_kernel",
    "run_reference",
    "stages_of",
]

_MODULES = {
    "rollmill.core.errors": "CannotFuse",
    "rollmill.core.machine": "Numerics",
    "rollmill.fusion.backends": "backend_of",
    "rollmill.fusion.backends.base": "Backend check_package",
    "rollmill.fusion.backends.cpu.launches": "machine_code",
    "rollmill.fusion.backends.triton.gradients": "GradientLaunch run_gradients_kernel",
    "rollmill.fusion.backends.triton.one_shot": (
        "LANE_BYTES MAX_RANKS compile_one_shot_mean lanes_of one_shot_mean"
    ),
    "rollmill.fusion.backends.triton.rollout": "Launch run_kernel",
    "rollmill.fusion.estimate.chips": "CHIPS Chip find_chip",
    "rollmill.fusion.estimate.pressure": "Pressure pressure_of",
    "rollmill.fusion.explanation": (
        "Explanation Resources compiled_resources envs_per_multiprocessor explain stages_of"
    ),
    "rollmill.fusion.ir": "Loop Node Program Region evaluate program_text",
    "rollmill.fusion.kernels.gradients": (
        "GradientStep first_batch fused_gradients lower_gradients run_gradients_reference"
    ),
    "rollmill.fusion.kernels.minibatch_loop": "fused_minibatch_loop",
    "rollmill.fusion.kernels.rollout": (
        "RolloutStep fused_collect lower_rollout pressure_of_rollout pressure_of_step rollout_step run_reference"
    ),
    "rollmill.fusion.lower.function": "LoweredFunction lower_function",
    "rollmill.fusion.lower.prologue": "Prologue UniformArrays",
    "rollmill.fusion.lower.rules": "register_rule",
    "rollmill.fusion.tune.search": "minibatch_loop_search num_kernel_rows rollout_search rollouts_in_a_row",
    "rollmill.fusion.tune.timing": "Search Tuned compile_candidates fastest seconds_of_call",
}
__getattr__, __dir__ = lazy_names(__name__, _MODULES)

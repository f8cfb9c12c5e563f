"""Fusion: compiles functions of ONE environment into kernels that step many.

JAX traces a function once into a jaxpr, which `lower_function` converts to a program of nodes. Each node is a
scalar or a vector (a *row*) for every environment of a block. A program is a value: the same program serves all
kernels of a run, and `evaluate` runs it with JAX functions on any device as the reference.
"""

# Most runs need few of these names, so each is imported at its first use.
from typing import TYPE_CHECKING

from rollmill.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from rollmill.core.errors import CannotFuse as CannotFuse
    from rollmill.core.machine import Numerics as Numerics
    from rollmill.fusion.backends import backend_for as backend_for
    from rollmill.fusion.backends.base import (
        Backend as Backend,
        check_package as check_package,
        many_products as many_products,
    )
    from rollmill.fusion.backends.cpu.launches import cpu_backend as cpu_backend
    from rollmill.fusion.backends.triton.gradients import (
        GradientLaunch as GradientLaunch,
        run_gradients_kernel as run_gradients_kernel,
    )
    from rollmill.fusion.backends.triton.one_shot import (
        LANE_BYTES as LANE_BYTES,
        MAX_RANKS as MAX_RANKS,
        compile_one_shot_mean as compile_one_shot_mean,
        num_lanes as num_lanes,
        one_shot_mean as one_shot_mean,
    )
    from rollmill.fusion.backends.triton.rollout import Launch as Launch, run_kernel as run_kernel
    from rollmill.fusion.estimate.chips import CHIPS as CHIPS, Chip as Chip, find_chip as find_chip
    from rollmill.fusion.estimate.pressure import Pressure as Pressure, estimate_pressure as estimate_pressure
    from rollmill.fusion.explanation import (
        Explanation as Explanation,
        KernelResources as KernelResources,
        compiled_resources as compiled_resources,
        compiler_stages as compiler_stages,
        envs_per_multiprocessor as envs_per_multiprocessor,
        explain as explain,
    )
    from rollmill.fusion.ir import (
        Loop as Loop,
        Node as Node,
        Program as Program,
        Region as Region,
        evaluate as evaluate,
        program_text as program_text,
    )
    from rollmill.fusion.kernels.gradients import (
        GradientStep as GradientStep,
        first_batch as first_batch,
        fused_gradients as fused_gradients,
        lower_gradients as lower_gradients,
        run_gradients_reference as run_gradients_reference,
    )
    from rollmill.fusion.kernels.minibatch_loop import fused_minibatch_loop as fused_minibatch_loop
    from rollmill.fusion.kernels.rollout import (
        RolloutStep as RolloutStep,
        estimate_rollout_pressure as estimate_rollout_pressure,
        estimate_step_pressure as estimate_step_pressure,
        fused_collect as fused_collect,
        lower_rollout as lower_rollout,
        rollout_step as rollout_step,
        run_reference as run_reference,
    )
    from rollmill.fusion.kernels.wide_gradients import largest_summed_size as largest_summed_size
    from rollmill.fusion.lower.function import LoweredFunction as LoweredFunction, lower_function as lower_function
    from rollmill.fusion.lower.prologue import Prologue as Prologue, UniformArrays as UniformArrays
    from rollmill.fusion.lower.rules import register_rule as register_rule
    from rollmill.fusion.opt.row_tiles import largest_tiled_size as largest_tiled_size
    from rollmill.fusion.tune.search import (
        consecutive_rollouts as consecutive_rollouts,
        minibatch_loop_search as minibatch_loop_search,
        num_kernel_rows as num_kernel_rows,
        rollout_search as rollout_search,
    )
    from rollmill.fusion.tune.timing import (
        LaunchSearch as LaunchSearch,
        TunedLaunch as TunedLaunch,
        compile_candidates as compile_candidates,
        find_fastest_launch as find_fastest_launch,
        time_call as time_call,
    )

__getattr__, __dir__, __all__ = lazy_names(__name__)

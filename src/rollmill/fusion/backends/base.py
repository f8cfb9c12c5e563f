"""Defines the interface that every kernel backend implements."""

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeAlias

from rollmill.core.errors import UsageError
from rollmill.core.installation import install_command
from rollmill.fusion.estimate.pressure import Pressure

AnyLaunch: TypeAlias = tuple[int, ...]
"""Launch configuration of a kernel, as a tuple whose meaning depends on the backend."""

CompilingAhead: TypeAlias = AbstractContextManager[Callable[[int], None]]
"""Context manager that compiles the kernels of several launches in the background. It yields a function that waits
for the kernel of a launch, by its number, and on exit it cancels any that are not compiled yet."""

MAX_PRODUCTS = 100
"""Maximum number of matrix products in a step. With 323, kernels take many minutes to compile."""


class KernelKind(NamedTuple):
    """Functions of a backend for one kind of kernel, rollout or gradient kernels.

    A task is the arguments of `run` without the launch: `(step, uniforms, carried, keys, num_steps)` for rollouts
    and `(step, minibatch)` for gradients. Array shapes are enough to generate and compile a kernel.
    """

    launches: Callable[..., Sequence[AnyLaunch]]
    """Returns the launch configurations worth timing. For rollouts, the arguments are the number of environments
    and the number of nodes of a step. For gradients, they are the number of samples (or of sequences, with
    `by_step`) and the device. `largest_matrix` is the number of elements of the largest matrix that can be read in
    tiles."""
    run: Callable[..., Any]
    """Returns the function that runs the kernel with a launch: `run(launch, lanes=1)`. With several lanes, call it
    inside `jax.vmap`."""
    share: Callable[[AnyLaunch, int], AnyLaunch]
    """Returns the launch for runs that share a device: `share(launch, count)`. `launch` was tuned for a run that
    has the device to itself."""
    text: Callable[..., str]
    """Returns the source of the kernel, which identifies its timing in the cache: `text(launch, *task)`."""
    describe: Callable[[AnyLaunch], str]
    """Describes a launch in words, for the user."""
    compile_ahead: Callable[..., CompilingAhead]
    """Compiles the kernels of several launches in parallel, in advance: `compile_ahead(launches, *task)`."""
    find_problem: Callable[[AnyLaunch], str | None]
    """Returns why a launch that was read from a run cannot be used, or None (see `launch_problem`)."""
    is_unverified: Callable[[AnyLaunch], bool] = lambda launch: False
    """Returns whether a launch has to be compared with the reference before it is used."""


class Backend(NamedTuple):
    """A kernel backend: the functions that generate, compile and run kernels for one kind of device."""

    package: str
    """Name of the Python package that compiles the kernels, such as `triton`."""
    device_name: Callable[[Any], str]
    """Returns the name of a device under which tuned launches are cached."""
    check: Callable[[Any], None]
    """Raises a `UsageError` if a device cannot run the backend's kernels."""
    reason_to_skip_gradients: Callable[[Any], str | None]
    """Returns the reason why the kernel of a `GradientStep` would take too long to compile unless the user asks
    for it, or None."""
    compile_seconds: Callable[[Pressure], float]
    """Returns the approximate seconds that the rollout kernel of a long step takes to compile, or 0 if unknown."""
    timed_repeats: int
    """Number of rollouts or epochs in one timing, enough to keep the device from waiting for the host."""
    has_lanes: bool
    """Whether one kernel can compute several runs at once. Otherwise it is called for each run in turn."""
    unroll: int
    """Maximum number of minibatches compiled into one iteration of the minibatch loop."""
    rollouts: KernelKind
    gradients: KernelKind
    compilers: Callable[[], AbstractContextManager[object]] = nullcontext
    """Context manager that starts the processes of `compile_ahead` early, since they take about a second."""
    tolerance: float = 1e-3
    """Error that the rounding of products may cause in verified kernels, relative to the largest number of an
    array."""


def launch_problem(
    kind: Any, launch: Sequence[int], *, required: int = 1, powers: Sequence[str] = ("block", "num_warps")
) -> str | None:
    """Returns why numbers are no launch of a kind, a `NamedTuple`, or None if they are.

    At least the first `required` numbers must be present, and none of them is less than 1. Those named in
    `powers` must be powers of two.
    """
    names: Sequence[str] = kind._fields
    if not required <= len(launch) <= len(names):
        counts = f"{required} to {len(names)}" if required < len(names) else str(required)
        return f"it must have {counts} numbers: {', '.join(names)}"
    for place, (name, number) in enumerate(zip(names, launch, strict=False)):
        if name in powers and (number < 1 or number & (number - 1)):
            return f"{name}={number} must be a power of two"
        if place < required and number < 1:
            return f"{name}={number} must be at least 1"
    return None


def check_package(backend: Backend) -> None:
    """Raises a `UsageError` with an install command if the backend's Python package is missing."""
    if importlib.util.find_spec(backend.package) is None:
        raise UsageError(f"kernels need {backend.package}, which is not installed: {install_command('fusion')}")


def many_products(pressure: Pressure) -> str | None:
    """Returns a warning if a program has so many matrix products that compiling it takes minutes.

    Returns None for other programs.
    """
    if pressure.num_products <= MAX_PRODUCTS:
        return None
    return (
        f"a step has {pressure.num_products} matrix products, because a convolution is one product for each place "
        f"of an image. With more than {MAX_PRODUCTS}, compiling takes minutes"
    )

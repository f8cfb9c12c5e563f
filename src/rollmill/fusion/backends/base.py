"""The interface between kernel backends and the code that tunes and uses kernels."""

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeAlias

from rollmill.core.errors import UsageError
from rollmill.core.installation import install_command
from rollmill.fusion.estimate.pressure import Pressure

AnyLaunch: TypeAlias = tuple[int, ...]
"""The numbers of a launch, as a backend understands them."""

CompilingAhead: TypeAlias = AbstractContextManager[Callable[[], None]]
"""Compiles kernels in the background. Gives a function that waits for them, and cancels the rest at the end."""

MAX_PRODUCTS = 100
"""Matrix products of a step; with 323, as in policies for MinAtar, kernels compile for many minutes."""


class KernelKind(NamedTuple):
    """The functions that make one kind of kernel, rollouts or gradients.

    A task is what `run` is called with: `(step, uniforms, carried, keys, num_steps)` of `kernels.rollout.Run`, or
    `(step, minibatch)` of `kernels.gradients.Run`. Shapes of arrays are enough to write or to compile a kernel.
    """

    launches: Callable[..., Sequence[AnyLaunch]]
    """Launches that are worth trying. Of rollouts: by the number of environments, which GPUs ignore, and of nodes
    of a step; of gradients: by the number of samples, or of sequences where `by_step`, and the device."""
    run: Callable[..., Any]
    """`(launch, lanes=1)`: the function that computes a task with it, inside `jax.vmap` over several lanes."""
    share: Callable[[AnyLaunch, int], AnyLaunch]
    """The launch of each of so many trainings that share what a launch was found for."""
    text: Callable[..., str]
    """`(launch, *task)`: the text of a kernel, on which its time depends."""
    describe: Callable[[AnyLaunch], str]
    """A launch in words."""
    compile_ahead: Callable[..., CompilingAhead]
    """`(launches, *task)`: compiles the kernels of all launches side by side, for when they are called."""


class Backend(NamedTuple):
    """Generates and runs kernels for one kind of device."""

    package: str
    """The Python package that compiles the kernels."""
    device: Callable[[Any], str]
    """From a device to the name under which its launches are kept."""
    check: Callable[[Any], None]
    """Raises a UsageError where a device has no kernels."""
    gradients_too_long: Callable[[Any], str | None]
    """Why the gradients of a `GradientStep` compile for too long unless a kernel is asked for; None if not."""
    hopeless: Callable[[Pressure], str | None]
    """Why a step is not worth compiling unless requested, or None if it is."""
    timed_repeats: int
    """Rollouts, or epochs, that are timed at once: enough that the device never waits for the host."""
    has_lanes: bool
    """Whether a kernel computes several trainings at once; without, it is called for one after the other."""
    unroll: int
    """Minibatches, of one epoch or of several, that are compiled as one turn of a loop."""
    rollouts: KernelKind
    gradients: KernelKind


def check_package(backend: Backend) -> None:
    """Checks that the package of a backend is installed. A `UsageError` has the command that installs it."""
    if importlib.util.find_spec(backend.package) is None:
        raise UsageError(f"kernels need {backend.package}, which is not installed: {install_command('fusion')}")


def many_products(pressure: Pressure) -> str | None:
    """Returns why a program compiles for minutes on any device, or None if it does not."""
    if pressure.products <= MAX_PRODUCTS:
        return None
    return (
        f"a step has {pressure.products} matrix products, because a convolution is one product for each place of "
        f"an image. With more than {MAX_PRODUCTS}, compiling takes minutes"
    )

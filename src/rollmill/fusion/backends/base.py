"""What tuning and training know of a backend, whatever its kernels are made of."""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from rollmill.core.errors import UsageError
from rollmill.core.installation import install_command
from rollmill.fusion.estimate.pressure import Pressure
from rollmill.fusion.kernels import gradients, rollout
from rollmill.fusion.kernels.gradients import GradientStep, Minibatch
from rollmill.fusion.kernels.rollout import RolloutStep

AnyLaunch: TypeAlias = tuple[int, ...]
"""The numbers of a launch, as a backend understands them."""

MAX_PRODUCTS = 100
"""Matrix products of a step; with 323, as in policies for MinAtar, kernels compile for many minutes."""


class Backend(NamedTuple):
    """How kernels are made for a kind of device, and how they can be launched."""

    package: str
    """What is needed to make them."""
    device: Callable[[Any], str]
    """What launches are found for."""
    check: Callable[[Any], None]
    """Raises a UsageError where a device has no kernels."""
    rollout_launches: Callable[[int, int], Sequence[AnyLaunch]]
    """`(environments, nodes of a step)`: what is worth trying for rollouts."""
    hopeless: Callable[[Pressure], str | None]
    """Why a step is not worth compiling unless a kernel is asked for; None where it is."""
    rollouts: Callable[[AnyLaunch], rollout.Run]
    """Runs rollouts."""
    rollout_text: Callable[[AnyLaunch, RolloutStep, Sequence[Any], Any, int], str]
    """From a launch, and what a run takes, all that its time depends on."""
    gradient_launches: Callable[[int, Any], Sequence[AnyLaunch]]
    """What is worth trying for a minibatch of so many samples on a device."""
    gradients: Callable[[AnyLaunch], gradients.Run]
    """Runs the gradients of minibatches."""
    gradient_text: Callable[[AnyLaunch, GradientStep, Minibatch], str]
    """From a launch, and what a run takes, all that its time depends on."""
    timed_repeats: int
    """How many rollouts, or epochs, are timed at once: so many that no device waits for what launches them."""
    describe: Callable[[str, AnyLaunch], str]
    """How `rollouts` or `gradients` are launched, in words."""


def check_package(backend: Backend) -> None:
    """Whether what makes kernels is there.

    Raises:
        UsageError: if it is not, with the command that installs it.
    """
    if importlib.util.find_spec(backend.package) is None:
        raise UsageError(f"kernels need {backend.package}, which is missing: {install_command('fusion')}")


def many_products(pressure: Pressure) -> str | None:
    """Why a program compiles for minutes, on a CPU as for a GPU; None where it does not."""
    if pressure.products <= MAX_PRODUCTS:
        return None
    return (
        f"a step is {pressure.products} matrix products, as convolutions are at each place of an image; with more "
        f"than {MAX_PRODUCTS}, it compiles for minutes"
    )

"""Finds the devices that a run computes on, and explains errors about their memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from rollmill.core.errors import UsageError
from rollmill.dataflow import Loops
from rollmill.gpus.device_errors import known_device_error
from rollmill.gpus.jax_settings import check_platform


def take_devices(count: int) -> list[Any]:
    """Returns the first `count` devices of the default JAX platform, or all of them for 0.

    All CPU cores together count as one device unless JAX is configured otherwise. Starts the JAX backend if
    necessary. Raises a `UsageError` if there are fewer devices.
    """
    if count > 1:
        _divide_cpu(count)
    check_platform()
    devices = jax.devices()
    if count > len(devices):
        platform = devices[0].platform
        hint = (
            " For CPU devices, set XLA_FLAGS=--xla_force_host_platform_device_count=N."
            if platform == "cpu"
            else " hint: several processes can share a GPU, with place=mesh or place=processes."
        )
        raise UsageError(f"devices={count} is more than the {len(devices)} devices of platform {platform}.{hint}")
    return devices[: count or None]


def _divide_cpu(count: int) -> None:
    """Requests `count` CPU devices. This has no effect on accelerators, or once JAX has started."""
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        return


@contextmanager
def explain_out_of_memory(loops: Loops) -> Iterator[None]:
    """Translates JAX errors about devices within this context.

    If a device is out of memory, the error names the sizes of the run and the processes that hold memory. If a
    device is lost, the error says so.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        known = known_device_error(
            error,
            what=(
                f"the device does not have enough memory for num_envs x num_steps = {loops.num_envs} x "
                f"{loops.num_steps}. hint: lower one of them, or use more devices."
            ),
        )
        if known is None:
            raise
        raise known from error

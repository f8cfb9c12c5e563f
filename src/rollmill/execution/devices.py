"""Finds the devices that a training runs on."""

from typing import Any

import jax

from rollmill.core.errors import UsageError


def take_devices(count: int) -> list[Any]:
    """The first `count` devices of JAX's default platform, or all of them for 0.

    CPU cores count as one device unless JAX is told otherwise; where it has not started yet, it is.

    Raises:
        UsageError: if there are fewer.
    """
    if count > 1:
        _divide_cpu(count)
    devices = jax.devices()
    if count > len(devices):
        platform = devices[0].platform
        hint = (
            " For CPU devices set XLA_FLAGS=--xla_force_host_platform_device_count=N." if platform == "cpu" else ""
        )
        raise UsageError(f"devices={count}, but there are {len(devices)} of platform {platform}.{hint}")
    return devices[: count or None]


def _divide_cpu(count: int) -> None:
    """Asks for that many CPU devices; without effect on accelerators, and too late once JAX has started."""
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        return

"""Errors of writing the run directory."""

import errno
from pathlib import Path

from rollmill.core.errors import DeviceMemoryError, StorageError
from rollmill.gpus.device_errors import known_device_error

FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
FULL_TEXTS = ("No space left", "Disk quota exceeded", "RESOURCE_EXHAUSTED")


def disk_is_full(error: BaseException) -> bool:
    """True if `error`, or an exception that caused it, means that the disk or a quota is full."""
    if isinstance(error, OSError) and error.errno in FULL_ERRNOS:
        return True
    if isinstance(error, DeviceMemoryError) or known_device_error(error) is not None:
        return False  # a device's memory, which JAX calls RESOURCE_EXHAUSTED too
    if any(text in str(error) for text in FULL_TEXTS):
        return True
    cause = error.__cause__ or error.__context__
    return cause is not None and disk_is_full(cause)


def write_failure(path: Path, error: BaseException) -> StorageError:
    """The `StorageError` for `path`, with a hint; raise it `from error`."""
    if disk_is_full(error):
        return StorageError(f"{path} cannot be written: the disk is full. Free some space and resume the run.")
    return StorageError(f"{path} cannot be written: {error}.")

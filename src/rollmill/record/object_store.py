"""Reads and writes a folder in an object store (S3, Google Cloud Storage or Azure) through the package obstore.

obstore is one wheel without dependencies for all three stores. It makes requests in Rust without holding the GIL,
so training does not wait while a thread uploads. Credentials come from the same environment variables as for the
stores' own tools, or from the instance, but not from configuration files.
"""

import io
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from typing import IO, Any, TypeVar

from rollmill.core.errors import StorageError, UsageError
from rollmill.core.installation import install_command

Result = TypeVar("Result")

REQUEST_SECONDS = 120.0
"""Time limit, in seconds, for a request for a small object or for a part of a large one."""
CONNECT_SECONDS = 10.0
RETRIED_SECONDS = 30.0
"""How long obstore itself repeats a failed request, in seconds."""
PATIENCE_SECONDS = 120.0
"""How long reading is retried at the start of a command, in seconds."""
MAX_PAUSE = 20.0
"""Longest pause between two attempts, in seconds."""
NO_BUCKET = "NoSuchBucket"
"""Name of the S3 error for a missing bucket."""


class StoreError(StorageError):
    """Raised if a request to an object store fails."""

    def __init__(self, message: str, *, is_final: bool) -> None:
        super().__init__(message)
        self.is_final = is_final
        """True if another try would fail as well: there is no such bucket, or no right to it."""


class MissingObjectError(StoreError):
    """Raised if an object or its bucket does not exist."""


def check_installed(url: str) -> None:
    """Raises a `UsageError` if the package for object stores is not installed."""
    if find_spec("obstore") is None:
        raise UsageError(f"{url} needs the package obstore. hint: {install_command('store')}")


class ObjectStore:
    """A folder of an object store, at `url`."""

    def __init__(self, url: str) -> None:
        check_installed(url)
        from obstore.store import from_url

        self.url = url
        limits: dict[str, Any] = {"timeout": timedelta(seconds=REQUEST_SECONDS), "allow_http": True}
        limits["connect_timeout"] = timedelta(seconds=CONNECT_SECONDS)
        again = {"max_retries": 3, "retry_timeout": timedelta(seconds=RETRIED_SECONDS)}
        connect: Any = from_url
        with _translate_errors(url):
            self._store = connect(url, client_options=limits, retry_config=again)

    def sizes(self) -> dict[str, int]:
        """Returns the size of each object in bytes, by its name relative to the folder."""
        import obstore

        with _translate_errors(self.url):
            return {each["path"]: each["size"] for page in obstore.list(self._store) for each in page}

    def read(self, name: str) -> bytes:
        """Returns the content of a small object."""
        import obstore

        with _translate_errors(f"{self.url}/{name}"):
            return bytes(obstore.get(self._store, name).bytes())

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yields the content of an object in chunks."""
        import obstore

        with _translate_errors(f"{self.url}/{name}"):
            for chunk in obstore.get(self._store, name).stream():
                yield bytes(chunk)

    def write(self, name: str, content: bytes | IO[bytes]) -> None:
        """Replaces an object atomically, so that readers see either the old or the new content."""
        import obstore

        file = io.BytesIO(content) if isinstance(content, bytes) else content
        with _translate_errors(f"{self.url}/{name}"):
            obstore.put(self._store, name, file)

    def delete(self, name: str) -> None:
        """Deletes an object. Nothing happens if the object does not exist."""
        import obstore

        with _translate_errors(f"{self.url}/{name}"):
            try:
                obstore.delete(self._store, name)
            except FileNotFoundError:
                return


def patiently(action: Callable[[], Result]) -> Result:
    """Returns the result of an action, which is retried for some time if the object store fails."""
    deadline, pause = time.monotonic() + PATIENCE_SECONDS, 0.5
    while True:
        try:
            return action()
        except StoreError as error:
            if error.is_final or time.monotonic() + pause > deadline:
                raise
        time.sleep(pause)
        pause = min(2 * pause, MAX_PAUSE)


@contextmanager
def _translate_errors(url: str) -> Iterator[None]:
    from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

    try:
        yield
    except FileNotFoundError as error:
        raise MissingObjectError(f"{url}: {_missing(error)}.", is_final=True) from error
    except (PermissionDeniedError, UnauthenticatedError) as error:
        raise StoreError(
            f"{url}: access was denied ({_first_line(error)}). hint: set credentials in variables such as "
            "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and GOOGLE_APPLICATION_CREDENTIALS, or use the "
            "credentials of the cloud instance.",
            is_final=True,
        ) from error
    except (BaseError, OSError, ValueError) as error:
        if NO_BUCKET in str(error):
            raise MissingObjectError(f"{url}: {_missing(error)}.", is_final=True) from error
        raise StoreError(f"{url}: {_first_line(error)}.", is_final=isinstance(error, ValueError)) from error


def _missing(error: Exception) -> str:
    return "the bucket does not exist" if NO_BUCKET in str(error) else "the object does not exist"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300].rstrip(".")

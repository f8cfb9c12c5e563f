"""The address on which a server listens, and the token that clients must send."""

import contextlib
import errno
import ipaddress
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from rollmill.core.errors import UsageError

LOOPBACK = "127.0.0.1"
BACKLOG = 1024
MIN_TOKEN_CHARACTERS = 16
MAX_TOKEN_FILE = 4096


@dataclass(frozen=True)
class Address:
    """The address of a server: a host and port, or the path of a Unix socket."""

    host: str = LOOPBACK
    port: int = 0
    path: Path | None = None

    @property
    def local(self) -> bool:
        """True if only processes on this machine can connect to the address."""
        if self.path is not None or self.host == "localhost":
            return True
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return False


def listen(address: Address) -> socket.socket:
    """Returns a socket that listens on an address. A Unix socket can be opened only by this user.

    Raises a `UsageError` if the address is in use, belongs to another machine, or is not permitted.
    """
    shown = str(address.path) if address.path is not None else f"{address.host}:{address.port}"
    try:
        if address.path is not None:
            return _listen_at_path(address.path)
        family = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((address.host, address.port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError, UnicodeError) as error:
        hint = " hint: --port 0 chooses a free port." if getattr(error, "errno", 0) == errno.EADDRINUSE else ""
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot listen at {shown}: {reason}.{hint}") from error
    listener.setblocking(False)
    return listener


def _check_host(address: Address) -> None:
    """Checks that the host is an address or a name that has one, and raises a `UsageError` otherwise."""
    try:
        socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"--host {address.host} is not a valid address: {reason}. hint: use 127.0.0.1 or 0.0.0.0."
        ) from error


def _listen_at_path(path: Path) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise UsageError(f"--socket {path} exists and is not a socket. hint: choose another path.")
        if _is_served(path):
            raise UsageError(f"--socket {path} is used by another server.")
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    umask = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(umask)
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True


def listener_url(listener: socket.socket) -> str:
    """Returns the URL at which clients reach a listening socket."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def read_token(path: Path | None, address: Address) -> bytes | None:
    """Reads the token that clients must send from a file that only its owner can read. Returns None without a
    file.
    """
    if path is None:
        if address.local:
            return None
        _check_host(address)
        raise UsageError(
            f"--host {address.host} can be reached from other machines, so clients must send a token. hint: "
            "create a token with `(umask 077; openssl rand -hex 32 > token)`, and add --token-file token."
        )
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise UsageError(f"--token-file {path} can be read by other users. hint: run `chmod 600 {path}`.")
            token = file.read(MAX_TOKEN_FILE + 1).strip()
    except OSError as error:
        raise UsageError(f"--token-file {path} cannot be read: {error.strerror}.") from error
    printable = all(33 <= byte <= 126 for byte in token)
    if not (MIN_TOKEN_CHARACTERS <= len(token) <= MAX_TOKEN_FILE and printable):
        raise UsageError(
            f"--token-file {path} must contain a single word of {MIN_TOKEN_CHARACTERS} to {MAX_TOKEN_FILE:,} "
            "printable ASCII characters. hint: create a token with `openssl rand -hex 32`."
        )
    return token

"""Clusters that cannot be joined; no Ray is running here."""

import signal
import socket
import sys
import time

import pytest

from rollmill.core.errors import UsageError
from rollmill.processes.cluster.joining import StoppedJoining, _keeping_signals, connect_to_ray

pytest.importorskip("ray", reason="Ray is not installed: pip install 'rollmill[cluster]'")


@pytest.mark.parametrize("prefix", ["", "ray://"])
def test_a_cluster_that_nobody_answers_for_is_refused_at_once(prefix):
    """Ray alone looks for it for minutes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"{prefix}127.0.0.1:{server.getsockname()[1]}"
    began = time.monotonic()
    message = rf"cluster='{address}' cannot be joined: there is no answer at 127.0.0.1:\d+ \(.*refused\)"
    with pytest.raises(UsageError, match=message), connect_to_ray(address, workers=1):
        pass
    assert time.monotonic() - began < 60.0


def test_a_ray_that_cannot_be_imported_is_told_in_a_sentence(monkeypatch, tmp_path):
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text("raise OSError('libstdc++.so.6: version not found')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    message = r"Ray is installed but cannot be imported: OSError: libstdc\+\+.so.6: version not found\nhint: pip"
    with pytest.raises(UsageError, match=message), connect_to_ray("ray", workers=1):
        pass


def test_sigterm_while_ray_starts_ends_with_its_own_code():
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    ours = signal.getsignal(signal.SIGTERM)
    try:
        message = "SIGTERM arrived while this process was joining Ray"
        with pytest.raises(StoppedJoining, match=message) as stopped, _keeping_signals():
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # as Ray's does
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is ours
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM] and stopped.value.exit_code == 143

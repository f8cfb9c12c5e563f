"""Limits of tests on a machine that has other work too."""

import subprocess
import sys
import time

IDLE_SECONDS = 0.05
"""How long an interpreter takes to come and go on an idle machine, at most."""


def scaled(seconds):
    """A limit for this machine as it is just now: as much longer as an interpreter takes longer to come and go.

    On an idle machine that is as it stands; beside other work everything takes longer, what is tested too.
    """
    began = time.monotonic()
    subprocess.run([sys.executable, "-I", "-S", "-c", "pass"], check=True)
    return seconds * max(1.0, (time.monotonic() - began) / IDLE_SECONDS)

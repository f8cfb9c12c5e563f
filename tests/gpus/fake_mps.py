#!/usr/bin/env python3
"""Stands in for `nvidia-cuda-mps-control`: `-f` is a daemon; without it, commands are read from standard input.

A daemon writes its process id into `control` among its pipes, and ends when `quit` is asked for or by SIGTERM.
"""

import os
import signal
import sys
import time
from pathlib import Path


def main() -> int:
    control = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"], "control")
    if sys.argv[1:] == ["-f"]:
        if os.environ.get("FAKE_MPS_FAILS"):
            Path(os.environ["CUDA_MPS_LOG_DIRECTORY"], "control.log").write_text("no such device\n")
            return 1
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        control.write_text(str(os.getpid()))
        while True:
            time.sleep(0.05)
    running = int(control.read_text()) if control.exists() else 0
    alive = running and Path(f"/proc/{running}").exists()
    if not alive:
        print("Cannot find MPS control daemon process")
        return 1
    if sys.stdin.read().strip() == "quit":
        os.kill(running, signal.SIGTERM)
    return 0


if __name__ == "__main__":
    sys.exit(main())

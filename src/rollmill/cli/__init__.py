"""The command `rollmill`."""

from rollmill.cli.main import main

__all__ = ["main"]

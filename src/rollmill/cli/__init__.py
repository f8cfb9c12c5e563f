"""The command-line interface, `rollmill`."""

from rollmill.cli.main import main as main

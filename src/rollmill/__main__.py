"""Entry point of `python -m rollmill`, the same as the command `rollmill`."""

from rollmill.cli import main

main()

"""Entry point of `python -m rollmill`, equivalent to the command `rollmill`."""

from rollmill.cli import main

main()

"""`python -m rollmill` is the command `rollmill`."""

from rollmill.cli import main

main()

"""Entry point of the command `rollmill` and of `python -m rollmill`."""

from rollmill.core.early_interruption import install_early_handler


def main() -> None:
    """Runs `rollmill COMMAND ...`. Ctrl-C ends it with one sentence even while it imports its modules."""
    install_early_handler()
    from rollmill.cli import main as run

    run()


if __name__ == "__main__":
    main()

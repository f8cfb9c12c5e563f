"""The command-line interface, `rollmill`."""

import os

from rollmill.cli.main import main

if os.environ.get("NO_COLOR"):  # see no-color.org; tyro reads its own variable on import
    os.environ["PYTHON_TYRO_ANSI_CODES"] = "False"

__all__ = ["main"]

"""Files of the cache.

`kernels/` holds the source of kernels, `launches/` the fastest launches, `means/` the fastest ways to take means.
"""

import os
import tempfile
from pathlib import Path


def write_once(file: Path, text: str) -> None:
    """Writes a file, whole or not at all, unless it is there."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".part", delete=False) as part:
            part.write(text)
        os.replace(part.name, file)

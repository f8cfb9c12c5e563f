"""A process that runs pages of the manual."""

import json
import os
import subprocess
import sys

import pytest

from manual.snippets import ROOT


@pytest.fixture(scope="session")
def run_page(tmp_path_factory):
    """`run_page("docs/tutorial.md", slow=False)`: what went wrong, what was printed, and seconds by snippet."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "manual.runner"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )

    def run(page: str, *, slow: bool) -> dict:
        folder = tmp_path_factory.mktemp("page")
        process.stdin.write(json.dumps({"page": page, "folder": str(folder), "slow": slow}) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    with process:
        yield run
        process.stdin.close()

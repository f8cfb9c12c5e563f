"""The page on profiling: its code runs as it stands, and its table names the options."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from rollmill.cli.profile import Profiling

PAGE = (Path(__file__).parents[2] / "docs/profiling.md").read_text()


def test_the_code_runs_as_it_stands(capsys):
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S):
        exec(block, {})
    assert "0.6" in capsys.readouterr().out


@pytest.mark.parametrize("name", [field.name for field in fields(Profiling)])
def test_each_option_is_in_the_table(name):
    assert re.search(rf"^\| `--{name.replace('_', '-')}\b", PAGE, re.M)

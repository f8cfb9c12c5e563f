"""The API reference names what there is, and all that a user imports."""

import re
from importlib import import_module
from pathlib import Path

import pytest

import rollmill

REFERENCE = Path(__file__).parents[2] / "docs/reference"
ENTRY = re.compile(r"^::: (\S+)(?:\n +options:\n +members: \[(.*)\])?", re.M)


def entries():
    found = [entry for page in REFERENCE.glob("*.md") for entry in ENTRY.findall(page.read_text())]
    return {module: [name.strip() for name in members.split(",") if name] for module, members in found}


@pytest.mark.parametrize("name", rollmill.__all__)
def test_every_public_name_is_in_the_reference(name):
    public = getattr(rollmill, name)
    members = entries()[public.__module__]
    assert name in members or not members


def test_what_the_reference_names_is_there_and_documented():
    assert len(entries()) > 15
    for module, members in entries().items():
        loaded = import_module(module)
        assert all(getattr(loaded, name).__doc__ for name in members)

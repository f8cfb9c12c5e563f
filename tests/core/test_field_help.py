"""`help` of a configuration explains its fields."""

import dataclasses
import inspect

import pytest

import rollmill

EXPLAINED = [name for name in rollmill.__all__ if name.endswith(("Config", "Options"))]


@pytest.mark.parametrize("name", EXPLAINED)
def test_every_field_is_explained(name):
    kind = getattr(rollmill, name)
    text = inspect.getdoc(kind)
    assert [field.name for field in dataclasses.fields(kind) if f"\n    {field.name}" not in text] == []
    assert "Annotated" not in str(inspect.signature(kind))


def test_an_entry_has_default_and_meaning():
    text = inspect.getdoc(rollmill.PPOConfig)
    assert text.startswith("Hyperparameters of PPO, named as in the literature.\n\nAttributes:\n")
    assert "\n    gamma (default 0.99): Discount factor.\n" in text

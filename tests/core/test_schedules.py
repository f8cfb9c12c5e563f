"""Schedules as text: their values, and texts that are none."""

import numpy as np
import pytest

from rollmill.algorithms.ppo import PPOConfig
from rollmill.core.errors import CheckpointError
from rollmill.core.schedules import parse_schedule
from rollmill.runs.specification import config_from_json
from wordings import raises

AT = [-0.5, 0.0, 0.25, 0.5, 1.0, 2.0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("constant:0.5", [0.5] * 6),
        ("linear:1:0", [1, 1, 0.75, 0.5, 0, 0]),
        ("linear:1e-4:2e-4", [1e-4, 1e-4, 1.25e-4, 1.5e-4, 2e-4, 2e-4]),
        ("cosine:1:0", [1, 1, 0.5 + 0.5 * np.cos(np.pi / 4), 0.5, 0, 0]),
        ("cosine:2:1", [2, 2, 1.5 + 0.5 * np.cos(np.pi / 4), 1.5, 1, 1]),
    ],
)
def test_values_between_beginning_and_end(text, expected):
    schedule = parse_schedule("learning_rate", text)
    np.testing.assert_allclose([schedule.at(part) for part in AT], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "text", ["", "linear", "linear:1", "linear:1:2:3", "linaer:1:0", "cosine:a:0", "constant:"]
)
def test_other_texts_are_named_with_the_forms(text):
    with raises("expected-number", "a schedule: constant:VALUE, linear:FIRST:LAST or cosine:FIRST") as caught:
        parse_schedule("learning_rate", text)
    assert f"learning_rate={text!r}" in str(caught.value)


@pytest.mark.parametrize("text", ["x", "nan", "linear:1"])
def test_a_saved_text_that_is_no_schedule_is_named_with_its_file(text):
    message = f'^config.json: graph.config.learning_rate="{text}" must be a number or a schedule: constant'
    with pytest.raises(CheckpointError, match=message):
        config_from_json(PPOConfig, {"learning_rate": text}, where="config.json", field="graph.config")


@pytest.mark.parametrize("rate", [0.1, "linear:1:0"])
def test_saved_numbers_and_schedules_are_read(rate):
    assert config_from_json(PPOConfig, {"learning_rate": rate}).learning_rate == rate


def test_a_saved_number_out_of_bounds_is_named_with_its_file():
    message = r"^config.json: graph.config.gamma=1.5 must lie between 0 and 1\.$"
    with pytest.raises(CheckpointError, match=message):
        config_from_json(PPOConfig, {"gamma": 1.5}, where="config.json", field="graph.config")

"""Schedules as text: their values, and texts that are none."""

import numpy as np
import pytest

from rollmill.core.errors import UsageError
from rollmill.core.schedules import parse_schedule

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
    with pytest.raises(
        UsageError, match="a schedule: constant:VALUE, linear:FIRST:LAST or cosine:FIRST"
    ) as caught:
        parse_schedule("learning_rate", text)
    assert f"learning_rate={text!r}" in str(caught.value)

"""Memory of compiled programs by operation, when it is fullest."""

import json
from dataclasses import asdict

import jax
import jax.numpy as jnp
import pytest

from profiling.by_hand import profile
from rollmill.core.operations import traced
from rollmill.profiling.hlo import read_instructions
from rollmill.profiling.peak_memory import bytes_when_fullest
from rollmill.profiling.protobuf import fields_of, number_in, numbers_in
from rollmill.profiling.report.html import profile_page
from rollmill.profiling.report.terminal import draw_profile
from rollmill.profiling.results import read_profile

SIDE = 512
MATRIX = 4 * SIDE * SIDE


def work(x):
    """Matrices of the policy and of gradients, of which at least two are there at once."""
    with traced("policy"):
        first = jnp.sort(jnp.outer(x, x), axis=0)
        second = jnp.sort(jnp.flip(first, 1), axis=1)
    with traced("gradients"):
        return jnp.sort(second.T @ second, axis=0).sum()


@pytest.fixture(scope="module")
def found():
    compiled = jax.jit(work).lower(jnp.linspace(0.0, 1.0, SIDE)).compile()
    module = compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
    stats = compiled.memory_analysis()
    instructions = read_instructions(compiled.as_text())
    return bytes_when_fullest(stats.serialized_buffer_assignment_proto, module, instructions), stats


def test_temporary_memory_is_divided_among_the_operations_that_write_it(found):
    by_operation, stats = found
    assert sum(by_operation.values()) == pytest.approx(stats.temp_size_in_bytes, rel=0.01)
    assert by_operation["policy",] >= MATRIX
    assert set(by_operation) <= {("policy",), ("gradients",), ()}


def test_a_compiler_that_does_not_say_what_is_live():
    assert bytes_when_fullest(b"", b"", {}) == {}


def test_fields_of_protocol_buffers_are_read():
    message = b"\x08\x96\x01" + b"\x12\x03abc" + b"\x19" + bytes(8) + b"\x25" + bytes(4) + b"\x2a\x02\x05\x06"
    assert list(fields_of(message)) == [(1, 150), (2, b"abc"), (3, bytes(8)), (4, bytes(4)), (5, b"\x05\x06")]
    assert number_in(message, 1) == 150 and number_in(message, 9) == 0
    assert list(numbers_in(message, 5)) == [5, 6] and list(numbers_in(message, 1)) == [150]


def test_reports_tell_it():
    by_hand = profile()
    assert "learn / gradients 180 MiB" in " ".join(draw_profile(by_hand, width=140).split())
    assert "learn / gradients" in profile_page(by_hand)
    assert read_profile(json.dumps(asdict(by_hand)), where="here") == by_hand

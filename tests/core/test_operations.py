"""Names of operations, in traced code and on the host."""

import jax
import jax.numpy as jnp
import pytest

import rollmill
from rollmill.core.operations import operation, set_recording, span
from rollmill.profiling.hlo_text import operations_in
from wordings import raises


def test_an_operation_names_the_instructions_that_are_traced_in_it():
    def function(x):
        with operation("collisions"), operation("walls"):
            return jnp.sort(x)

    text = jax.jit(function).lower(jnp.ones(8)).compile().as_text()
    assert any(operations_in(line) == ("collisions", "walls") for line in text.splitlines())


def test_an_operation_changes_no_number_and_no_fingerprint():
    plain = jax.make_jaxpr(lambda x: jnp.sin(x))(1.0)

    def named(x):
        with operation("sine"):
            return jnp.sin(x)

    assert str(jax.make_jaxpr(named)(1.0)) == str(plain)


@pytest.mark.parametrize("name", ["", "a/b", "a:b", 'a"b', "a(b)"])
def test_names_that_traces_cannot_hold_are_refused(name):
    with raises("operation-name-is-text-is"):
        operation(name)


def test_spans_are_recorded_only_while_a_profiler_asks():
    assert span("a") is span("b"), "nothing is made"
    set_recording(True)
    try:
        assert isinstance(span("a"), jax.profiler.TraceAnnotation)
    finally:
        set_recording(False)


def test_it_is_public():
    assert rollmill.operation is operation

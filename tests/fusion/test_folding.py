"""Known numbers in a step are folded by NumPy, to the bits that XLA computes, without a program for each."""

import jax
import numpy as np
import pytest
from jax import lax

import rollmill
from rollmill.fusion.kernels.rollout import lower_rollout
from rollmill.fusion.lower import jaxpr

FLOATS = np.float32([0.0, -0.0, 1.5, np.inf, -np.inf, 2.0**-20, -3e38, 2.0**24 + 1, 1.2e-38, 1 / 3])
WHOLE = np.int32([0, 1, -1, 2**31 - 1, -(2**31), 2**24 + 1, 7, 8, 9, 10])
ARRAYS = [FLOATS, WHOLE, WHOLE.astype(np.uint32), WHOLE > 0]
CAST = {"new_dtype": np.dtype("float32"), "weak_type": False, "sharding": None}


@pytest.mark.parametrize("name", [*jaxpr.EXACT, "convert_element_type"])
def test_numbers_are_folded_to_the_bits_of_xla(name):
    primitive, folded = getattr(lax, f"{name}_p"), 0
    options = CAST if name == "convert_element_type" else {}
    for array in ARRAYS:
        for number in array:
            others = () if options or name == "neg" else (array,)
            operands = (np.full_like(array, number), *others)
            try:
                program = jax.make_jaxpr(lambda *args: primitive.bind(*args, **options))(*operands)
            except TypeError:  # not of this type
                break
            for place in range(len(array) if program.eqns else 0):
                one = [operand[place : place + 1] for operand in operands]
                known = jaxpr._by_numpy(program.eqns[0].replace(outvars=_of_one(program)), one)
                if known is not None:
                    folded += 1
                    with np.errstate(all="ignore"):
                        expected = np.asarray(primitive.bind(*one, **options))
                    assert (known.dtype, known.tobytes()) == (expected.dtype, expected.tobytes()), one
    assert folded


def _of_one(program):
    (result,) = program.jaxpr.outvars
    return [type(result)(result.aval.update(shape=(1,)))]


def test_subnormal_numbers_and_nans_are_left_to_xla():
    for number in (1e-40, np.nan):
        array = np.float32([number])
        program = jax.make_jaxpr(lambda x: lax.add(x, x))(array)
        assert jaxpr._by_numpy(program.eqns[0], [array, array]) is None


def test_a_step_is_lowered_without_a_program_for_each_number():
    compiled = []

    def hear(event, seconds, fun_name="", **_):
        compiled.extend([fun_name] if "jaxpr_to_mlir" in event else [])

    graph = rollmill.ppo("CartPole-v1")
    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(hear)
    try:
        lower_rollout(graph)
    finally:
        jax.monitoring.unregister_event_duration_listener(hear)
    assert [name for name in compiled if "iota_2x32_shape" not in name] == []

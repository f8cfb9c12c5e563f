"""A program that draws random numbers, and that two processes store and load."""

import jax
import numpy as np

from rollmill.programs.program_store import StorableProgram


def made():
    """The program, of a key's two words."""
    draw = lambda words: jax.random.normal(jax.random.wrap_key_data(words), (5,))
    result = jax.ShapeDtypeStruct((5,), np.float32)
    return StorableProgram("draws", draw, [jax.ShapeDtypeStruct((2,), np.uint32)], lambda: result, {})

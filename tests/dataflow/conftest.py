"""Small programs that run for a moment cost less where XLA does not optimise them."""

import jax
import pytest


@pytest.fixture(scope="module")
def fast_compilation():
    """For modules that compile much and run little: `pytestmark = pytest.mark.usefixtures(...)`."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)

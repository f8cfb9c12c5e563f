"""Strict JAX while testing: no silent promotion, shapes checked at public boundaries."""

import os
import tempfile

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
os.environ.setdefault("ROLLMILL_STATE_DIR", tempfile.mkdtemp(prefix="rollmill-tests-"))  # not the user's own

import jax  # noqa: E402
import pytest  # noqa: E402
from jaxtyping import install_import_hook  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
install_import_hook("rollmill", "beartype.beartype")


@pytest.fixture(scope="module")
def fast_compilation():
    """For modules that compile much and run little: `pytestmark = pytest.mark.usefixtures(...)`.

    Small programs that run for a moment cost less where XLA does not optimise them.
    """
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)

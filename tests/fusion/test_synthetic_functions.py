"""Every primitive that has a rule, in functions of one environment, against the same functions under `vmap`."""

import jax
import jax.numpy as jnp
import pytest
from code_runs import evaluate_by_code
from fused_runs import assert_same, both
from kernel_runs import zeros_by_kernel
from synthetic_functions import FUNCTIONS

from rollmill.fusion import evaluate
from wordings import raises

LONG = ("convolutions", "odd_convolutions", "convolution_layers", "deep_rows", "distributions")
CODED = [
    pytest.param(name, marks=pytest.mark.slow if name in LONG else ())
    for name in FUNCTIONS
    if name != "short_floats"
]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "distributions" else ()) for name in FUNCTIONS]
)
@pytest.mark.slow_beyond(10)
def test_as_under_vmap(name):
    function, uniform, each = FUNCTIONS[name]
    assert_same(*both(function, each, uniform))


@pytest.mark.parametrize("name", CODED)
@pytest.mark.slow_beyond(8)
def test_machine_code_as_under_vmap(name):
    function, uniform, each = FUNCTIONS[name]
    assert_same(*both(function, each, uniform, evaluate=evaluate_by_code))


def test_machine_code_says_what_it_lacks():
    function, uniform, each = FUNCTIONS["short_floats"]
    with raises("there-is-no-machine-code", "bfloat16"):
        both(function, each, uniform, evaluate=evaluate_by_code)


@pytest.mark.parametrize("way", [evaluate, evaluate_by_code])
def test_products_of_booleans_are_conjunctions_and_sums_disjunctions(way):
    """A graph's neighbours of neighbours: two products that are true leave a sum that is true."""

    def products(shared, links, long):
        known = jnp.eye(4, dtype=bool)[::-1]
        return [
            links @ links,
            links[0] @ links,
            jnp.dot(links[0], links[1]),
            jnp.outer(links[0], links[1]) @ links,
            links @ known,
            known @ links,
            links @ shared,
            jnp.dot(long, long),
            long @ long[:, None],
            jnp.einsum("bi,bij->bj", links, jnp.stack([links] * 4)),
        ]

    each = [jax.random.bernoulli(jax.random.key(n), 0.5, (8, *shape)) for n, shape in enumerate([(4, 4), (80,)])]
    shared = jax.random.bernoulli(jax.random.key(2), 0.5, (4, 3))
    assert_same(*both(products, each, [shared], evaluate=way))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset")
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "distributions"])  # takes minutes
def test_kernels_compile_for_a_gpu_that_is_not_here(name, tmp_path, monkeypatch):
    """Whether they compute the same is asked of a GPU by benchmarks/fusion_parity.py --functions."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'rollmill[fusion]'")
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path))
    function, uniform, each = FUNCTIONS[name]
    both(function, each, uniform, evaluate=zeros_by_kernel)

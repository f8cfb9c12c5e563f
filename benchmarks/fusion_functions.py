"""Whether kernels compute every primitive that has a rule as XLA does, on one GPU.

    python benchmarks/fusion_functions.py

The functions are those that the tests run by JAX and as machine code (tests/fusion/synthetic_functions.py): each
under `vmap`, and as a kernel with exact products. Integers, flags and random bits are compared exactly, floats to
a relative 1e-5 (or an absolute 1e-6); the result says which share of the numbers differs.
Writes results/fusion-functions.json.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from measure import RESULTS, write_result

TESTS = Path(__file__).parents[1] / "tests" / "fusion"


def unequal(one: Any, other: Any) -> float:
    """The share of numbers that differ."""
    if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
        one, other = jax.random.key_data(one), jax.random.key_data(other)
    if not jnp.issubdtype(one.dtype, jnp.floating):
        return float(np.mean(np.asarray(one) != np.asarray(other)))
    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    return float(np.mean(~np.isclose(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=Path, default=TESTS)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    sys.path.insert(0, str(options.tests))
    from fused_runs import both
    from kernel_runs import evaluate_by_kernel
    from synthetic_functions import FUNCTIONS

    found: dict[str, Any] = {}
    for name, (function, uniform, each) in FUNCTIONS.items():
        with jax.default_matmul_precision("highest"):
            fused, plain = both(function, each, uniform, evaluate=evaluate_by_kernel)
        pairs = list(zip(jax.tree.leaves(fused), jax.tree.leaves(plain), strict=True))
        shares = {n: unequal(*pair) for n, pair in enumerate(pairs) if pair[0].size}
        numbers = sum(int(one.size) for one, _ in pairs)
        found[name] = {"numbers": numbers, "unequal": {n: share for n, share in shares.items() if share}}
        print(name, "differs in", found[name]["unequal"] or "nothing", flush=True)
        write_result("fusion-functions", {"functions": found}, directory=options.output)


if __name__ == "__main__":
    main()

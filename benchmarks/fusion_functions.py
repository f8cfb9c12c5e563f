"""Whether kernels compute every primitive that has a rule as XLA does, on one GPU.

    python benchmarks/fusion_functions.py

The functions are those that the tests run by JAX and as machine code (tests/fusion/synthetic_functions.py): each
under `vmap`, and as a kernel with exact products. Integers, flags and random bits are compared exactly, floats to
a relative 1e-5 (or an absolute 1e-6); the result says which share of the numbers differs. XLA is told to round to
16 bits where a function says so, which it else leaves out as it likes.
Writes results/fusion-functions.json.
"""

import argparse
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from fusion_parity import readable, unequal
from measure import RESULTS, write_result

TESTS = Path(__file__).parents[1] / "tests" / "fusion"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=Path, default=TESTS)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    sys.path.insert(0, str(options.tests))
    from fused_runs import both
    from kernel_runs import evaluate_by_kernel
    from synthetic_functions import FUNCTIONS

    def compare(name: str) -> dict[str, Any]:
        function, uniform, each = FUNCTIONS[name]
        with jax.default_matmul_precision("highest"):
            fused, plain = both(function, each, uniform, evaluate=evaluate_by_kernel)
        arrays = lambda tree: [np.asarray(readable(leaf)) for leaf in jax.tree.leaves(tree)]
        pairs = list(zip(arrays(fused), arrays(plain), strict=True))
        shares = {n: unequal(*pair) for n, pair in enumerate(pairs) if pair[0].size}
        found = {n: share for n, share in shares.items() if share}
        print(name, "differs in", found or "nothing", flush=True)
        return {"numbers": sum(int(one.size) for one, _ in pairs), "unequal": found}

    with ThreadPoolExecutor() as pool:
        found = dict(zip(FUNCTIONS, pool.map(compare, FUNCTIONS), strict=True))
    write_result("fusion-functions", {"functions": found}, directory=options.output)


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_allow_excess_precision=false"
    main()

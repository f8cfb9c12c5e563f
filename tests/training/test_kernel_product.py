"""Every algorithm with kernels under every placement: XLA's weights, and the same bits after a kill.

The cells are those of `benchmarks/fusion_product.py`, which makes the table of docs/fusion.md.
"""

import functools
import itertools
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

pytest.importorskip("llvmlite", reason="llvmlite is not installed: pip install 'rollmill[fusion]'")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import fusion_product as product  # noqa: E402
from measure import read_result  # noqa: E402

import rollmill  # noqa: E402
from rollmill.policies.policies import load_weights  # noqa: E402

HALF = product.ITERATIONS // 2
KEPT = {"checkpoint_iterations": HALF, "keep_last": product.ITERATIONS}


@functools.cache
def graph_of(algorithm):
    return product.graph_of(algorithm)


@functools.cache
def references_of(algorithm):
    return product.References(graph_of(algorithm))


def weights_of(folder, place):
    """All weights of a run of every seed."""
    seeds = range(product.OPTIONS["seed"], product.OPTIONS["seed"] + product.PLACES[place].get("num_seeds", 1))
    return [load_weights(folder, seed=seed).weights for seed in seeds]


def killed_midway(folder, into):
    """The run, or the runs of its seeds, as a kill leaves it before its last checkpoint."""
    shutil.copytree(folder, into)
    for last in into.rglob(f"checkpoints/{product.ITERATIONS}"):
        shutil.rmtree(last)
    for summary in into.rglob("summary.json"):
        summary.unlink()
    return into


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "place"), list(itertools.product(product.ALGORITHMS, product.PLACES)))
def test_kernels_learn_what_xla_learns_and_go_on_after_a_kill(algorithm, place, tmp_path):
    chosen = {**product.PLACES[place], "fusion": "full"}
    run = rollmill.train(graph_of(algorithm), run_dir=tmp_path / "run", **chosen, **product.OPTIONS, **KEPT)
    weights = weights_of(run.directory, place)
    assert not product.missing_kernels(graph_of(algorithm), run.directory, chosen)
    assert references_of(algorithm).compared(place, weights)[1] <= 1
    again = rollmill.resume(killed_midway(run.directory, tmp_path / "killed"), quiet=True)
    for mine, right in zip(weights_of(again.directory, place), weights, strict=True):
        pairs = zip(jax.tree.leaves(mine), jax.tree.leaves(right), strict=True)
        assert all(np.array_equal(a, b) for a, b in pairs)


def test_no_cell_of_the_table_is_wrong():
    cells = [cell for row in read_result("fusion-product").values() for cell in row.values()]
    assert sum(cell.get("full", {}).get("outcome") == "equal" for cell in cells) >= 35
    assert not [each for cell in cells for each in cell.values() if each["outcome"] == "wrong"]

"""Every algorithm with kernels under every placement: XLA's weights, and the same bits after a kill.

The cells are those of `benchmarks/fusion_product.py`, which makes the table of docs/fusion.md.
"""

import functools
import itertools
import sys
from pathlib import Path

import pytest

pytest.importorskip("llvmlite", reason="llvmlite is not installed: pip install 'rollmill[fusion]'")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import fusion_product as product  # noqa: E402
from measure import read_result  # noqa: E402

import rollmill  # noqa: E402


@functools.cache
def graph_of(algorithm):
    return product.graph_of(algorithm)


@functools.cache
def references_of(algorithm):
    return product.References(graph_of(algorithm))


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "place"), list(itertools.product(product.ALGORITHMS, product.PLACES)))
def test_kernels_learn_what_xla_learns_and_go_on_after_a_kill(algorithm, place, tmp_path):
    chosen = {**product.PLACES[place], "fusion": "full"}
    run = rollmill.train(
        graph_of(algorithm), run_dir=tmp_path / "run", **chosen, **product.OPTIONS, **product.KEPT
    )
    weights = product.weights_of(run.directory, chosen)
    assert not product.missing_kernels(graph_of(algorithm), run.directory, chosen)
    assert references_of(algorithm).compared(place, weights)[1] <= 1
    assert product.resumes_alike(run.directory, chosen)


def test_no_cell_of_the_table_is_wrong():
    cells = [cell for row in read_result("fusion-product").values() for cell in row.values()]
    assert sum(cell.get("full", {}).get("outcome") == "equal" for cell in cells) >= 35
    assert not [each for cell in cells for each in cell.values() if each["outcome"] == "wrong"]

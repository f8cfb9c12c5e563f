"""`help` on a graph says which fields are required, what the others default to, and what each one is."""

import pydoc

from rollmill.core.options import field_docs
from rollmill.dataflow import Graph


def test_every_field_of_a_graph_has_a_docstring_of_its_own():
    assert set(field_docs(Graph)) == set(Graph._fields)
    text = pydoc.plain(pydoc.render_doc(Graph))
    assert "Alias for field number" not in text
    assert "condition (required): `(minibatch, reduce) -> minibatch`" in " ".join(text.split())
    assert "keep_learning (default None):" in text
    assert Graph.condition.__doc__.startswith("`(minibatch, reduce) -> minibatch`")
    for name in Graph._fields:
        required = name not in Graph._field_defaults
        assert (f"{name} (required):" in text) == required

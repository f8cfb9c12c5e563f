"""`help` on a graph says which fields are required, what the others default to, and what each one is.

The representation of a graph is short, and methods of models in other libraries are explained.
"""

import pydoc

import pytest

import rollmill
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


def test_the_representation_of_a_graph_names_the_algorithm_the_environment_and_the_sizes():
    graph = rollmill.ppo("CartPole-v1", num_envs=8, num_steps=16)
    assert repr(graph) == "Graph(algorithm='ppo', environment='CartPole-v1', num_envs=8, num_steps=16)"


@pytest.mark.parametrize(
    ("method", "hint"), [("learn", r"rollmill\.train\(algorithm\)"), ("predict", r"rollmill\.load\(run\)")]
)
def test_methods_of_models_in_other_libraries_are_explained(method, hint):
    graph = rollmill.ppo("CartPole-v1", num_envs=8, num_steps=16)
    with pytest.raises(AttributeError, match=f"no attribute '{method}'. hint: .*{hint}"):
        getattr(graph, method)
    assert not hasattr(graph, "nothing")

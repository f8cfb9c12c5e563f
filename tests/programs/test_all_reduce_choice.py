"""How a mesh takes means: as it is asked to, or by the fastest way, which is found once."""

import jax
import pytest

import rollmill
from rollmill.programs import all_reduce_choice
from rollmill.programs.all_reduce_choice import choose_all_reduce
from rollmill.programs.meshes import mesh_of
from wordings import raises

GRAPH = rollmill.ppo("CartPole-v1", num_envs=4, num_steps=4, num_minibatches=2)
TWO = mesh_of(jax.devices()[:2])


@pytest.fixture
def times(monkeypatch, tmp_path):
    """The times of two ways, which are measured as often as the list grows."""
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(all_reduce_choice, "algorithms_for", lambda mesh, num_parameters: ["flat", "hierarchical"])
    measured = []

    def measure(mesh, elements, means):
        measured.append(elements)
        return {"flat": 2e-5, "hierarchical": 1e-5}

    monkeypatch.setattr(all_reduce_choice, "time_reductions", measure)
    return measured


def test_one_device_and_devices_of_a_cpu_have_no_choice():
    for mesh in (mesh_of(jax.devices()[:1]), TWO):
        chosen = choose_all_reduce(GRAPH, mesh, "auto")
        assert chosen.way is None and not chosen.notes


def test_the_fastest_way_is_found_once(times):
    chosen = choose_all_reduce(GRAPH, TWO, "auto")
    parameters = f"{times[0]:,}"
    assert chosen.way == "hierarchical"
    assert chosen.notes == [
        f"the mean of {parameters} parameters takes flat 20 us, hierarchical 10 us: hierarchical"
    ]
    again = choose_all_reduce(GRAPH, TWO, "auto")
    assert again.way == "hierarchical" and again.notes[0].endswith("the fastest way in an earlier measurement")
    assert len(times) == 1
    larger = rollmill.ppo("CartPole-v1", num_envs=4, num_steps=4, num_minibatches=2, network="mlp")
    choose_all_reduce(larger, mesh_of(jax.devices()[:2], instances=2), "auto")
    assert len(times) == 2, "on another mesh"


def test_a_way_whose_means_are_wrong_is_named(times, monkeypatch):
    wrong = {"flat": 2e-5, "hierarchical": float("inf")}
    monkeypatch.setattr(all_reduce_choice, "time_reductions", lambda *given: wrong)
    chosen = choose_all_reduce(GRAPH, TWO, "auto")
    assert chosen.way == "flat" and chosen.notes[0].endswith("flat 20 us, hierarchical is wrong: flat")


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("one-shot", ("reduction-was-asked-for-or", "one-shot", "needs GPUs")),
        ("host", ("reduction-host-is-for-several",)),
    ],
)
def test_a_way_that_cannot_be_had_is_refused(way, message):
    with raises(*message):
        choose_all_reduce(GRAPH, TWO, way)

"""Candidates of a machine: what there is, in which order, and the command that carries each out."""

import pytest

from rollmill.plan_search.search.candidate import Candidate, select_candidates
from rollmill.plan_search.search.enumeration import candidates, most_stepping, widths_up_to
from rollmill.plan_search.search.machine import Machine, Workload

TWO_CORES = Machine(2)
WORK = Workload(num_envs=64, num_steps=32, updates=16)


def test_widths_are_powers_of_two_and_the_most_there_is():
    assert [widths_up_to(most) for most in (0, 1, 2, 6, 8)] == [[], [1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_on_two_cores_every_way_to_use_them_is_listed_once():
    found = candidates(TWO_CORES, WORK)
    assert len(found) == len(set(found)) == 18
    assert [str(each) for each in found[:4]] == [
        "gpu-only (program) fusion=off",
        "gpu-only (program) fusion=full",
        "gpu-only (program) fusion=off devices=2",
        "gpu-only (program) fusion=full devices=2",
    ]
    assert {each.distribution for each in found} == {
        "gpu-only", "single-learner-coarse", "single-learner-fine", "multi-learner", "environments", "central"
    }  # fmt: skip
    assert all(each.instances == 1 and each.gpus == 0 and each.num_envs is None for each in found)


def test_environments_of_python_are_stepped_by_processes_alone():
    found = candidates(TWO_CORES, WORK.__class__(**{**vars(WORK), "on_host": True}))
    assert {each.place for each in found} == {"processes"}
    assert len(found) == len(set(found)) == 10


@pytest.mark.parametrize(
    ("changes", "memory", "most"),
    [
        ({"waiting": 0.1}, None, 2),  # 2 cores; so little may be noise
        ({"waiting": 0.75}, None, 8),  # 2 / (1 - 0.75)
        ({"waiting": 0.75, "num_envs": 6}, None, 6),
        ({"waiting": 1.0}, None, 16),  # 8 for each core
        ({"waiting": 1.0}, 2 * 10**9, 5),  # of 400 MB each
        ({"waiting": 1.0}, 10**8, 2),
        ({"waiting": 1.0, "on_host": False}, None, 2),
    ],
)
def test_more_processes_than_cores_step_environments_that_wait(changes, memory, most):
    machine, work = Machine(2, memory), WORK.__class__(**{**vars(WORK), "on_host": True} | changes)
    assert most_stepping(machine, work) == most
    found = candidates(machine, work)
    widest = max(each.actors or each.workers or 1 for each in found)
    assert widest == most and len(found) == len(set(found))
    asynchronous = candidates(machine, work.__class__(**{**vars(work), "asynchronous": True}))
    assert max(each.actors or 1 for each in asynchronous) == most


def test_the_most_processes_are_tried_first_where_environments_wait():
    """A budget of seconds reaches the first few candidates alone."""
    found = candidates(TWO_CORES, WORK.__class__(**{**vars(WORK), "on_host": True, "waiting": 0.75}))
    assert [str(each) for each in found[:6]] == [
        "single-learner-coarse actors=8",
        "gpu-only learners=1",
        "environments workers=8 actors=1",
        "single-learner-coarse actors=4",
        "environments workers=4 actors=1",
        "single-learner-coarse actors=1",
    ]


def test_several_seeds_are_trained_in_one_program():
    found = candidates(TWO_CORES, Workload(64, 32, 16, num_seeds=4))
    assert {(each.place, each.devices, each.fusion) for each in found} == {
        ("program", devices, fusion) for devices in (1, 2) for fusion in ("off", "full")
    }


def test_actors_go_on_with_older_weights_only_if_the_user_lets_them():
    assert not any(each.asynchronous for each in candidates(TWO_CORES, WORK))
    found = candidates(TWO_CORES, Workload(64, 32, 16, asynchronous=True))
    assert found
    assert all(each.asynchronous for each in found)


def test_a_batch_that_may_grow_is_tried_at_its_own_size_first():
    narrow = candidates(TWO_CORES, WORK)
    found = candidates(TWO_CORES, WORK, "grow-batch")
    assert len(found) == 11 * len(narrow)
    assert [each.num_envs for each in found[:8]] == [64] * 4 + [128] * 4
    grown = [each for each in found if each.fusion in ("off", "full")]
    assert found[: len(grown)] == grown  # to their end, before others are tried
    assert {each.num_envs for each in found[len(grown) :][: len(narrow) - 4]} == {64}
    assert found[-1].num_envs == 64 * 2**10


def test_gpus_are_shared_by_instances_where_they_can_be():
    machine = Machine(32, gpus_per_host=2, gpu_memory=10**11, max_instances=4)
    meshes = [each for each in candidates(machine, WORK) if each.place == "mesh"]
    assert [(each.gpus, each.instances, each.learners) for each in meshes] == [
        (2, 1, 2), (2, 2, 4), (2, 4, 8)
    ]  # fmt: skip
    assert meshes[-1].words == ("--distribution", "gpu-only", "--place", "mesh", "--learners", "8")
    found = candidates(machine, WORK)
    assert len({each.words for each in found}) == len(found)  # each is another command
    with_actors = [index for index, each in enumerate(found) if each.actors]
    assert found.index(meshes[0]) < with_actors[0] < found.index(meshes[1])
    assert str(found[with_actors[0]]) == "single-learner-coarse actors=16 actors_on=cpu"  # half of the cores
    assert found.index(meshes[-1]) < with_actors[1]
    apart = [(each.actors, each.actors_on) for each in found if each.distribution == "single-learner-coarse"]
    assert apart[1:4] == [(1, "gpu"), (2, "gpu"), (4, "gpu")] and (32, "cpu") in apart
    assert all(each.instances == 1 for each in candidates(Machine(32, gpus_per_host=2), WORK))


@pytest.mark.parametrize(
    ("candidate", "words", "processes", "ranks"),
    [
        (Candidate(), "--distribution gpu-only --place program", 1, 1),
        (
            Candidate(devices=2, fusion="full", num_envs=128),
            "--distribution gpu-only --place program --devices 2 --fusion full --num-envs 128",
            1,
            2,
        ),
        (Candidate(place="mesh", learners=2), "--distribution gpu-only --place mesh --learners 2", 3, 2),
        (
            Candidate("central", "processes", actors=4, asynchronous=True),
            "--distribution central --place processes --actors 4 --asynchronous",
            6,
            4,
        ),
    ],
)
def test_a_candidate_is_carried_out_by_the_ordinary_command(candidate, words, processes, ranks):
    assert " ".join(candidate.words) == words
    assert (candidate.processes, candidate.ranks) == (processes, ranks)


def test_values_that_the_user_has_chosen_narrow_the_list():
    found = select_candidates(candidates(TWO_CORES, WORK), {"distribution": "gpu-only", "fusion": "off"})
    assert [(each.place, each.devices, each.learners) for each in found] == [
        ("program", 1, None),
        ("program", 2, None),
        ("processes", 1, 2),
    ]


def test_processes_and_a_mesh_choose_their_own_depth_and_processes_may_fuse_nothing():
    found = candidates(TWO_CORES, WORK)
    places = {
        fusion: {each.place for each in select_candidates(found, {"fusion": fusion})} for fusion in ("off", "full")
    }
    assert places == {"off": {"program", "processes"}, "full": {"program"}}
    assert {each.place for each in select_candidates(found, {"fusion": "auto"})} == {
        "program",
        "processes",
        "mesh",
    }
    unfused = select_candidates(found, {"fusion": "off"})
    assert {each.fusion for each in unfused} == {"off"} and all(
        "--fusion off" in " ".join(e.words) for e in unfused
    )


def test_a_branch_holds_all_but_its_width():
    narrow, wide = Candidate(devices=1, gpus=1, fusion="full"), Candidate(devices=4, gpus=4, fusion="full")
    assert narrow.branch("devices") == wide.branch("devices")
    assert narrow.branch("num_envs") != wide.branch("num_envs")
    one, four = (Candidate(place="mesh", learners=2 * i, gpus=2, instances=i) for i in (1, 4))
    assert one.branch("instances") == four.branch("instances")

"""Every algorithm with a replay memory, under every placement: what is lost by a kill, a loss, a move. Nothing.

The table of docs/distribution.md has to name all algorithms and distribution policies that there are. A new one is
therefore in the product by itself. Placements of several groups run in threads.
"""

import functools
import itertools
import os
import re
import shutil
import signal
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
from sequence_learner import SequencesConfig

import rollmill
from rollmill.core.errors import UsageError
from rollmill.dataflow import graph_roles
from rollmill.hooks import MetricsLogged
from rollmill.planning.distribution import list_distributions
from rollmill.policies.loading import load_weights
from rollmill.programs.states import state_shapes
from rollmill.record.checkpoints import Checkpoints, GivenLeaves, LeftOut
from rollmill.record.leaves import to_host, tree_digest
from rollmill.record.run_directory import RunDirectory
from rollmill.runs.algorithms import ALGORITHMS
from rollmill.runs.options import RunOptions
from rollmill.runs.specification import build_graph
from rollmill.training.placing import choose_plan

PAGE = (Path(__file__).parents[2] / "docs/distribution.md").read_text()
ENVIRONMENTS = ("CartPole-v1", "Pendulum-v1", "TicTacToe-v0", "TagGridWorld-Small-v0", "TwoStepGame-v0")
ITERATIONS, EVERY = 64, 8
ENVS, STEPS = 4, 4
ATTEMPTS = 5
SIZES = {
    "num_envs": ENVS,
    "num_steps": STEPS,
    "num_shards": ENVS,
    "total_timesteps": ENVS * STEPS * ITERATIONS,
    "buffer_size": 240,  # 60 slots each, which 64 iterations of 4 steps overwrite
    "batch_size": 8,
    "learning_starts": 64,
    "gradient_steps": 2,
    "network": rollmill.NetworkConfig(hidden_sizes=(4,)),
    "sequence_length": 8,
    "burn_in": 2,
}
RECURRENT = {"network": rollmill.NetworkConfig(torso="gru", hidden_sizes=(4,), recurrent_size=4)}
OPTIONS = {"tensorboard": False, "checkpoint_iterations": EVERY, "keep_last": ITERATIONS, "fusion": "off"}


class Placement(NamedTuple):
    """A way to place a training, as the table names it."""

    name: str
    options: tuple

    @property
    def run_options(self):
        return dict(self.options)


@functools.cache
def variants():
    """Algorithms with a replay memory on the first environment that they can be trained on, by their names."""
    found = {}
    for name in ALGORITHMS:
        if name == "sequences":
            continue  # registered by a test
        for prioritised in (False, True):
            graph = graph_of(name, prioritised=prioritised)
            if graph is not None and graph.replay is not None:
                found[f"{name}, prioritised" if prioritised else name] = graph
    return found


@functools.cache
def learners():
    """The variants, and an algorithm of one's own whose store keeps sequences."""
    return {**variants(), "sequences": build_graph("sequences", "CartPole-v1", SequencesConfig())}


def graph_of(name, *, prioritised):
    config = ALGORITHMS[name].config
    known = {field.name for field in fields(config)}
    if prioritised and "prioritised" not in known:
        return None
    of_all = {**SIZES, "prioritised": prioritised}
    for environment, more in itertools.product(ENVIRONMENTS, ({}, {"num_minibatches": 1}, RECURRENT)):
        try:
            sizes = {key: value for key, value in {**of_all, **more}.items() if key in known}
            return build_graph(name, environment, config(**sizes))
        except UsageError:
            continue
    raise AssertionError(f"{name} trains on none of {ENVIRONMENTS}: add one on which it does")


@functools.cache
def placements():
    """One program, a mesh, and each distribution policy, also asynchronous where it has such a form."""
    found = [Placement("one program", ()), Placement("mesh", (("place", "mesh"), ("learners", 2)))]
    counts = {"workers": 2, "actors": 2, "learners": 2}
    for policy, asynchronous in itertools.product(list_distributions(), (False, True)):
        options = {"distribution": policy, "place": "threads", **({"asynchronous": True} if asynchronous else {})}
        for count, value in counts.items():
            if _is_read({**options, count: value}):
                options[count] = value
        if _is_read(options):
            found.append(Placement(f"{policy}, asynchronous" if asynchronous else policy, tuple(options.items())))
    return {placement.name: placement for placement in found}


@functools.cache
def graph_without_memory():
    return rollmill.ppo("CartPole-v1", num_envs=ENVS, num_steps=STEPS, num_minibatches=1)


def _is_read(options):
    """Whether a policy takes these counts; what an algorithm refuses is another question."""
    try:
        choose_plan(graph_without_memory(), RunOptions(**options))
    except UsageError:
        return False
    return True


def plan_of(graph, placement):
    """The plan; None where it is refused."""
    try:
        return choose_plan(graph, RunOptions(**placement.run_options))
    except UsageError:
        return None


SECTION = PAGE.partition("## What a replay memory survives")[2].partition("\n## ")[0]
ROWS = {
    cells[0].strip("`"): cells[1:]
    for cells in (row.split(" | ") for row in re.findall(r"^\| (?!Placement|---)(.+?) \|$", SECTION, re.M))
}
"""The table of the page: cells by the name of the placement."""
NAMED = re.search(r"These algorithms have a replay memory: (.+?)\.", SECTION, re.S)[1].replace("\n", " ")
NAMES = [name.replace(" with prioritised replay", ", prioritised") for name in re.split(", | and ", NAMED)]


def test_the_page_has_every_algorithm_and_every_placement():
    """Tests are collected by the names on the page, because it takes seconds to build the graphs and the plans."""
    assert list(ROWS) == list(placements())
    assert list(variants()) == NAMES


@pytest.mark.parametrize("name", ROWS)
def test_the_page_says_what_is_refused_and_who_is_replaced(name):
    (resumed, lost, moved), graphs, placement = ROWS[name], variants().values(), placements()[name]
    plans = [plan_of(graph, placement) for graph in graphs]
    if None in plans:
        assert plans == [None] * len(plans) and {resumed, lost, moved} == {"rejected"}
        return
    partition = plans[0].partition
    roles = graph_roles(next(iter(graphs)), partition)
    replaced = {name for name, role in roles.items() if role.replaceable and plans[0].place != "mesh"}
    assert replaced == set(re.findall(r"`(\w+)`", lost))
    assert (resumed == "exact") == partition.synchronous and (moved == "exact") == partition.synchronous
    if placement.name != "one program":
        assert ("exact" if not replaced else "begins new episodes") in lost


CASES = [
    pytest.param(name, place, id=f"{name}-{place}")
    for name, place in itertools.product([*NAMES, "sequences"], ROWS)
    if "rejected" not in ROWS[place]
]
FAST = {("dqn, prioritised", "one program")}


def trained(name, placement, folder, **more):
    options = {**OPTIONS, "quiet": True, **placement.run_options, **more}
    return rollmill.train(learners()[name], run_dir=folder, **options)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """Trains a variant under a placement, once for all tests. The run has a checkpoint in the middle.

    Workers do not wait for the coordinator, which asks them for checkpoints. On a busy machine, they may end
    before it asks for the first one.
    """

    @functools.cache
    def train_whole(name, place):
        folder = tmp_path_factory.mktemp("whole")
        for attempt in range(ATTEMPTS):
            run = trained(name, placements()[place], folder / str(attempt))
            if len(saved_iterations(run.directory)) > 2:
                return run
        raise AssertionError(f"none of {ATTEMPTS} runs has a checkpoint between its first and its last")

    return train_whole


def saved_iterations(folder):
    """The iterations of a run's checkpoints."""
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir())


def killed_midway(run, folder):
    """The run as a kill leaves it before its last checkpoint, and the iteration of its newest one then."""
    shutil.copytree(run.directory, folder)
    *_, midway, last = saved_iterations(folder)
    assert 0 < midway < last == ITERATIONS
    shutil.rmtree(folder / f"checkpoints/{last}")
    (folder / "summary.json").unlink()
    return folder, midway


def state_of(run, graph, iteration, *, synchronous=True):
    """The state of a checkpoint. Those of asynchronous runs have no environments: these are zeros here."""
    blank = lambda leaf: np.zeros(leaf.shape, leaf.dtype)
    begin = lambda *_: to_host({"collector": jax.tree.map(blank, state_shapes(graph).collector)})
    given = GivenLeaves() if synchronous else GivenLeaves(left_out=LeftOut("collector.", begin))
    with Checkpoints(RunDirectory(Path(run)).checkpoints, read_only=True) as checkpoints:
        return to_host(checkpoints.restore(state_shapes(graph), iteration=iteration, given=given).state)


def assert_filled(state, iteration, *, left_out=0):
    """The memory has all steps of each environment but the last ones that may be left out, and is not blank."""
    words = "rings.rows.words"
    if "rings.steps" in state:
        words, missing = "rings.views.words", iteration * STEPS - state["rings.steps"]
        assert missing.shape == (ENVS,) and missing.min() >= 0 and missing.max() <= left_out
    assert all((words != 0).any() for words in state[words])


@pytest.mark.parametrize(
    ("name", "place"),
    [
        pytest.param(*case.values, id=case.id, marks=() if case.values in FAST else pytest.mark.slow)
        for case in CASES
    ],
)
def test_a_killed_training_goes_on_as_if_it_had_not_been(name, place, whole_run, tmp_path):
    graph, placement = learners()[name], placements()[place]
    synchronous = plan_of(graph, placement).partition.synchronous
    run = whole_run(name, place)
    folder, number = killed_midway(run, tmp_path / "killed")
    midway = state_of(folder, graph, number, synchronous=synchronous)
    assert_filled(midway, number)
    again = rollmill.resume(folder, quiet=True)
    right, mine = (state_of(path, graph, ITERATIONS, synchronous=synchronous) for path in (run, again))
    assert right.keys() == mine.keys()
    if not synchronous:  # actors take the newest weights that there are
        count = "rings.steps" if "rings.steps" in mine else "rings.count"
        assert np.all(mine[count] >= midway[count]) and again.summary["status"] == "finished"
        return
    for leaf, array in right.items():
        np.testing.assert_array_equal(mine[leaf], array, err_msg=leaf)
    assert again.summary["weights_sha256"] == run.summary["weights_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "place"), CASES)
def test_a_training_that_moves_takes_its_memory_along(name, place, whole_run, tmp_path):
    """To one program, or from it to a mesh: the memory is that of the place before, and what is learned, too."""
    graph, placement = learners()[name], placements()[place]
    synchronous = plan_of(graph, placement).partition.synchronous
    run = whole_run(name, place)
    elsewhere = (
        {"place": "mesh", "learners": 2} if placement.name == "one program" else {"distribution": "gpu-only"}
    )
    folder, _ = killed_midway(run, tmp_path / "moved")
    again = rollmill.resume(folder, quiet=True, **elsewhere)
    moved = state_of(again, graph, ITERATIONS)
    # Episodes that a checkpoint leaves out end before their newest step, whose next observation is not stored.
    assert_filled(moved, ITERATIONS, left_out=0 if synchronous else 1)
    if synchronous:
        close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4)
        jax.tree.map(close, load_weights(again.directory).weights, load_weights(run.directory).weights)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES, "sequences"])
def test_a_mesh_that_loses_a_process_keeps_its_memory(name, whole_run, tmp_path, capsys):
    mesh = placements()["mesh"]
    right, said, killed = whole_run(name, "mesh"), [], []

    def kill_one(event):
        said.append(capsys.readouterr().err)
        if isinstance(event, MetricsLogged) and event.iteration > ITERATIONS // 2 and not killed:
            killed.append(int(re.findall(r"all/1 is process (\d+)", "".join(said))[-1]))
            os.kill(killed[0], signal.SIGKILL)

    run = trained(name, mesh, tmp_path / "lost", hooks=[kill_one], quiet=False, log_every=1)
    said.append(capsys.readouterr().err)
    assert killed and "all workers restart after iteration" in "".join(said)
    assert run.summary["weights_sha256"] == right.summary["weights_sha256"]
    graph = learners()[name]
    assert tree_digest(state_of(run, graph, ITERATIONS)) == tree_digest(state_of(right, graph, ITERATIONS))

"""Transitions in the replay memory of runs whose environments are in other processes, or begin new episodes."""

import jax
import numpy as np
import pytest

import rollmill
from rollmill.policies.loading import restore_run
from rollmill.training.evolution import EvolutionRule
from rollmill.training.evolving import read_evolution
from rollmill.training.population import Population, train_population
from rollmill.training.request import TrainingRequest

ENVIRONMENT = "gymnasium:counting_episodes:Counting-v0"
SIZES = {"num_envs": 4, "num_steps": 3, "batch_size": 8, "gradient_steps": 1, "learning_starts": 40}
OPTIONS = {"quiet": True, "tensorboard": False, "imports": ["counting_episodes"]}
TOTAL = 4 * 3 * 11
OF_THE_EPISODE = [0, 2]
"""Numbers of the episode and of the process in an observation."""


def drawn_from(directory):
    """Yields many transitions of a run's last checkpoint."""
    found = restore_run(directory, imports=["counting_episodes"])
    graph, state = found.graph, found.restored.state
    index = np.arange(4, dtype=np.int32)
    draw = jax.jit(lambda key: graph.replay.sample(graph, state.rings, state.learner, key, index))
    for number in range(40):
        yield jax.device_get(draw(jax.random.key(number)).minibatch.samples._replace(key=()))


@pytest.mark.slow
def test_no_transition_of_a_resumed_run_leads_into_another_episode(tmp_path):
    graph = rollmill.dqn(ENVIRONMENT, **SIZES, total_timesteps=TOTAL, buffer_size=4 * TOTAL, n_step=3)
    run = rollmill.train(graph, run_dir=tmp_path / "run", **OPTIONS)
    rollmill.resume(run.directory, quiet=True, changes={"total_timesteps": 2 * TOTAL})
    processes = set()
    for drawn in drawn_from(run.directory):
        before, after = drawn.observation[:, OF_THE_EPISODE], drawn.next_observation[:, OF_THE_EPISODE]
        np.testing.assert_array_equal(before, after)
        processes |= set(drawn.observation[:, 2].tolist())
    assert len(processes) > 1, "transitions from before and after the resumption are drawn"


def test_asynchronous_actors_fill_the_memory_of_their_own_environments(tmp_path):
    graph = rollmill.dqn(ENVIRONMENT, **SIZES, total_timesteps=6 * TOTAL, buffer_size=8 * TOTAL, n_step=1)
    placement = {"distribution": "single-learner-coarse", "actors": 2, "asynchronous": True, "place": "threads"}
    run = rollmill.train(graph, run_dir=tmp_path / "run", **placement, **OPTIONS)
    for drawn in drawn_from(run.directory):
        before, after = drawn.observation[:, OF_THE_EPISODE], drawn.next_observation[:, OF_THE_EPISODE]
        np.testing.assert_array_equal(before, after)
        np.testing.assert_array_equal(drawn.observation[:, 1] + 1, drawn.next_observation[:, 1])


@pytest.mark.parametrize("asynchronous", [None, False])
def test_episodes_of_asynchronous_actors_end_where_a_synchronous_run_goes_on(tmp_path, asynchronous):
    graph = rollmill.dqn("CountingJax-v0", **SIZES, total_timesteps=TOTAL, buffer_size=4 * TOTAL, n_step=1)
    actors = {"distribution": "single-learner-coarse", "actors": 2, "place": "threads"}
    run = rollmill.train(graph, run_dir=tmp_path / "run", asynchronous=True, **actors, **OPTIONS)
    program = {"distribution": "gpu-only"}
    elsewhere = program if asynchronous is None else {**actors, "asynchronous": asynchronous}
    rollmill.resume(run.directory, quiet=True, changes={"total_timesteps": 2 * TOTAL}, **elsewhere)
    assert_same_episodes(run.directory)


def test_episodes_that_a_broken_trial_copies_end(tmp_path):
    settings = {**SIZES, "total_timesteps": 12 * 8, "learning_starts": 24, "buffer_size": 8 * TOTAL, "n_step": 1}
    requests = [
        TrainingRequest(
            "dqn",
            "CountingJax-v0",
            {**settings, "learning_rate": rate, "run_dir": str(tmp_path / name), "quiet": True},
            imports=("counting_episodes",),
        )
        for name, rate in (("0", 1e-3), ("1", 1e38))
    ]
    rule = EvolutionRule(
        every_steps=48, share=0.5, names=("learning_rate",), bounds={"learning_rate": (1e-5, 1e-2)}
    )
    runs = train_population(requests, Population(rule, tmp_path))
    assert read_evolution(tmp_path).rungs[0].broken == (1,)
    assert_same_episodes(runs[1].directory)


def assert_same_episodes(directory):
    """Asserts that each transition of single steps leads to the next step of its episode."""
    for drawn in drawn_from(directory):
        np.testing.assert_array_equal(drawn.observation + np.float32([0, 1]), drawn.next_observation)


@pytest.mark.slow
def test_no_transition_leads_from_a_lost_actor_to_its_replacement(tmp_path):
    env = rollmill.make(ENVIRONMENT, marker=str(tmp_path / "marker"))
    graph = rollmill.dqn(env, **SIZES, total_timesteps=3 * TOTAL, buffer_size=6 * TOTAL, n_step=3)
    placement = {"distribution": "single-learner-coarse", "actors": 2, "place": "processes"}
    run = rollmill.train(graph, run_dir=tmp_path / "run", **placement, **OPTIONS)
    assert (tmp_path / "marker").exists()
    processes = set()
    for drawn in drawn_from(run.directory):
        before, after = drawn.observation[:, OF_THE_EPISODE], drawn.next_observation[:, OF_THE_EPISODE]
        np.testing.assert_array_equal(before, after)
        processes |= set(drawn.observation[:, 2].tolist())
    assert len(processes) == 3


def test_schedules_of_asynchronous_environments_go_on_in_another_placement(tmp_path):
    sizes = {"num_envs": 4, "num_steps": 4, "network": rollmill.NetworkConfig(hidden_sizes=(4,))}
    graph = rollmill.a2c(rollmill.make("CartPole-v1", gravity="linear:9:10"), **sizes, total_timesteps=16 * 5)
    placement = {"distribution": "single-learner-coarse", "actors": 2, "asynchronous": True, "place": "threads"}
    run = rollmill.train(graph, run_dir=tmp_path / "run", quiet=True, tensorboard=False, **placement)
    rollmill.resume(run.directory, quiet=True, changes={"total_timesteps": 16 * 8}, distribution="gpu-only")
    *_, steps = restore_run(run.directory).restored.state.collector.environment
    np.testing.assert_array_equal(steps, np.full(4, 4 * 8))

"""Runs with a replay memory whose environments begin new episodes when they are resumed."""

import jax
import numpy as np
import pytest

import rollmill
from rollmill.policies.policies import restore_run

SIZES = {"num_envs": 4, "num_steps": 3, "batch_size": 8, "gradient_steps": 1, "learning_starts": 40}
TOTAL = 4 * 3 * 11


@pytest.mark.slow
def test_no_transition_of_a_resumed_run_leads_into_another_episode(tmp_path):
    graph = rollmill.dqn(
        "gymnasium:counting_episodes:Counting-v0",
        **SIZES,
        total_timesteps=TOTAL,
        buffer_size=4 * TOTAL,
        n_step=3,
    )
    options = {"quiet": True, "tensorboard": False, "imports": ["counting_episodes"]}
    run = rollmill.train(graph, run_dir=tmp_path / "run", **options)
    rollmill.resume(run.directory, quiet=True, changes={"total_timesteps": 2 * TOTAL})
    found = restore_run(run.directory, imports=["counting_episodes"])
    graph, state = found.graph, found.restored.state
    index = np.arange(4, dtype=np.int32)
    draw = jax.jit(lambda key: graph.replay.sample(graph, state.rings, state.learner, key, index))
    processes = set()
    for number in range(40):
        drawn = jax.device_get(draw(jax.random.key(number)).minibatch.samples._replace(key=()))
        np.testing.assert_array_equal(drawn.observation[:, [0, 2]], drawn.next_observation[:, [0, 2]])
        processes |= set(drawn.observation[:, 2].tolist())
    assert len(processes) > 1, "transitions from before and after the resumption are drawn"

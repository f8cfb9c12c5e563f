"""Host environments of several agents: kinds, deaths, ends of episodes, failures, masks, learning from them."""

from functools import partial

import jax
import numpy as np
import pytest
from gymnasium import spaces

import rollmill
from envs.parallel_cases import DIE, RAISE, STOP_ALL, STOP_ALONE, Crew
from rollmill.envs import transform
from rollmill.envs.host import parallel_environment
from rollmill.programs.evaluation.host_environments import evaluate_on_host
from wordings import raises


class Paid(Crew):
    """Pays 3 for the action 1 in each of 8 steps, 5 for dying."""

    def step(self, actions):
        observations, rewards, terminated, truncated, infos = Crew.step(
            self, {agent: action if action in (1, DIE) else 0 for agent, action in actions.items()}
        )
        paid = {agent: {1: 3.0, DIE: 5.0}.get(action, 0.0) for agent, action in actions.items()}
        return observations, paid, terminated, truncated, infos


def started(count=1, **options):
    env = parallel_environment("Crew", partial(Crew, **options))
    return env, env.start(range(count), seed=3)


def act(rovers, scout):
    return {"rover": np.array(rovers), "scout": np.array(scout)}


def test_agents_whose_names_differ_in_their_number_are_of_one_kind():
    env, _ = started()
    assert [(kind.name, kind.count, kind.observation_space.shape) for kind in env.agents] == [
        ("rover", 2, (2,)),
        ("scout", 1, (3,)),
    ]
    assert env.action_space == spaces.Dict(
        {"rover": spaces.MultiDiscrete([6, 6]), "scout": spaces.MultiDiscrete([6])}
    )


def test_steps_have_the_numbers_of_each_agent():
    _, vector = started(2)
    first = vector.reset()
    np.testing.assert_array_equal(first.observation["rover"], [[[0, 0], [0, 1]]] * 2)
    step = vector.step(act([[0, 1], [1, 0]], [[1], [0]]))
    np.testing.assert_array_equal(step.observation["rover"], [[[1, 0], [1, 1]]] * 2)
    np.testing.assert_array_equal(step.reward["rover"], [[0, 1], [1, 0]])
    np.testing.assert_array_equal(step.reward["scout"], [[1], [0]])
    np.testing.assert_allclose(step.info["episode_return"], [2 / 3, 1 / 3], rtol=1e-6)
    np.testing.assert_array_equal(step.info["agent_returns"]["rover"], [0.5, 0.5])
    assert step.info["active"]["rover"].all() and not (step.terminated | step.truncated).any()
    assert step.observation["rover"].dtype == np.float32


def test_an_agent_that_dies_is_inactive_until_the_next_episode():
    _, vector = started()
    vector.reset()
    died = vector.step(act([[DIE, 1]], [[0]]))
    assert not died.terminated[0] and died.info["active"]["rover"].tolist() == [[False, True]]
    assert died.info["final_active"]["rover"].tolist() == [[False, True]]
    assert died.reward["rover"].tolist() == [[2.0, 1.0]]  # of its last step
    after = vector.step(act([[1, 1]], [[0]]))
    assert after.reward["rover"].tolist() == [[0.0, 1.0]]  # its action is ignored
    assert after.observation["rover"].tolist() == [[[1, 0], [2, 1]]]  # its last one stays
    ended = vector.step(act([[0, DIE]], [[DIE]]))
    assert ended.terminated[0] and not ended.truncated[0]
    assert not ended.info["final_active"]["rover"].any() and ended.info["active"]["rover"].all()
    assert ended.observation["rover"].tolist() == [[[0, 0], [0, 1]]]
    assert ended.info["final_observation"]["rover"].tolist() == [[[1, 0], [3, 1]]]
    np.testing.assert_allclose(ended.info["episode_return"], (2 + 2 + 2 + 2) / 3)
    assert ended.info["episode_length"] == 3
    assert vector.step(act([[0, 0]], [[0]])).info["episode_return"] == 0


def test_who_is_left_at_a_time_limit_is_active_in_its_final_observation():
    _, vector = started()
    vector.reset()
    step = vector.step(act([[DIE, STOP_ALL]], [[1]]))
    assert step.truncated[0] and not step.terminated[0]
    assert step.info["final_active"]["rover"].tolist() == [[False, True]]
    assert step.info["final_active"]["scout"].all() and step.info["active"]["rover"].all()


def test_an_agent_truncated_before_the_others_is_refused():
    _, vector = started()
    vector.reset()
    with raises("agent-was-truncated-while-goes", "Crew", "rover_1", "rover_0"):
        vector.step(act([[0, STOP_ALONE]], [[0]]))


def test_one_that_raises_is_replaced_and_its_episode_truncated():
    _, vector = started(2)
    vector.reset()
    seeds = vector.seeds
    step = vector.step(act([[1, RAISE], [1, 1]], [[0], [0]]))
    assert step.truncated.tolist() == [True, False] and step.reward["rover"].tolist() == [[0, 0], [1, 1]]
    (failure,) = vector.drain_failures()
    assert (failure.doing, failure.error) == ("step", "RuntimeError: the crew is lost")
    assert "parallel_cases.py" in failure.line
    assert vector.seeds[0] != seeds[0] and vector.seeds[1] == seeds[1]
    np.testing.assert_array_equal(step.observation["rover"], [[[0, 0], [0, 1]], [[1, 0], [1, 1]]])


def test_arrays_of_the_caller_are_filled():
    _, vector = started()
    first = vector.reset()
    out = vector.step(act([[0, 1]], [[0]]))
    assert vector.step(act([[1, 1]], [[0]]), out=first) is first
    assert first.reward["rover"].tolist() == [[1.0, 1.0]] and out.reward["rover"].tolist() == [[0.0, 1.0]]


def test_legal_actions_come_from_the_infos():
    env, vector = started(masked=True)
    assert env.has_action_mask
    mask = vector.reset().info["action_mask"]
    assert mask["rover"].shape == (1, 2, 6) and not mask["rover"][:, :, 0].any() and mask["scout"][0, 0, 1:].all()
    step = vector.step(act([[DIE, 2]], [[1]]))
    assert step.info["action_mask"]["scout"][0, 0].tolist() == [True, False, True, True, True, True]


def test_legal_actions_that_do_not_fit_are_refused():
    infos = lambda self, agents: {agent: {"action_mask": np.ones(5, bool)} for agent in agents}
    with raises("has-one-number-for-each", "Crew: rover_0", "(5,)", "(6,)"):
        parallel_environment("Crew", type("Short", (Crew,), {"_infos": infos}))

    def late(self, agents):
        return {agent: {"action_mask": np.ones(6, bool)} if self.count else {} for agent in agents}

    vector = parallel_environment("Crew", type("Late", (Crew,), {"_infos": late})).start([0], seed=0)
    vector.reset()
    vector.step(act([[0, 0]], [[0]]))
    assert "which was missing from the first reset" in vector.drain_failures()[0].error


def test_environments_that_cannot_be_carried_are_explained():
    nameless = type("Nameless", (Crew,), {"possible_agents": []})
    with raises("does-not-say-agents-may", "Crew"):
        parallel_environment("Crew", nameless)
    texts = type("Texts", (Crew,), {"observation_space": lambda self, agent: spaces.Text(5)})
    with raises("space-has-no-fixed-shape", "Crew: agent rover_0:", "Text"):
        parallel_environment("Crew", texts)
    with raises("is-without-methods-pettingzoos-parallelenv", "Crew", "object"):
        parallel_environment("Crew", object)
    with raises("has-several-agents-whose-discounted"):
        started()[0].start([0], seed=0, gamma=0.9)


def test_agents_of_one_stem_with_other_spaces_are_kinds_of_one():
    sizes = lambda self, agent: spaces.Box(-1, 1, (2 + (agent == "rover_1"),))
    env = parallel_environment("Crew", type("Mixed", (Crew,), {"observation_space": sizes}))
    assert [kind.name for kind in env.agents] == ["rover_0", "rover_1", "scout"]


def test_the_contract_holds_and_a_breach_is_found():
    rollmill.check_environment(parallel_environment("Crew", partial(Paid, masked=True, most=7)), num_steps=50)
    bounded = type("Bounded", (Paid,), {"observation_space": lambda self, agent: spaces.Box(0, 1, (2,))})
    bounded.sizes = {"rover": 2, "scout": 2}
    with raises("returned-observation-is-not-in"):
        rollmill.check_environment(parallel_environment("Crew", partial(bounded, most=7)), num_steps=50)


def test_other_algorithms_and_transforms_refuse_it():
    env, _ = started()
    with raises("has-several-agents-train-with", "Crew", "rover, scout"):
        rollmill.ppo(env)
    with raises("transform-does-not-fit-has", "reward-scale:2", "Crew"):
        transform(env, "reward-scale:2")
    with raises("is-host-environment-takes-no", "Crew"):
        rollmill.mappo(env, params=())


@pytest.mark.slow
@pytest.mark.parametrize("build", [rollmill.mappo, rollmill.ippo])
def test_agents_learn_to_take_the_best_action_and_the_dead_do_not_count(build, tmp_path):
    env = parallel_environment("Crew", partial(Paid, most=8))
    algorithm = build(env, total_timesteps=8_192, num_envs=8, num_steps=32, learning_rate=3e-3, gamma=0.9)
    run = rollmill.train(algorithm, run_dir=tmp_path / "run", quiet=True)
    assert run.summary["final_return"] > 20  # of at most 24
    played = rollmill.evaluate(tmp_path / "run", algorithm=algorithm, episodes=3)
    np.testing.assert_allclose(played.returns, 24)


def test_another_environment_plays_the_same_policy():
    env, _ = started()
    graph = rollmill.mappo(env, num_envs=4, num_steps=8, total_timesteps=32, num_minibatches=1)
    weights = graph.weights(graph.start_learner(jax.random.key(0)))
    played = evaluate_on_host(graph, weights, parallel_environment("Crew", partial(Paid, most=5)), episodes=2)
    assert (played.lengths <= 5).all() and played.lengths.size == 2


@pytest.mark.parametrize(("place", "value"), [(1, "1.5"), (2, "False"), (3, None)])
def test_rewards_and_flags_of_agents_are_numbers(place, value):
    class Wrong(Crew):
        def step(self, actions):
            results = list(Crew.step(self, actions))
            results[place] = {**results[place], "scout_0": value}
            return tuple(results)

    vector = parallel_environment("Wrong", Wrong).start([0], seed=3)
    vector.reset()
    vector.step(act([[0, 1]], [[1]]))
    failure = vector.drain_failures()[0].error
    assert repr(value) in failure and "for the agent scout_0, expected a number and two booleans" in failure

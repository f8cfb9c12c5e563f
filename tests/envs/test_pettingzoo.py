"""Environments of PettingZoo through their adapter."""

import sys
from types import ModuleType

import numpy as np
import pytest

import rollmill
from envs.parallel_cases import Crew
from rollmill import envs
from rollmill.core.errors import UsageError
from rollmill.envs.host import environment_seed
from wordings import raises

pettingzoo = pytest.importorskip("pettingzoo", reason="pip install 'rollmill[pettingzoo]'")
mpe2 = pytest.importorskip("mpe2.simple_spread_v3", reason="pip install 'rollmill[pettingzoo]'")

SPREAD = "pettingzoo:mpe/simple_spread_v3"
pytestmark = pytest.mark.filterwarnings("ignore:.*You are calling render method:UserWarning")


def test_steps_are_pettingzoos_own_and_the_limit_truncates():
    vector = envs.make(SPREAD, max_cycles=5).start([7], seed=2)
    source = mpe2.parallel_env(max_cycles=5)
    theirs, _ = source.reset(seed=environment_seed(2, 7))
    ours = vector.reset()
    actions = np.array([1, 2, 3])
    for number in range(1, 6):
        stacked = np.stack([theirs[agent] for agent in source.possible_agents])
        np.testing.assert_array_equal(ours.observation["agent"][0], stacked)
        ours = vector.step({"agent": actions[None]})
        theirs, rewards, terminated, _, _ = source.step(dict(zip(source.agents, actions, strict=True)))
        np.testing.assert_allclose(ours.reward["agent"][0], list(rewards.values()), rtol=1e-6)
        assert not any(terminated.values()) and not ours.terminated[0] and ours.truncated[0] == (number == 5)
    stacked = np.stack([theirs[agent] for agent in source.possible_agents])
    np.testing.assert_array_equal(ours.info["final_observation"]["agent"][0], stacked)


@pytest.mark.parametrize(
    ("name", "options", "kinds"),
    [
        ("mpe/simple_spread_v3", {"N": 2}, {"agent": 2}),
        ("mpe/simple_tag_v3", {"continuous_actions": True}, {"adversary": 3, "agent": 1}),
        ("mpe/simple_speaker_listener_v4", {}, {"speaker": 1, "listener": 1}),
        ("butterfly/knights_archers_zombies_v11", {"max_zombies": 2}, {"archer": 2, "knight": 2}),
        pytest.param("butterfly/pistonball-v6", {"n_pistons": 3}, {"piston": 3}, marks=pytest.mark.slow),
        pytest.param("sisl/pursuit_v5", {"n_pursuers": 3}, {"pursuer": 3}, marks=pytest.mark.slow),
        ("classic/rps_v2", {}, {"player": 2}),
    ],
)
def test_environments_keep_the_contract(name, options, kinds):
    env = envs.make(f"pettingzoo:{name}", **options)
    assert {kind.name: kind.count for kind in env.agents} == kinds
    assert (env.name, dict(env.options)) == (f"pettingzoo:{name}", options)
    envs.check_environment(env, num_steps=60)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mpe/simple_spread_v2", {}, "unknown PettingZoo environment .* Did you mean mpe/simple_spread_v3"),
        ("butterfly/pistonbal_v6", {}, "Did you mean butterfly/pistonball_v6.* pettingzoo:MODULE:ID"),
        ("mpe/simple_spread_v3", {"max_cycle": 3}, "no option 'max_cycle'. Did you mean max_cycles"),
        ("butterfly/pistonball_v6", {"pistons": 3}, "no option 'pistons'. Did you mean n_pistons"),
        ("classic/chess_v6", {}, "pettingzoo:classic/chess_v6 is turn-based"),
        ("no_such_module:Mine-v0", {}, "cannot import 'no_such_module'"),
    ],
)
def test_unknown_names_and_options_are_explained(name, options, message):
    with pytest.raises(UsageError, match=message):
        envs.make(f"pettingzoo:{name}", **options)


@pytest.mark.parametrize(("name", "module"), [("mpe/simple_v3", "mpe2"), ("atari/pong_v3", "multi_agent_ale_py")])
def test_missing_packages_are_named(name, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "pettingzoo.atari.pong.pong", raising=False)
    with pytest.raises(UsageError, match=module):
        envs.make(f"pettingzoo:{name}")


def test_environments_that_a_module_registers(monkeypatch):
    module = ModuleType("my_crews")
    monkeypatch.setitem(sys.modules, "my_crews", module)
    monkeypatch.setattr(pettingzoo.env_registry.registration, "parallel_registry", {})
    registry = pettingzoo.parallel_registry
    monkeypatch.setitem(registry, "Crew-v0", pettingzoo.EnvSpec("Crew-v0", entry_point=Crew, kwargs={"most": 4}))
    env = envs.make("pettingzoo:my_crews:Crew-v0")
    vector = env.start([0], seed=0)
    vector.reset()
    ends = [vector.step({"rover": np.zeros((1, 2)), "scout": np.zeros((1, 1))}).truncated[0] for _ in range(4)]
    assert ends == [False, False, False, True]
    with raises("has-no-option-options", "'mosst'", "Did you mean most"):
        envs.make("pettingzoo:my_crews:Crew-v0", mosst=3)


@pytest.mark.slow
def test_a_run_in_processes_is_evaluated_and_drawn(tmp_path):
    algorithm = rollmill.mappo(SPREAD, total_timesteps=256, num_envs=4, num_steps=32)
    alone = rollmill.train(algorithm, run_dir=tmp_path / "alone", quiet=True)
    processes = rollmill.train(
        algorithm, run_dir=tmp_path / "processes", quiet=True, distribution="environments", workers=2
    )
    np.testing.assert_allclose(processes.summary["final_return"], alone.summary["final_return"], rtol=1e-5)
    played = rollmill.evaluate(tmp_path / "processes", episodes=2)
    assert played.lengths.tolist() == [25, 25]
    short = rollmill.evaluate(tmp_path / "processes", env=SPREAD, env_options={"max_cycles": 4}, episodes=1)
    assert short.lengths.tolist() == [4]
    pictures = rollmill.render(tmp_path / "processes", max_steps=3)
    assert pictures.shape[0] == 4 and pictures.shape[3] == 3 and len(np.unique(pictures)) > 3


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_mappo_learns_to_spread(tmp_path):
    algorithm = rollmill.mappo(SPREAD, total_timesteps=200_000, num_envs=16, num_steps=125, learning_rate=1e-3)
    run = rollmill.train(algorithm, run_dir=tmp_path / "run", quiet=True)
    assert run.summary["final_return"] > -24  # -26.6 at the beginning

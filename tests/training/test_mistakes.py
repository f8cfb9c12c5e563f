"""Mistakes with the Python API end in a sentence with a way out, and what was meant works where it is plain.

They are made as a user makes them: in a process of their own, without the tests' strict settings.
"""

import json
import subprocess
import sys

import pytest

PREAMBLE = """
import gymnasium as gym, jax, jax.numpy as jnp, numpy as np, optax, rollmill
from gymnasium import spaces
env = rollmill.make("CartPole-v1")
host = rollmill.make("gymnasium:CartPole-v1")
lever = rollmill.AgentKind("lever", 2, spaces.Box(-1.0, 1.0, (2,), np.float32), spaces.Discrete(2))
seen = lambda: {"lever": jnp.zeros((2, 2))}
levers = rollmill.Environment(
    "Levers-v0",
    lambda key, params: (seen(), jnp.int32(0)),
    lambda key, state, action, params: rollmill.Timestep(
        seen(), state + 1, {"lever": jnp.zeros(2)}, state > 3, jnp.asarray(False), {}
    ),
    *rollmill.envs.joint_spaces([lever]),
    agents=(lever,),
)
small = {"num_envs": 4, "num_steps": 8, "total_timesteps": 64}
config = lambda graph: graph.settings["config"]
"""

WORKS = {
    'rollmill.ppo("CartPole-v1").settings["environment"]': "CartPole-v1",
    'rollmill.a3c("CartPole-v1").settings["environment"]': "CartPole-v1",
    'rollmill.impala("Pendulum-v1").settings["environment"]': "Pendulum-v1",
    'rollmill.mappo("TagGridWorld-Small-v0").settings["environment"]': "TagGridWorld-Small-v0",
    'rollmill.ippo("TagGridWorld-Small-v0").settings["environment"]': "TagGridWorld-Small-v0",
    'rollmill.ppo(gym.make("CartPole-v1")).settings["environment"]': "gymnasium:CartPole-v1",
    "config(rollmill.ppo(env, total_timesteps=1e6))['total_timesteps']": 1_000_000,
    "config(rollmill.ppo(env, total_timesteps=np.float64(1e6)))['total_timesteps']": 1_000_000,
    "config(rollmill.ppo(env, num_envs=np.int64(8)))['num_envs']": 8,
    "config(rollmill.ppo(env, gamma=jnp.float32(1)))['gamma']": 1.0,
    "config(rollmill.ppo(env, gamma=1))['gamma']": 1.0,
    "config(rollmill.ppo(env, rollmill.PPOConfig(total_timesteps=1e6)))['total_timesteps']": 1_000_000,
    "config(rollmill.ppo(env, {'num_envs': 8}))['num_envs']": 8,
    "config(rollmill.ppo(env, {'num_envs': 8}, num_envs=16))['num_envs']": 16,
    "config(rollmill.ppo(env, network='mlp'))['network']['torso']": "mlp",
    "config(rollmill.ppo(env, network={'hidden_sizes': [32]}))['network']['hidden_sizes']": [32],
    "config(rollmill.ppo(env, learning_rate=optax.linear_schedule(0.25, 0, 9)))['learning_rate']": 0.25,
    "rollmill.ppo(env, learning_rate=optax.linear_schedule(1e-3, 0, 9)).settings['custom']": ["learning_rate"],
    "rollmill.RunOptions(seed=1e3).seed": 1000,
    "str(rollmill.RunOptions(run_dir='somewhere').run_dir)": "somewhere",
    "rollmill.check_environment('CartPole-v1')": None,
    "rollmill.check_environment(levers)": None,
}

FAILS = {
    'rollmill.ppo("CartPole-v2")': "unknown environment 'CartPole-v2'. Did you mean CartPole-v1",
    'rollmill.ppo("gym:CartPole-v1")': "unknown environment prefix 'gym:'",
    "rollmill.ppo(3)": "expected an environment, got a int. hint:",
    "rollmill.ppo(None)": "expected an environment, got a NoneType",
    "rollmill.ppo(gym.make_vec('CartPole-v1', 2))": "changed the observation of row 1, which the mask leaves out",
    "rollmill.ppo(gym.wrappers.NormalizeObservation(gym.make('CartPole-v1')))": "was wrapped after it was created",
    "rollmill.check_environment(3)": "expected an environment, got a int",
    "rollmill.ppo(env, lr=1e-3)": "unknown hyperparameter 'lr'. Did you mean learning_rate?",
    "rollmill.ppo(env, n_envs=8)": "Did you mean num_envs?",
    "rollmill.ppo(env, n_steps=8)": "Did you mean num_steps?",
    "rollmill.ppo(env, batch_size=64)": "num_minibatches is the number of minibatches",
    "rollmill.ppo(env, clip_range=0.2)": "Did you mean clip_coef?",
    "rollmill.ppo(env, n_epochs=4)": "Did you mean update_epochs?",
    "rollmill.ppo(env, timesteps=100)": "Did you mean total_timesteps?",
    "rollmill.ppo(env, nmu_envs=8)": "Did you mean num_envs",
    "rollmill.ppo(env, seed=1)": "Options of the run, such as seed and run_dir, belong to rollmill.train.",
    "rollmill.ppo(env, {'lr': 1e-3})": "Did you mean learning_rate?",
    "rollmill.ppo(env, num_envs=1.5)": "num_envs=1.5 must be an integer.",
    "rollmill.ppo(env, num_envs='8')": "num_envs='8' must be an integer.",
    "rollmill.ppo(env, num_envs=True)": "num_envs=True must be an integer.",
    "rollmill.ppo(env, num_envs=None)": "num_envs=None must be an integer.",
    "rollmill.ppo(env, num_envs=[8])": "num_envs=[8] must be an integer.",
    "rollmill.ppo(env, num_envs=float('inf'))": "num_envs=inf must be an integer",
    "rollmill.ppo(env, num_envs=np.array([1, 2]))": "must be an integer",
    "rollmill.ppo(env, num_envs=0)": "num_envs=0 must be at least 1",
    "rollmill.ppo(env, total_timesteps=-5)": "total_timesteps=-5 must be at least 1",
    "rollmill.ppo(env, total_timesteps=10)": "total_timesteps=10 is less than one iteration",
    "rollmill.ppo(env, learning_rate='fast')": "learning_rate='fast' must be a number or a schedule: constant",
    "rollmill.ppo(env, ent_coef=lambda done: 0.1)": "must be a number or a schedule.",
    "rollmill.ppo(env, target_kl='linear:1:2')": "target_kl='linear:1:2' must be a number or None.",
    "rollmill.ppo(env, learning_rate=1j)": "learning_rate=1j must be a number or a schedule.",
    "rollmill.ppo(env, learning_rate=lambda: 1)": "the function learning_rate does not return a number",
    "rollmill.ppo(env, learning_rate=lambda n: 'x')": "the function learning_rate does not return a number",
    "rollmill.ppo(env, gamma=1.5)": "gamma=1.5 must lie between 0 and 1",
    "rollmill.ppo(env, gamma='high')": "gamma='high' must be a number",
    "rollmill.ppo(env, anneal_lr='no')": "anneal_lr='no' must be True or False.",
    "rollmill.ppo(env, anneal_lr=1)": "anneal_lr=1 must be True or False.",
    "rollmill.ppo(env, target_kl='x')": "target_kl='x' must be a number",
    "rollmill.ppo(env, num_minibatches=7)": "num_minibatches=7",
    "rollmill.ppo(env, rollmill.A3CConfig())": "config is a A3CConfig, expected a PPOConfig. hint:",
    "rollmill.a3c(env, rollmill.PPOConfig())": "or rollmill.ppo(env, config).",
    "rollmill.ppo(env, rollmill.PPOConfig)": "config is the class PPOConfig, expected an instance",
    "rollmill.ppo(env, 'cartpole')": "config is the string 'cartpole', expected a PPOConfig. hint: the env",
    "rollmill.ppo('MlpPolicy', 'CartPole-v1')": "the environment is the first argument, as in rollmill.ppo(",
    "rollmill.ppo(env, rollmill.RunOptions())": "config is a RunOptions, expected a PPOConfig",
    "rollmill.ppo(env, network=3)": "network is a int, expected rollmill.NetworkConfig",
    "rollmill.ppo(env, network='transformer')": "unknown network.torso 'transformer'. Known: auto, cnn, gru",
    "rollmill.ppo(env, network=rollmill.NetworkConfig(hidden_sizes=64))": "hidden_sizes=64 must be a tuple",
    "rollmill.ppo(env, network=rollmill.NetworkConfig(activation='rellu'))": "Did you mean relu",
    "rollmill.ppo(env, network={'width': 3})": "unknown setting of network 'width'",
    "rollmill.ppo(env, network=lambda: None)": "creating the network raised TypeError",
    "rollmill.ppo(env, params=3)": "params has the structure",
    "rollmill.ppo(host, params={})": "is a host environment, which does not support params",
    "rollmill.ppo('TagGridWorld-Small-v0')": "train it with mappo or ippo",
    "rollmill.mappo(levers._replace(active=lambda state: {}))": "active takes (state), but is called",
    "rollmill.check_environment(levers._replace(active={}))": "active is a dict, expected a function",
    "rollmill.mappo(levers._replace(agents=()))": "list the kinds of agents: rollmill.Environment(..., agents=",
    "rollmill.check_environment(levers._replace(agents=()))": "hint: a multi-agent environment lists",
    "rollmill.mappo(levers._replace(agents=[lever]))": "expected a tuple of rollmill.AgentKind",
    "rollmill.ppo(env._replace(step=lambda key, state, action: 0))": "step takes (key, state, action), but",
    "rollmill.mappo(env)": "has one agent, but mappo needs a multi-agent environment",
    "rollmill.mappo(host)": "has one agent, but mappo needs a multi-agent environment",
    "rollmill.time_limit(host, 5)": 'hint: rollmill.make("gymnasium:CartPole-v1", max_episode_steps=N).',
    "rollmill.vary(host, lambda k, p: p)": "vary needs an environment written in JAX, but gymnasium:CartPole-v1",
    "rollmill.vectorise(host, 2)": "vectorise needs an environment written in JAX",
    "rollmill.auto_reset(host)": "it resets itself",
    "rollmill.time_limit('CartPole-v1', 5)": "time_limit needs an environment, got a str. hint: rollmill.make",
    "rollmill.time_limit(env, 5.5)": "max_steps=5.5 must be an integer",
    "rollmill.make('CartPole-v1', gravty=3)": "has no option 'gravty'. Did you mean gravity?",
    "rollmill.make('')": "unknown environment ''",
    "rollmill.train('ppo')": 'hint: rollmill.ppo("CartPole-v1") creates one.',
    "rollmill.train(rollmill.a3c)": 'hint: rollmill.a3c("CartPole-v1") creates one.',
    "rollmill.train(env)": "expected an algorithm on an environment, got Environment(",
    "rollmill.train(rollmill.ppo(env), seed=1.5)": "seed=1.5 must be an integer.",
    "rollmill.train(rollmill.ppo(env), seed='1')": "seed='1' must be an integer",
    "rollmill.train(rollmill.ppo(env), sed=1)": "unknown option of train 'sed'. Did you mean seed",
    "rollmill.train(rollmill.ppo(env), num_envs=8)": "Hyperparameters belong to the algorithm",
    "rollmill.train(rollmill.ppo(env), log_dir='x')": "Did you mean run_dir?",
    "rollmill.train(rollmill.ppo(env), run_dir=3)": "run_dir=3 must be a path or None.",
    "rollmill.train(rollmill.ppo(env), fusion='yes')": "unknown fusion 'yes'",
    "rollmill.train(rollmill.ppo(env), quiet='yes')": "quiet='yes' must be True or False",
    "rollmill.train(rollmill.ppo(env), rollmill.PPOConfig())": "options is a PPOConfig, expected",
    "rollmill.load(3)": "run_dir=3 must be a path.",
    "rollmill.load('nowhere')": "nowhere does not exist",
    "rollmill.evaluate(None)": "run_dir=None must be a path",
    "rollmill.resume('nowhere')": "nowhere does not exist",
    "rollmill.resume('nowhere', learning_rate=1)": "nowhere does not exist",
}

SCRIPT = """
import json, sys
exec({preamble!r})
answers = {{}}
for code in json.load(sys.stdin):
    try:
        answers[code] = ["returned", json.loads(json.dumps(eval(code), default=str))]
    except rollmill.RollmillError as error:
        answers[code] = ["RollmillError", str(error)]
    except Exception as error:
        answers[code] = ["a raw error", f"{{type(error).__name__}}: {{error}}"]
json.dump(answers, open(sys.argv[1], "w"))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    file = tmp_path_factory.mktemp("mistakes") / "answers.json"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(preamble=PREAMBLE), str(file)],
        input=json.dumps([*WORKS, *FAILS]),
        capture_output=True,
        text=True,
        cwd=file.parent,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text())


@pytest.mark.parametrize("code", WORKS)
def test_what_is_plain_works(answers, code):
    assert answers[code] == ["returned", WORKS[code]]


@pytest.mark.parametrize("code", FAILS)
def test_mistakes_end_in_a_sentence(answers, code):
    kind, said = answers[code]
    assert kind == "RollmillError" and FAILS[code] in said

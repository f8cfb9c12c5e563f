"""A loaded policy: single observations and batches, NumPy and JAX, in and out of compiled functions."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from untrained import REPLAY, SMALL, TINY, untrained

import rollmill
from rollmill.algorithms import clip_to_space
from rollmill.core.spaces import struct
from rollmill.policies.action_distribution import ActionDistribution
from rollmill.policies.evaluation import evaluate_run
from rollmill.policies.loading import load_weights
from rollmill.policies.policy import Policy
from small_ppo import small_ppo
from wordings import raises


def ppo(env, **options):
    return untrained(rollmill.ppo(env, **(SMALL | {"num_minibatches": 1, "network": TINY} | options)))


@pytest.fixture(scope="module")
def cartpole():
    return ppo("CartPole-v1")


@pytest.fixture(scope="module")
def pendulum():
    return ppo("Pendulum-v1", normalize_observations=True)


@pytest.fixture(scope="module")
def recurrent():
    return ppo("TMaze-v0", network=rollmill.NetworkConfig(torso="gru", hidden_sizes=(8,), recurrent_size=8))


def drawn(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


# --- actions ------------------------------------------------------------------------------------------


def test_a_batch_of_any_leading_axes_has_the_actions_of_its_observations(cartpole, pendulum):
    for policy, size in ((cartpole, 4), (pendulum, 3)):
        observations = drawn((2, 5, 3, size))
        actions = policy.action(observations)
        each = [policy.action(one) for one in observations.reshape(-1, size)]
        assert actions.shape == (2, 5, 3, *policy.action_space.shape)
        np.testing.assert_allclose(
            actions.reshape(len(each), -1), np.stack(each).reshape(len(each), -1), rtol=1e-5
        )
        assert policy.action(np.zeros((0, size))).shape == (0, *policy.action_space.shape)
    assert len(np.unique(cartpole.action(drawn((50, 4))))) == 2


def test_the_action_is_that_of_the_graph(cartpole):
    graph, weights = cartpole.loaded.graph, cartpole.loaded.weights
    for observation in drawn((20, 4)).astype(np.float32):
        expected = graph.greedy(weights, jax.random.key(0), (), jnp.asarray(observation), ()).action
        assert cartpole.action(observation) == expected == cartpole(observation)


def test_results_are_numpy_arrays_for_numpy_and_lists_and_jax_arrays_for_jax(cartpole):
    for observation in (np.zeros(4), [0, 0, 0, 0], np.zeros((3, 4), np.float32)):
        assert isinstance(cartpole.action(observation), np.ndarray)
        assert isinstance(cartpole.value(observation), np.ndarray)
        found = cartpole.distribution(observation)
        numbers = (
            found.logits,
            found.entropy(),
            found.mode(),
            found.sample(seed=1),
            found.log_probability(found.mode()),
        )
        assert all(isinstance(each, np.ndarray) for each in numbers)
    assert isinstance(cartpole.action(jnp.zeros(4)), jax.Array)
    assert isinstance(cartpole.distribution(jnp.zeros(4)).entropy(), jax.Array)
    assert cartpole.action(np.zeros(4)).dtype == np.int32


def test_all_but_the_shorthand_can_be_traced(cartpole):
    observations = jnp.asarray(drawn((6, 4)), jnp.float32)

    @jax.jit
    def all_of(observation, key):
        found = cartpole.distribution(observation)
        action = cartpole.action(observation, deterministic=False, key=key)
        return action, found.log_probability(action), found.entropy(), cartpole.value(observation), found

    keys = jax.random.split(jax.random.key(1), 6)
    actions, log_probs, entropies, values, found = jax.vmap(all_of)(observations, keys)
    assert isinstance(found, ActionDistribution) and found.batch_shape == (6,)
    np.testing.assert_allclose(found.log_probability(actions), log_probs, rtol=1e-5)
    np.testing.assert_allclose(cartpole.distribution(observations).entropy(), entropies, rtol=1e-5)
    np.testing.assert_allclose(cartpole.value(observations), values, rtol=1e-5)
    host = np.zeros(4, np.float32)  # a constant of the traced function
    traced = jax.jit(lambda key: cartpole.action(host, deterministic=False, key=key))(keys[0])
    assert traced == cartpole.action(host, deterministic=False, key=keys[0])
    with raises("policy-observation-remembers-cannot-be"):
        jax.jit(cartpole)(observations[0])


def test_gradients_reach_the_weights(cartpole):
    observation = jnp.ones(4)
    of = lambda weights: cartpole.with_weights(weights).distribution(observation).log_probability(jnp.int32(1))
    slopes = jax.grad(of)(cartpole.weights)
    assert jax.tree.structure(slopes) == jax.tree.structure(cartpole.weights)
    step = jax.tree.map(lambda weight, slope: weight + 1e-3 * slope, cartpole.weights, slopes)
    assert of(step) > of(cartpole.weights)
    with raises("these-weights-have-another-structure"):
        cartpole.with_weights(jax.tree.map(lambda leaf: leaf[None], cartpole.weights))


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy])
def test_a_copy_of_a_policy_acts_alike_and_remembers_on_its_own(recurrent, make):
    recurrent.reset()
    observations = drawn((3, 2))
    recurrent(observations[0])
    other = make(recurrent)
    before = jax.tree.map(np.copy, recurrent.memory)
    other(observations[1])
    jax.tree.map(np.testing.assert_array_equal, recurrent.memory, before)
    recurrent(observations[1])
    jax.tree.map(np.testing.assert_array_equal, recurrent.memory, other.memory)
    recurrent.reset()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda seen: seen | {"goal": 4}, "the observation['goal'] is 4"),
        (
            lambda seen: seen | {"goal": np.array([0, -1])} | {"position": np.zeros((2, 2))},
            "['goal'][1] is -1",
        ),
    ],
)
def test_a_category_outside_of_the_observation_space_is_refused(change, told):
    policy = ppo("DictGoal-v0")
    seen = {name: np.zeros(part.shape, part.dtype) for name, part in policy.observation_space.spaces.items()}
    assert policy.action(seen) in policy.action_space
    with raises("is-must-lie-between-and", told, "between 0 and 3"):
        policy.action(change(seen))


def test_a_pickled_policy_is_refused(cartpole):
    with raises("policy-cannot-be-pickled-because"):
        pickle.dumps(cartpole)


def test_actions_are_drawn_by_key_or_seed(cartpole, pendulum):
    observation = np.zeros(3)
    draw = lambda **options: pendulum.action(observation, deterministic=False, **options)
    assert draw(seed=3) == draw(key=jax.random.key(3)) != draw(seed=4)
    batch = cartpole.action(np.zeros((100, 4)), deterministic=False, seed=0)
    assert len(np.unique(batch)) == 2
    for wrong, sentence in (
        ({}, ("to-draw-action-give-key",)),
        ({"seed": 1, "key": jax.random.key(0)}, ("both-key-and-seed-are",)),
        ({"seed": -1}, ("seed-must-lie-between-0",)),
        ({"seed": 0.5}, ("expected-number", "seed", "0.5", "an integer")),
    ):
        with raises(*sentence):
            draw(**wrong)


def test_drawn_actions_lie_inside_the_bounds_and_their_distribution_tells_mean_and_scale(pendulum):
    observations = 3 * drawn((200, 3))
    found = pendulum.distribution(observations)
    assert found.mean.shape == found.scale.shape == (200, 1) and (found.scale > 0).all()
    np.testing.assert_array_equal(found.mode(), found.mean)
    assert np.abs(found.mean).max() > 2 == np.abs(pendulum.action(observations)).max()
    np.testing.assert_allclose(pendulum.action(observations), np.clip(found.mean, -2, 2), rtol=1e-6)
    entropy = np.log(found.scale[:, 0]) + 0.5 * np.log(2 * np.pi * np.e)
    np.testing.assert_allclose(found.entropy(), entropy, rtol=1e-5)
    with raises("this-distribution-has-no-has", "DiagonalGaussian", "logits", "mean"):
        _ = found.logits


def test_log_probabilities_are_those_of_the_softmax(cartpole):
    observations = drawn((7, 4))
    found = cartpole.distribution(observations)
    logits = found.logits
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(found.log_probability(np.ones(7, np.int64)), expected[:, 1], rtol=1e-5)
    assert cartpole.distribution(observations[0]).log_probability(1).shape == ()
    with raises("action-has-leading-axes-and", "[3]", "[7]"):
        found.log_probability(np.ones(3, int))
    with raises("to-sample-action-give-key"):
        found.sample()


# --- mistakes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("observation", "sentence"),
    [
        (
            np.zeros(3),
            ("is-expected-or-batch-them", "the observation", "float64 [3]", "float32", "4", ".., 4]"),
        ),
        (np.zeros((4, 3)), ("is-expected-or-batch-them", "float64 [4, 3]", "float32", "4")),
        (0.0, ("is-expected-or-batch-them", "float64 []", "float32", "4")),
        (["a", "b", "c", "d"], ("is-expected-or-batch-them", "float32", "4")),
        ([[1.0], [1.0, 2.0]], ("is-expected-or-batch-them", "cannot be converted to an array", "float32", "4")),
        (np.zeros(4, complex), ("is-expected-or-batch-them", "complex128 [4]", "float32")),
        (None, ("is-expected-or-batch-them", "float32", "4")),
    ],
)
def test_a_wrong_observation_is_told_with_the_expected_shape(cartpole, observation, sentence):
    for use in (cartpole, cartpole.action, cartpole.distribution, cartpole.value):
        with raises(*sentence):
            use(observation)


@pytest.mark.parametrize("array", [np.array, jnp.array])
@pytest.mark.parametrize(
    ("value", "place", "use"),
    [
        (np.nan, "[1]", lambda policy, observation: policy.action(observation)),
        (np.inf, "[1]", lambda policy, observation: policy(observation)),
        (np.nan, "[1, 1]", lambda policy, observation: policy.value(observation)),
        (-np.inf, "[1, 1]", lambda policy, observation: policy.distribution(observation)),
    ],
)
def test_numbers_that_are_not_finite_are_named(pendulum, array, value, place, use):
    observation = [1.0, value, 0.0]
    observation = array([[0.0, 1.0, 0.0], observation] if "," in place else observation, np.float32)
    with raises("is-expected-finite-number-policys", f"the observation{place}", value):
        use(pendulum, observation)
    # Of a traced observation the value is not known.
    assert np.isnan(jax.jit(pendulum.value)(jnp.full(3, jnp.nan)))


def test_fields_of_dictionaries_that_are_not_finite_are_named():
    policy = ppo("DictGoal-v0")
    observation = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), struct(policy.observation_space))
    name = next(name for name, leaf in observation.items() if leaf.dtype.kind == "f")
    observation[name].flat[0] = np.nan
    with raises("is-expected-finite-number-policys", f"the observation['{name}'][0", "nan"):
        policy.action(observation)


def test_a_memory_that_is_not_finite_is_named(recurrent):
    memory = jax.tree.map(lambda leaf: np.full(leaf.shape, np.nan, np.float32), recurrent.initial_memory())
    shape = struct(recurrent.observation_space).shape
    with raises("is-expected-finite-number-policys", "the memory", "nan"):
        recurrent.action(np.zeros(shape, np.float32), memory=memory)


def test_numbers_are_never_truncated_silently():
    policy = ppo("gymnax:Breakout-MinAtar")
    assert policy.action(np.zeros((10, 10, 4), bool)).shape == ()  # truth values are numbers
    graph = policy.loaded.graph._replace(observation_space=rollmill.make("CartPole-v1").action_space)
    discrete = Policy(policy.loaded._replace(graph=graph))
    with raises("is-expected-or-batch-them", "the observation", "float64 []", "int32"):
        discrete.action(0.5)
    with raises("is-expected-or-batch-them", "with values from 4294967296 to 4294967296"):
        discrete.action(2**32)


def test_masks_forbid_actions_and_are_checked(cartpole, pendulum):
    observations = drawn((30, 4))
    only = np.broadcast_to([False, True], (30, 2))
    assert (cartpole.action(observations, action_mask=only) == 1).all()
    assert (cartpole.action(observations, action_mask=~only, deterministic=False, seed=0) == 0).all()
    found = cartpole.distribution(observations, action_mask=only)
    np.testing.assert_allclose(found.log_probability(np.ones(30, int)), 0, atol=1e-6)
    for wrong, sentence in (
        (only[0], ("has-leading-axes-and-observation", "the action mask")),
        (np.ones((30, 3), bool), ("is-expected-or-batch-them", "the action mask", "bool")),
        (np.ones((30, 2)), ("is-expected-or-batch-them", "the action mask", "float64")),
    ):
        with raises(*sentence):
            cartpole.action(observations, action_mask=wrong)
    with raises("action-mask-needs-discrete-or"):
        pendulum.action(np.zeros(3), action_mask=[True])
    with raises("this-policy-does-not-search"):
        cartpole.action(observations[0], position=())


# --- memory -------------------------------------------------------------------------------------------


def test_a_memory_goes_in_and_out(recurrent):
    episodes = drawn((5, 3, 2)).astype(np.float32)  # five steps of three episodes
    memory, values, actions = recurrent.initial_memory(3), [], []
    for observations in episodes:
        values.append(recurrent.value(observations, memory=memory))
        action, memory = recurrent.action(observations, memory=memory)
        actions.append(action)
    assert all(isinstance(leaf, np.ndarray) and leaf.any() for leaf in jax.tree.leaves(memory))
    for episode in range(3):
        recurrent.reset()
        assert [int(recurrent(step[episode])) for step in episodes] == [int(action[episode]) for action in actions]
    _, after = jax.jit(lambda o, m: recurrent.action(o, memory=m))(episodes[0], recurrent.initial_memory(3))
    assert not np.allclose(recurrent.value(episodes[1], memory=after), recurrent.value(episodes[1], memory=memory))
    np.testing.assert_allclose(recurrent.value(episodes[1], memory=after), values[1], rtol=1e-4)


def test_a_memory_that_is_missing_or_of_another_batch_is_told(recurrent, cartpole):
    with raises("this-policy-is-recurrent-so", "(3,)"):
        recurrent.action(np.zeros((3, 2)))
    with raises("has-leading-axes-and-observation", "the memory", "[3]", "[2]"):
        recurrent.action(np.zeros((2, 2)), memory=recurrent.initial_memory(3))
    with raises("has-structure-expected", "the memory"):
        recurrent.value(np.zeros(2), memory=())
    action, memory = cartpole.action(np.zeros(4), memory=cartpole.initial_memory())
    assert memory == () and action == cartpole.action(np.zeros(4)) and not cartpole.recurrent


# --- algorithms ---------------------------------------------------------------------------------------


def test_dqn_has_values_of_actions_and_no_distribution():
    policy = untrained(rollmill.dqn("CartPole-v1", **SMALL, **REPLAY, network=TINY))
    observations = drawn((40, 4))
    values = policy.q_values(observations)
    assert values.shape == (40, 2) and values.dtype == np.float32
    np.testing.assert_array_equal(policy.action(observations), values.argmax(-1))
    assert policy.q_values(observations[0]).shape == (2,)
    with raises("policies-have-no-hint", "dqn", "distribution", "policy", "q_values"):
        policy.distribution(observations)
    with raises("policies-have-no-hint", "dqn", "value"):
        policy.value(observations)


def test_sac_squashes_and_td3_has_an_action_alone():
    sac, td3 = (
        untrained(getattr(rollmill, name)("Pendulum-v1", **SMALL, **REPLAY, network=TINY))
        for name in ("sac", "td3")
    )
    observations = drawn((30, 3))
    found = sac.distribution(observations)
    np.testing.assert_allclose(sac.action(observations), 2 * np.tanh(found.mean), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(sac.action(observations), found.mode(), rtol=1e-6)
    assert np.isfinite(found.log_probability(found.sample(seed=0))).all() and found.entropy().shape == (30,)
    assert td3.action(observations).shape == (30, 1) and np.abs(td3.action(observations)).max() <= 2
    for policy, name in ((sac, "sac"), (td3, "td3")):
        with raises("policies-have-no-hint", name, "value", "remain in the training state"):
            policy.value(observations)
        with raises("policies-have-no-hint", name, "q_values"):
            policy.q_values(observations)
    with raises("policies-have-no-hint", "td3", "distribution"):
        td3.distribution(observations)


def test_several_agents_have_dictionaries():
    graph = rollmill.mappo("TagGridWorld-Small-v0", **SMALL, num_minibatches=1, network=TINY)
    policy = untrained(graph)
    observations = [graph.observation_space.sample() for _ in range(6)]
    batch = jax.tree.map(lambda *leaves: np.stack(leaves), *observations)
    actions, found = policy.action(batch), policy.distribution(batch)
    assert isinstance(found, dict) and set(actions) == set(found) == set(graph.action_space.spaces)
    for name, space in graph.action_space.spaces.items():
        assert actions[name].shape == (6, *space.shape)
        assert found[name].batch_shape == (6, space.shape[0])
        np.testing.assert_array_equal(found[name].mode(), actions[name])
        assert found[name].log_probability(actions[name]).shape == (6, space.shape[0])
    np.testing.assert_array_equal(policy(observations[2])["runner"], actions["runner"][2])
    with raises("must-be-dictionary-got", "the observation", "the keys runner"):
        policy.action({"runner": observations[0]["runner"]})
    one = {"runner": batch["runner"][:2], "tagger": batch["tagger"]}
    with raises("parts-have-different-leading-axes", "the observation"):
        policy.action(one)
    with raises("policies-have-no-hint", "mappo", "value"):
        policy.value(batch)


@pytest.mark.slow
def test_alphazero_acts_by_its_search_or_by_its_network_alone():
    graph = rollmill.alphazero("TicTacToe-v0", **SMALL, num_minibatches=1, num_simulations=16, network=TINY)
    policy = untrained(graph)
    env = rollmill.make("TicTacToe-v0")
    observation, state = env.reset(jax.random.key(0), env.params)
    for move in (0, 3, 1, 4):  # the player to move wins by 2, at once
        observation, state = env.step(jax.random.key(0), state, jnp.int32(move), env.params)[:2]
    legal = env.action_mask(state, env.params)
    position = rollmill.position(env, state)
    assert policy.searches and policy.action(observation, position=position) == 2
    batched = lambda tree: jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), tree)
    assert policy.action(batched(observation), position=batched(position)).tolist() == [2] * 3
    alone = policy.action(observation, action_mask=legal, search=False)
    found = policy.distribution(observation, action_mask=legal)
    assert alone == found.mode() and bool(legal[alone])
    assert -1 <= float(policy.value(observation)) <= 1
    with raises("this-policy-searches-from-state"):
        policy.action(observation)
    with raises("this-policy-searches-from-state"):
        policy(observation)
    with raises("has-structure-expected", "the position"):
        policy.action(observation, position=legal)
    with raises("cannot-be-planned-in-so", "CartPole-v1"):
        rollmill.position(rollmill.make("CartPole-v1"), ())


def test_weights_are_those_of_the_checkpoint(tmp_path):
    graph = small_ppo(2)
    run = rollmill.train(graph, run_dir=tmp_path / "run", quiet=True, tensorboard=False)
    policy = rollmill.load(run.directory)
    assert policy.loaded.name == "run" and policy.loaded.iteration == 2
    expected = load_weights(run.directory).weights
    jax.tree.map(np.testing.assert_array_equal, policy.weights, expected)
    action = graph.greedy(expected, jax.random.key(0), (), jnp.ones(4), ()).action
    assert policy.action(np.ones(4)) == clip_to_space(graph.action_space, action)


def test_an_environment_with_other_categories_is_refused():
    policy = untrained(rollmill.ppo("gymnasium:FrozenLake-v1", network=TINY, **SMALL))
    played = evaluate_run(
        policy.loaded, env="gymnasium:FrozenLake-v1", env_options={"is_slippery": False}, episodes=1
    )
    assert played.returns.shape == (1,)
    with raises("has-other-than-policy-trained", "Discrete(64)", "Discrete(16)"):
        evaluate_run(policy.loaded, env="gymnasium:FrozenLake8x8-v1", episodes=1)

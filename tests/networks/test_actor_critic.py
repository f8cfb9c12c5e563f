import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

from rollmill.core.errors import UsageError
from rollmill.core.spaces import sample, struct
from rollmill.networks import (
    ActorCritic,
    DiagonalGaussian,
    NetworkConfig,
    Output,
    SeparateActorCritic,
    SharedActorCritic,
    TanhGaussian,
    action_head,
    actor_critic,
    resolve_layout,
)
from rollmill.networks.observations import has_channels_first
from wordings import raises

KEY = jax.random.key(0)
VECTOR = spaces.Box(-1.0, 1.0, (3,))
IMAGE = spaces.Box(0, 255, (10, 10, 2), np.uint8)
SMALL = {"hidden_sizes": (8,)}
SMALL_MEMORY = {**SMALL, "recurrent_size": 6}
ACTIONS = [
    spaces.Discrete(4, start=2),
    spaces.MultiDiscrete([2, 3, 5]),
    spaces.MultiDiscrete(np.array([[2, 3], [4, 1]])),
    spaces.MultiBinary(3),
    spaces.Box(-2.0, 2.0, (2,)),
    spaces.Box(-2.0, 2.0, (2, 3)),
    spaces.Box(-2.0, 2.0, ()),
]
CONFIGS = [
    NetworkConfig(**SMALL),
    NetworkConfig(**SMALL, shared_torso=True, activation="relu"),
    NetworkConfig(**SMALL_MEMORY, torso="gru", squash_actions=True, activation="swish"),
    NetworkConfig(**SMALL_MEMORY, torso="gru", shared_torso=True, state_dependent_std=True, activation="gelu"),
    NetworkConfig(**SMALL_MEMORY, torso="lstm", layer_norm=True),
    NetworkConfig(**SMALL_MEMORY, torso="lstm", shared_torso=True, residual=True),
]
NAMES = ["separate", "shared", "gru", "shared-gru", "lstm", "shared-lstm"]


def weights(network):
    return eqx.filter(network, eqx.is_inexact_array)


def observe(space, seed=0):
    return sample(jax.random.key(seed), space)


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
@pytest.mark.parametrize("action_space", ACTIONS, ids=str)
def test_actions_have_the_shape_and_dtype_of_the_space(config, action_space):
    def act(observation):
        network = actor_critic(KEY, VECTOR, action_space, config)
        assert isinstance(network, ActorCritic)
        output = network(observation, network.initial_memory())
        assert jax.tree.structure(output.memory) == jax.tree.structure(network.initial_memory())
        return *output.distribution.sample_and_log_prob(jax.random.key(1)), output.value

    action, log_prob, value = jax.eval_shape(act, observe(VECTOR))
    assert (action.shape, action.dtype) == (struct(action_space).shape, struct(action_space).dtype)
    assert value.shape == log_prob.shape == () and value.dtype == log_prob.dtype == jnp.float32


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
def test_value_is_the_value_of_the_whole_network(config):
    network = actor_critic(KEY, VECTOR, spaces.Discrete(3), config)
    memory = network.initial_memory()
    for seed in range(3):
        observation = observe(VECTOR, seed)
        output = network(observation, memory)
        np.testing.assert_allclose(network.value(observation, memory), output.value, rtol=1e-6)
        memory = output.memory


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
def test_value_does_not_touch_the_actor(config):
    network = actor_critic(KEY, VECTOR, spaces.Discrete(3), config)
    gradient = eqx.filter_grad(lambda n: n.value(observe(VECTOR), n.initial_memory()))(network)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(gradient.actor))
    if not config.shared_torso:
        assert all(not np.any(leaf) for leaf in jax.tree.leaves(gradient.actor_torso))


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
@pytest.mark.parametrize("action_space", [ACTIONS[5]], ids=str)
def test_a_batch_equals_a_loop(config, action_space):
    network = actor_critic(KEY, VECTOR, action_space, config)
    batch = jax.vmap(lambda key: sample(key, VECTOR))(jax.random.split(KEY, 4))
    memories = jax.tree.map(lambda x: jnp.tile(x, (4, 1)) + 0.1, network.initial_memory())
    outputs = jax.vmap(network)(batch, memories)
    for i in range(4):
        memory = jax.tree.map(lambda x, i=i: x[i], memories)
        one, got = network(batch[i], memory), jax.tree.map(lambda x, i=i: x[i], outputs)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(got), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


DISTINCT = {NAMES[1]: CONFIGS[1], NAMES[2]: CONFIGS[2], NAMES[5]: CONFIGS[5]}
PAIRS = [
    # Each network and each space is there in the fast ones.
    pytest.param(space, config, id=f"{space}-{name}", marks=() if (n - m) % 3 == 0 else pytest.mark.slow)
    for n, space in enumerate(ACTIONS[:5])
    for m, (name, config) in enumerate(DISTINCT.items())
]


@pytest.mark.parametrize(("action_space", "config"), PAIRS)
def test_every_weight_has_a_finite_gradient(config, action_space):
    network = actor_critic(KEY, VECTOR, action_space, config)

    def loss(network):
        output = network(observe(VECTOR), network.initial_memory())
        _, log_prob = output.distribution.sample_and_log_prob(jax.random.key(1))
        return log_prob + output.distribution.entropy() + output.value

    gradients = eqx.filter_jit(eqx.filter_grad(loss))(network)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
    assert len(jax.tree.leaves(gradients)) == len(jax.tree.leaves(weights(network)))


@pytest.mark.parametrize("config", CONFIGS[2:], ids=NAMES[2:])
def test_memory_carries_and_resets(config):
    network = actor_critic(KEY, VECTOR, spaces.Discrete(3), config)
    first = network(observe(VECTOR, 0), network.initial_memory())
    carried = network(observe(VECTOR, 1), first.memory)
    fresh = network(observe(VECTOR, 1), network.initial_memory())
    assert not np.allclose(carried.value, fresh.value)
    done = jnp.asarray(True)
    reset = jax.tree.map(lambda a, b: jnp.where(done, a, b), network.initial_memory(), first.memory)
    again = network(observe(VECTOR, 1), reset)
    np.testing.assert_array_equal(again.value, fresh.value)
    expected = [(6,)] * ((2 if config.torso == "lstm" else 1) * (1 if config.shared_torso else 2))
    assert [leaf.shape for leaf in jax.tree.leaves(first.memory)] == expected


def test_a_network_without_memory_has_the_empty_tuple():
    for config in CONFIGS[:2]:
        network = actor_critic(KEY, VECTOR, spaces.Discrete(3), config)
        assert network.initial_memory() == ()
        assert network(observe(VECTOR), ()).memory == ()


def test_the_two_kinds():
    def kind(*config):
        return type(eqx.filter_eval_shape(actor_critic, KEY, VECTOR, spaces.Discrete(2), *config))

    assert kind(CONFIGS[0]) is kind() is SeparateActorCritic
    assert kind(CONFIGS[1]) is SharedActorCritic


def test_gains_of_the_two_heads():
    network = actor_critic(KEY, VECTOR, spaces.Discrete(3), NetworkConfig())
    np.testing.assert_allclose(jnp.linalg.norm(network.critic.weight), 1.0, rtol=1e-5)
    np.testing.assert_allclose(jnp.linalg.norm(network.actor.layer.weight, axis=0), 0.01, rtol=1e-4)
    np.testing.assert_allclose(
        jnp.linalg.norm(network.actor_torso.mlp.layers[1].weight, axis=0), math.sqrt(2), rtol=1e-5
    )
    assert not np.allclose(network.actor_torso.mlp.layers[0].weight, network.critic_torso.mlp.layers[0].weight)


def test_partition_splits_the_weights_and_leaves_the_bounds():
    config = NetworkConfig(**SMALL, squash_actions=True)
    network = actor_critic(KEY, VECTOR, spaces.Box(-2.0, 7.0, (2,)), config)
    trained, static = eqx.partition(network, eqx.is_inexact_array)
    # Two layers and a bias for each torso, two heads, and the log standard deviation.
    assert len(jax.tree.leaves(trained)) == 2 + 2 + 2 + 2 + 1
    assert jax.tree.leaves(static) == []
    moved = eqx.combine(jax.tree.map(lambda x: x + 10.0, trained), static)
    assert moved.actor.bounds == ((-2.0, -2.0), (7.0, 7.0))


def test_two_networks_of_one_configuration_have_one_structure():
    space = spaces.Dict({"image": IMAGE, "vector": VECTOR})
    nets = [actor_critic(jax.random.key(i), space, spaces.Box(-1.0, 1.0, (2,)), CONFIGS[2]) for i in range(2)]
    assert jax.tree.structure(nets[0]) == jax.tree.structure(nets[1])
    assert hash(jax.tree.structure(nets[0])) == hash(jax.tree.structure(nets[1]))


@pytest.mark.parametrize("torso", ["auto", "mlp", "cnn", "gru", "resnet"])
def test_images_in_a_dictionary(torso):
    space = spaces.Dict({"image": IMAGE, "vector": VECTOR, "mode": spaces.Discrete(3)})
    network = actor_critic(KEY, space, spaces.Discrete(2), NetworkConfig(**SMALL, torso=torso))
    output = network(observe(space), network.initial_memory())
    assert isinstance(output, Output) and np.isfinite(output.value)
    convolutions = [leaf for leaf in jax.tree.leaves(network) if leaf.ndim == 4]
    assert len(convolutions) == {"mlp": 0, "resnet": 2 * (1 + 2 * 4)}.get(torso, 2)


def test_bytes_reach_the_network_scaled():
    network = actor_critic(KEY, IMAGE, spaces.Discrete(2), NetworkConfig(**SMALL))
    floats = actor_critic(KEY, spaces.Box(0.0, 1.0, IMAGE.shape), spaces.Discrete(2), NetworkConfig(**SMALL))
    image = observe(IMAGE)
    scaled = image.astype(jnp.float32) / 255.0
    np.testing.assert_allclose(network(image, ()).value, floats(scaled, ()).value, rtol=1e-4, atol=1e-6)


class TestMasks:
    def test_of_discrete(self):
        network = actor_critic(KEY, VECTOR, spaces.Discrete(4, start=2), NetworkConfig(**SMALL))
        mask = jnp.array([False, True, False, True])
        keys = jax.random.split(KEY, 500)
        distribution = network(observe(VECTOR), (), mask).distribution
        assert set(np.asarray(jax.vmap(distribution.sample)(keys)).tolist()) == {3, 5}

    @pytest.mark.parametrize(
        "action_space",
        [spaces.Discrete(3), spaces.MultiDiscrete([2, 3]), spaces.Box(-1, 1, (2,)), spaces.MultiBinary(2)],
        ids=str,
    )
    def test_may_be_the_empty_tuple_that_fragments_receive(self, action_space):
        network = actor_critic(KEY, VECTOR, action_space, NetworkConfig(**SMALL))
        without, with_mask = network(observe(VECTOR), (), None), network(observe(VECTOR), (), ())
        for one, other in zip(jax.tree.leaves(without), jax.tree.leaves(with_mask), strict=True):
            np.testing.assert_array_equal(one, other)

    def test_of_multi_discrete_cannot_unmask_the_padding(self):
        network = actor_critic(KEY, VECTOR, spaces.MultiDiscrete([2, 3]), NetworkConfig(**SMALL))
        keys = jax.random.split(KEY, 500)
        for row, drawn in [([True, False, True], {0}), ([False, False, False], {0, 1})]:
            mask = jnp.array([row, [True, True, False]])
            distribution = network(observe(VECTOR), (), mask).distribution
            actions = np.asarray(jax.vmap(distribution.sample)(keys))
            assert set(actions[:, 0].tolist()) == drawn
            assert set(actions[:, 1].tolist()) == {0, 1}
            assert np.isfinite(distribution.entropy())

    @pytest.mark.parametrize("action_space", [spaces.Discrete(3), spaces.MultiDiscrete([2, 3])], ids=str)
    def test_leave_every_gradient_finite(self, action_space):
        network = actor_critic(KEY, VECTOR, action_space, NetworkConfig(**SMALL))
        mask = jnp.zeros((*struct(action_space).shape, 3), jnp.bool_).at[..., 0].set(True)

        def loss(network):
            distribution = network(observe(VECTOR), (), mask).distribution
            return distribution.entropy() + distribution.log_prob(distribution.mode())

        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(eqx.filter_grad(loss)(network)))

    def test_of_a_wrong_shape_are_named(self):
        network = actor_critic(KEY, VECTOR, spaces.MultiDiscrete([2, 3]), NetworkConfig(**SMALL))
        with raises("action-mask-has-shape-logits", "(5,)", "(2, 3)"):
            network(observe(VECTOR), (), jnp.ones(5, jnp.bool_))

    @pytest.mark.parametrize("action_space", [spaces.MultiBinary(3), spaces.Box(-1.0, 1.0, (3,))], ids=str)
    def test_are_refused_elsewhere(self, action_space):
        network = actor_critic(KEY, VECTOR, action_space, NetworkConfig(**SMALL))
        with raises("action-mask-needs-discrete-or-multidiscrete", type(action_space).__name__):
            network(observe(VECTOR), (), jnp.ones(3, jnp.bool_))


class TestContinuous:
    box = spaces.Box(np.array([-1.0, 0.0], np.float32), np.array([1.0, 5.0], np.float32))

    def distribution(self, **options):
        network = actor_critic(KEY, VECTOR, self.box, NetworkConfig(**SMALL, **options))
        return network(observe(VECTOR), ()).distribution

    def test_raw_actions_leave_the_box(self):
        distribution = self.distribution(initial_log_std=2.0)
        assert isinstance(distribution, DiagonalGaussian)
        actions = jax.vmap(distribution.sample)(jax.random.split(KEY, 200))
        assert np.abs(actions).max() > 5.0

    def test_squashed_actions_stay_inside(self):
        distribution = self.distribution(squash_actions=True, initial_log_std=2.0)
        assert isinstance(distribution, TanhGaussian)
        actions = np.asarray(jax.vmap(distribution.sample)(jax.random.split(KEY, 500)))
        assert np.all((actions >= self.box.low) & (actions <= self.box.high))

    @pytest.mark.parametrize("state_dependent", [False, True])
    def test_the_standard_deviation_starts_where_it_should(self, state_dependent):
        distribution = self.distribution(initial_log_std=-0.5, state_dependent_std=state_dependent)
        np.testing.assert_allclose(distribution.log_std, -0.5, atol=0.05)

    def test_a_state_dependent_deviation_is_clipped(self):
        assert np.all(self.distribution(initial_log_std=9.0, state_dependent_std=True).log_std == 2.0)
        assert np.all(self.distribution(initial_log_std=-9.0, state_dependent_std=True).log_std == -5.0)


class TestErrors:
    @pytest.mark.parametrize(
        "space", [spaces.Dict({"a": VECTOR}), spaces.Tuple((VECTOR,)), spaces.Text(3)], ids=str
    )
    def test_unsupported_action_spaces(self, space):
        with raises("action-space-has-no-policy", type(space).__name__):
            action_head(KEY, space, 4)

    def test_integer_box(self):
        with raises("action-space-has-no-policy"):
            action_head(KEY, spaces.Box(0, 255, (2,), np.uint8), 4)

    @pytest.mark.parametrize(("low", "high"), [(-np.inf, np.inf), (0.0, np.inf), (-3.4e38, 3.4e38), (1.0, 1.0)])
    def test_squashing_without_bounds(self, low, high):
        with raises("actions-can-only-be-squashed"):
            action_head(KEY, spaces.Box(low, high, (2,)), 4, squash=True)

    def test_names_and_sizes(self):
        for options, message in [
            ({"torso": "mpl"}, "unknown torso 'mpl'. Did you mean mlp"),
            ({"activation": "tahn"}, "unknown activation 'tahn'. Did you mean tanh"),
            ({"hidden_sizes": (64, 0)}, "at least 1, got 0"),
            ({"torso": "cnn"}, r"torso='cnn' needs a Box of rank 3.*use torso='auto'"),
        ]:
            config = NetworkConfig()
            for name, value in options.items():
                object.__setattr__(config, name, value)  # past the type check that only tests have
            with pytest.raises(UsageError, match=message):
                actor_critic(KEY, VECTOR, spaces.Discrete(2), config)


# --- which axis of an image holds its channels --------------------------------------------------------


@pytest.mark.parametrize("torso", ["auto", "gru"])
def test_images_with_channels_first_are_seen_as_their_transposes_are(torso):
    last = spaces.Box(0, 255, (20, 24, 3), np.uint8)
    first = spaces.Box(0, 255, (3, 20, 24), np.uint8)
    config = NetworkConfig(**SMALL, torso=torso)
    image = sample(jax.random.key(1), last)
    answers = []
    for space, seen in ((last, image), (first, jnp.moveaxis(image, -1, 0))):
        network = actor_critic(KEY, space, spaces.Discrete(4), config)
        answers.append((network, network(seen, network.initial_memory())))
    (own, (distribution, value, memory)), (other, seen_first) = answers
    weights = [jax.tree.leaves(eqx.filter(network, eqx.is_inexact_array)) for network in (own, other)]
    jax.tree.map(np.testing.assert_array_equal, *weights)
    np.testing.assert_array_equal(distribution.logits, seen_first.distribution.logits)
    np.testing.assert_array_equal(value, seen_first.value)
    jax.tree.map(np.testing.assert_array_equal, memory, seen_first.memory)


@pytest.mark.parametrize(
    ("shape", "channels_first"),
    [
        ((4, 84, 84), True),
        ((1, 84, 84), True),
        ((3, 210, 160), True),
        ((16, 17, 18), True),
        ((3, 8, 8), True),
        ((84, 84, 4), False),
        ((210, 160, 3), False),
        ((10, 10, 4), False),
        ((10, 10, 16), False),  # as many planes as MinAtar's games may have
        ((7, 7, 3), False),
        ((4, 12, 3), False),
        ((5, 9, 12), False),
        ((64, 64, 64), False),
    ],
)
def test_the_axis_of_channels_is_told_by_its_size(shape, channels_first):
    space = spaces.Dict({"image": spaces.Box(0, 255, shape, np.uint8)})
    assert has_channels_first(shape) == channels_first
    assert resolve_layout(space, "auto") == ("channels_first" if channels_first else "channels_last")
    for layout in ("channels_first", "channels_last"):
        assert resolve_layout(space, layout) == layout
        assert has_channels_first(shape, layout) == (layout == "channels_first")


def test_the_axis_of_channels_can_be_said():
    space = spaces.Box(0, 255, (20, 24, 3), np.uint8)
    config = NetworkConfig(**SMALL, image_layout="channels_first", convolutions=((4, 3, 1),))
    network = actor_critic(KEY, space, spaces.Discrete(4), config)
    assert network.actor_torso.cnns[0].layers[0].kernel.shape == (3, 3, 20, 4)


def test_spaces_without_one_layout_leave_it_open():
    both = {"a": spaces.Box(0, 255, (4, 84, 84), np.uint8), "b": spaces.Box(0, 255, (84, 84, 4), np.uint8)}
    assert resolve_layout(spaces.Dict(both), "auto") == "auto"
    assert resolve_layout(VECTOR, "auto") == "auto"

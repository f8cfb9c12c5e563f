import math
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

from rollmill.lowerings.threefry import THREEFRY_CALL
from rollmill.networks import (
    cnn,
    convolution,
    feed_forward_torso,
    gru_cell,
    impala_cnn,
    layer_norm,
    linear,
    lstm_cell,
    max_pool,
    mlp,
    recurrent_torso,
    residual_mlp,
    resnet,
    wide_inputs,
)
from rollmill.networks.orthogonal import orthogonal, orthonormal_columns
from rollmill.programs.program_store import OWN_CALLS, calls_of
from wordings import raises

KEY = jax.random.key(0)


def assert_orthogonal(matrix, gain):
    matrix = np.asarray(matrix)
    rows, columns = matrix.shape
    gram = matrix @ matrix.T if rows <= columns else matrix.T @ matrix
    np.testing.assert_allclose(gram, gain**2 * np.eye(min(rows, columns)), atol=1e-5)


@pytest.mark.parametrize("shape", [(4, 64), (64, 64), (64, 3)])
@pytest.mark.parametrize("gain", [0.01, 1.0, math.sqrt(2.0)])
def test_linear_weights_are_orthogonal_with_their_gain(shape, gain):
    layer = linear(KEY, *shape, gain=gain)
    assert layer.weight.shape == shape
    assert_orthogonal(layer.weight, gain)
    np.testing.assert_array_equal(layer.bias, 0.0)


def test_linear_is_a_product():
    layer = eqx.tree_at(lambda layer: layer.bias, linear(KEY, 3, 2), jnp.array([1.0, -1.0]))
    x = jnp.array([0.5, 2.0, -1.0])
    np.testing.assert_allclose(layer(x), np.asarray(x) @ layer.weight + layer.bias, rtol=1e-6)


def test_a_batch_of_linear_is_one_matrix_product():
    layer = linear(KEY, 3, 2)
    jaxpr = str(jax.make_jaxpr(jax.vmap(layer))(jnp.zeros((7, 3))))
    assert jaxpr.count("dot_general") == 1 and "transpose" not in jaxpr


def test_convolution_against_a_loop():
    layer = convolution(KEY, 2, 3, size=2, stride=2)
    assert_orthogonal(layer.kernel.reshape(8, 3), math.sqrt(2.0))
    image = np.asarray(jax.random.normal(KEY, (5, 4, 2)))
    expected = np.zeros((2, 2, 3))
    for i in range(2):
        for j in range(2):
            patch = image[2 * i : 2 * i + 2, 2 * j : 2 * j + 2]
            expected[i, j] = np.tensordot(patch, np.asarray(layer.kernel), axes=3)
    np.testing.assert_allclose(layer(jnp.asarray(image)), expected, rtol=1e-4, atol=1e-5)


def test_same_padding_is_a_border_of_zeros():
    layer = convolution(KEY, 2, 3, size=3, stride=1, padding="SAME")
    without = convolution(KEY, 2, 3, size=3, stride=1)
    image = jax.random.normal(KEY, (6, 7, 2))
    bordered = jnp.pad(image, ((1, 1), (1, 1), (0, 0)))
    np.testing.assert_allclose(layer(image), without(bordered), rtol=1e-4, atol=1e-5)


def test_layer_norm_of_an_image():
    image = 3.0 + 2.0 * jax.random.normal(KEY, (6, 7, 4))
    normalised = layer_norm(4)(image)
    np.testing.assert_allclose([normalised.mean(), normalised.std()], [0.0, 1.0], atol=1e-4)
    moved = eqx.tree_at(lambda layer: (layer.scale, layer.shift), layer_norm(4), (jnp.full(4, 2.0), jnp.ones(4)))
    np.testing.assert_allclose(moved(image), 2 * normalised + 1, rtol=1e-5, atol=1e-5)


def test_residual_blocks_keep_the_size_of_a_board():
    network, features = resnet(KEY, (6, 7, 2), channels=8, num_blocks=3)
    output = network(jnp.ones((6, 7, 2)))
    assert output.shape == (features,) == (6 * 7 * 8,) and len(network.blocks) == 3
    block, image = network.blocks[0], jnp.abs(jax.random.normal(KEY, (6, 7, 8)))
    silent = eqx.tree_at(lambda block: block.second_norm.scale, block, jnp.zeros(8))
    np.testing.assert_array_equal(silent(image), image)  # the identity is beside the convolutions


def test_gru_cell_against_equinox():
    ours = gru_cell(KEY, 5, 4)
    biases = jax.random.normal(jax.random.key(1), (16,))
    ours = eqx.tree_at(lambda c: (c.bias, c.candidate_bias), ours, (biases[:12], biases[12:]))
    theirs = eqx.tree_at(
        lambda c: (c.weight_ih, c.weight_hh, c.bias, c.bias_n),
        eqx.nn.GRUCell(5, 4, key=KEY),
        (ours.input_weight.T, ours.hidden_weight.T, ours.bias, ours.candidate_bias),
    )
    hidden = other = jnp.zeros(4)
    for x in jax.random.normal(jax.random.key(2), (6, 5)):
        (output, hidden), other = ours(x, hidden), theirs(x, other)
        np.testing.assert_allclose(hidden, other, rtol=1e-5, atol=1e-6)
        assert output is hidden


def test_lstm_cell_against_equinox():
    ours = lstm_cell(KEY, 5, 4)
    np.testing.assert_array_equal(ours.bias, np.repeat([0.0, 1.0, 0.0, 0.0], 4))  # it remembers from the beginning
    ours = eqx.tree_at(lambda c: c.bias, ours, jax.random.normal(jax.random.key(1), (16,)))
    theirs = eqx.tree_at(
        lambda c: (c.weight_ih, c.weight_hh, c.bias),
        eqx.nn.LSTMCell(5, 4, key=KEY),
        (ours.input_weight.T, ours.hidden_weight.T, ours.bias),
    )
    state, other = ours.initial_state(), (jnp.zeros(4), jnp.zeros(4))
    for x in jax.random.normal(jax.random.key(2), (6, 5)):
        (output, state), other = ours(x, state), theirs(x, other)
        np.testing.assert_allclose(output, other[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(state.cell, other[1], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(output, state.hidden)


@pytest.mark.parametrize(("make_cell", "gates"), [(gru_cell, 3), (lstm_cell, 4)])
def test_recurrent_matrices_are_orthogonal(make_cell, gates):
    cell = make_cell(KEY, 5, 4)
    for weight in (cell.input_weight, cell.hidden_weight):
        for block in jnp.split(weight, gates, axis=1):
            assert_orthogonal(block, 1.0)


def test_mlp_by_hand_and_without_layers():
    network = mlp(KEY, 3, (4, 2), activation=jnp.tanh)
    x = jnp.array([0.5, 2.0, -1.0])
    first, second = (np.asarray(layer.weight) for layer in network.layers)
    np.testing.assert_allclose(network(x), np.tanh(np.tanh(np.asarray(x) @ first) @ second), rtol=1e-5)
    assert mlp(KEY, 3, (), activation=jnp.tanh)(x) is x


def normalised(x):
    return (x - x.mean()) / np.sqrt(x.var() + 1e-5)


def test_a_normalised_mlp_by_hand():
    network = mlp(KEY, 3, (4, 2), activation=jax.nn.relu, normalised=True)
    x = np.array([0.5, 2.0, -1.0], np.float32)
    for layer in network.layers:
        x = np.maximum(normalised(x @ np.asarray(layer.weight)), 0)
    np.testing.assert_allclose(network(jnp.array([0.5, 2.0, -1.0])), x, rtol=1e-4, atol=1e-5)


def test_a_residual_mlp_by_hand():
    network = residual_mlp(KEY, 3, (4, 4), activation=jax.nn.relu)
    assert [block.up.weight.shape for block in network.blocks] == [(4, 16), (4, 16)]
    for block in network.blocks:
        assert_orthogonal(block.down.weight, 0.5)
    x = np.array([0.5, 2.0, -1.0], np.float32) @ np.asarray(network.stem.weight)
    for block in network.blocks:
        inner = np.maximum(normalised(x) @ np.asarray(block.up.weight), 0)
        x = x + inner @ np.asarray(block.down.weight)
    np.testing.assert_allclose(network(jnp.array([0.5, 2.0, -1.0])), normalised(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sizes", [(), (4, 8)])
def test_residual_blocks_have_one_width(sizes):
    with raises("hidden-sizes-residual-blocks-need"):
        residual_mlp(KEY, 3, sizes, activation=jnp.tanh)


def test_max_pool_against_a_loop():
    image = np.asarray(jax.random.normal(KEY, (5, 4, 2)))
    bordered = np.pad(image, ((1, 1), (0, 1), (0, 0)), constant_values=-np.inf)  # as SAME pads 5 and 4
    expected = [[bordered[i : i + 3, j : j + 3].max(axis=(0, 1)) for j in (0, 2)] for i in (0, 2, 4)]
    np.testing.assert_array_equal(max_pool(jnp.asarray(image), size=3, stride=2), np.asarray(expected))


@pytest.mark.parametrize(("shape", "features"), [((84, 84, 4), 11 * 11 * 32), ((10, 7, 3), 2 * 1 * 32)])
def test_impala_halves_an_image_three_times(shape, features):
    def run(image):
        network, size = impala_cnn(KEY, shape, stages=(16, 32, 32))
        assert size == features and len(network.stages) == 3
        output = network(image)
        assert output.shape == (features,)
        return output

    jax.eval_shape(run, jnp.zeros(shape))


def test_blocks_of_impala_stand_beside_the_identity():
    network, _ = impala_cnn(KEY, (6, 6, 1), stages=(4,))
    image, stage = jax.random.normal(KEY, (6, 6, 1)), network.stages[0]
    silent = eqx.tree_at(
        lambda n: [block.second.kernel for block in n.stages[0].blocks], network, [jnp.zeros((3, 3, 4, 4))] * 2
    )
    pooled = max_pool(stage.convolution(image), size=3, stride=2)
    np.testing.assert_allclose(silent(image), jax.nn.relu(pooled).reshape(-1), rtol=1e-6)
    assert not np.allclose(silent(image), network(image))


@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (3, 3, 2), (10, 10, 4), (16, 20, 3), (35, 35, 3), (36, 36, 1), (84, 84, 4)]
)
def test_default_convolutions_fit_every_size(shape):
    def run(image):
        network, features = cnn(KEY, shape)
        assert network(image).shape == (features,)

    jax.eval_shape(run, jnp.zeros(shape))


def test_convolutions_that_do_not_fit_name_the_sizes():
    with raises("convolutions-do-not-fit-images", "9", "8", "4", "4", "3"):
        cnn(KEY, (9, 8, 3), ((8, 3, 2), (8, 4, 1)))


def test_torso_joins_images_and_vectors():
    space = spaces.Dict(
        {
            "camera": spaces.Box(0, 255, (10, 10, 3), np.uint8),
            "depth": spaces.Box(0.0, 1.0, (8, 8, 1), np.float32),
            "speed": spaces.Box(-1.0, 1.0, (2,), np.float32),
            "gear": spaces.Discrete(4),
        }
    )
    torso = feed_forward_torso(KEY, space, hidden_sizes=(16,), activation=jnp.tanh)
    assert [leaf.path for leaf in torso.images] == [("camera",), ("depth",)]
    assert torso.mlp.layers[0].weight.shape == (8 * 8 * 16 + 6 * 6 * 16 + 2 + 4, 16)
    observation = jax.tree.map(jnp.asarray, dict(space.sample()))
    features, memory = torso(observation, torso.initial_memory())
    assert features.shape == (16,) and memory == ()


@pytest.mark.parametrize("make_cell", [gru_cell, lstm_cell])
def test_recurrent_memory_carries_and_resets(make_cell):
    encoder = feed_forward_torso(KEY, spaces.Box(-1.0, 1.0, (3,)), hidden_sizes=(8,), activation=jnp.tanh)
    torso = recurrent_torso(KEY, encoder, size=5, make_cell=make_cell)
    start = torso.initial_memory()
    assert [leaf.tolist() for leaf in jax.tree.leaves(start)] == [[0.0] * 5] * len(jax.tree.leaves(start))
    inputs = jax.random.normal(KEY, (4, 3))
    _, features = jax.lax.scan(lambda memory, x: torso(x, memory)[::-1], start, inputs)
    state = start
    for x, seen in zip(inputs, features, strict=True):
        output, state = torso.cell(torso.encoder(x, ())[0], state)
        np.testing.assert_allclose(seen, output, rtol=1e-5, atol=1e-6)
    fresh, _ = torso(inputs[3], start)
    assert not np.allclose(fresh, features[3])


@pytest.mark.parametrize("shape", [(1, 5), (5, 1), (8, 8), (64, 64), (3, 3, 4, 32), (300, 129), (129, 300)])
def test_orthogonal_matrices_are_those_of_jax_initialiser(shape):
    own = orthogonal(KEY, shape, 0.5)
    np.testing.assert_allclose(own, jax.nn.initializers.orthogonal(0.5)(KEY, shape, jnp.float32), atol=2e-6)


def test_columns_that_are_nearly_the_same_become_orthonormal():
    # The condition number is about 2 / 1e-4: one projection alone would leave products of about 1e-3.
    matrix = jnp.ones((200, 150)) + 1e-4 * jax.random.normal(KEY, (200, 150))
    columns = np.asarray(orthonormal_columns(matrix), np.float64)
    np.testing.assert_allclose(columns.T @ columns, np.eye(150), atol=2e-6)


@pytest.mark.parametrize(
    "make", [partial(linear, KEY, 8, 300), partial(lstm_cell, KEY, 3, 5), partial(gru_cell, KEY, 3, 5)]
)
def test_no_library_of_linear_algebra_is_called_for_weights(make):
    text = jax.jit(make).lower().as_text()
    assert "while" in text and calls_of(text) <= {THREEFRY_CALL}


@pytest.fixture
def as_on_gpus(monkeypatch):
    """Computes on the CPU what GPUs compute."""
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *inputs, cuda, default: cuda(*inputs))


def gpu_program(function, *inputs):
    return jax.jit(function).trace(*inputs).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(("inputs", "expected"), [(1345, 1352), (1344, 1344), (1021, 1021)])
def test_wide_inputs_are_aligned_on_gpus_with_zeros_that_change_nothing(inputs, expected, request):
    layer, x = linear(KEY, inputs, 4), jax.random.normal(KEY, (inputs,))
    loss = lambda layer: jnp.sum(jnp.square(layer(x)))
    plain, plain_gradient = jax.value_and_grad(loss)(layer)
    assert f"tensor<{expected}x4xf32>" in gpu_program(layer.__call__, x)
    request.getfixturevalue("as_on_gpus")
    aligned, gradient = jax.value_and_grad(loss)(layer)
    (product,) = [eqn for eqn in jax.make_jaxpr(layer)(x).eqns if eqn.primitive.name == "dot_general"]
    assert product.invars[0].aval.shape == (expected,)
    assert product.invars[1].aval.shape == (expected, 4)
    np.testing.assert_allclose(aligned, plain, rtol=1e-5)
    np.testing.assert_allclose(gradient.weight, plain_gradient.weight, rtol=1e-4, atol=1e-5)


def test_matrices_of_a_wide_layer_have_columns_in_gpu_programs_and_equal_gradients(request):
    layer, batch = linear(KEY, 1100, 6), jax.random.normal(KEY, (5, 1100))

    def loss(layer, batch):
        return jnp.mean(jax.vmap(lambda x: jnp.sum(jnp.tanh(layer(x))))(batch))

    gradient = jax.value_and_grad(loss)
    plain = gradient(layer, batch)
    text = gpu_program(gradient, layer, batch)
    assert calls_of(text) <= OWN_CALLS, "the program can be stored"
    columns = [line for line in text.splitlines() if "@LayoutConstraint" in line]
    assert len(columns) == 4  # the weight and the output, and their gradients
    assert all("result_layouts = [dense<[0, 1]>" in line for line in columns)
    assert sum("tensor<5x6xf32>" in line for line in columns) == 2
    several = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), layer)
    assert "LayoutConstraint" not in gpu_program(jax.vmap(gradient, in_axes=(0, None)), several, batch)
    exported = jax.export.export(jax.jit(gradient), platforms=("cuda",))(layer, batch)
    assert "LayoutConstraint" not in exported.mlir_module()
    request.getfixturevalue("as_on_gpus")
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), gradient(layer, batch), plain)


@pytest.mark.parametrize("sizes", [(1000, 30, 1), (5, 3), (1100,), (600, 0, 600), (120,) * 9])
def test_parts_of_wide_inputs_are_joined_alike_on_gpus(sizes, as_on_gpus):
    parts = [jax.random.normal(jax.random.fold_in(KEY, n), (size,)) for n, size in enumerate(sizes)]
    np.testing.assert_array_equal(wide_inputs.joined(parts), np.concatenate(parts))

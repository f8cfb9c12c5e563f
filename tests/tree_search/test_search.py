"""Tree searches: the numbers of mctx, which walks through its trees, and properties of their own."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollmill.gpus.jax_settings import standard_promotion
from rollmill.tree_search import tree
from rollmill.tree_search.gumbel import gumbel_search, halving_schedule
from rollmill.tree_search.puct import NO_NOISE, RootNoise, puct_search
from rollmill.tree_search.tree import EvaluatedPosition, Expansion

ACTIONS, GAMES = 5, 32
GUMBEL = {"max_considered_actions": 4, "gumbel_scale": 0.0, "value_scale": 0.3, "rescale_values": True}


def evaluated(state):
    """Random logits, values and legal actions that follow from a state, which is a random key."""
    logits_key, value_key, legal_key = jax.random.split(jax.random.wrap_key_data(state), 3)
    legal = jax.random.bernoulli(legal_key, 0.7, (ACTIONS,)).at[0].set(True)
    logits = jnp.where(legal, 2 * jax.random.normal(logits_key, (ACTIONS,)), jnp.finfo(jnp.float32).min)
    return EvaluatedPosition(logits, jnp.tanh(jax.random.normal(value_key)), state), legal


def stepped(alternating, choice, state):
    """A random game: some actions pay, some end it."""
    key = jax.random.fold_in(jax.random.wrap_key_data(state), choice)
    reward_key, end_key = jax.random.split(key)
    reward = jnp.where(jax.random.bernoulli(end_key), jax.random.normal(reward_key), 0.0)
    discount = jnp.where(jax.random.bernoulli(end_key, 0.1), 0.0, -1.0 if alternating else 0.9)
    return Expansion(reward, discount, evaluated(jax.random.key_data(key))[0])


def by_mctx(policy, alternating, roots, legal, **settings):
    """The search of mctx from a batch of positions."""
    mctx = pytest.importorskip("mctx")

    def recurrent(params, key, choice, state):
        after = jax.vmap(partial(stepped, alternating))(choice, state)
        return mctx.RecurrentFnOutput(
            reward=after.reward,
            discount=after.discount,
            prior_logits=after.position.logits,
            value=after.position.value,
        ), after.position.state

    with standard_promotion():
        root = mctx.RootFnOutput(prior_logits=roots.logits, value=roots.value, embedding=roots.state)
        return policy((), jax.random.key(0), root, recurrent, invalid_actions=~legal, **settings)


def searched(search, alternating, roots, legal):
    """A search from each position."""
    model = partial(stepped, alternating)
    return jax.jit(jax.vmap(lambda root, legal: search(jax.random.key(0), root, legal, model)))(roots, legal)


def check_same(found, right):
    np.testing.assert_array_equal(found.choice, right.action)
    np.testing.assert_allclose(found.action_weights, right.action_weights, rtol=2e-4, atol=1e-5)
    np.testing.assert_allclose(found.value, right.search_tree.summary().value, rtol=1e-4, atol=1e-5)


def random_roots():
    states = jax.vmap(jax.random.key_data)(jax.random.split(jax.random.key(1), GAMES))
    return jax.vmap(evaluated)(states)


def test_visits_of_sequential_halving():
    assert halving_schedule(4, 12).tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert halving_schedule(1, 3).tolist() == [0, 1, 2]
    assert halving_schedule(3, 2).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("simulations", "rescale", "alternating"), [(1, True, True), (33, True, False), (80, False, True)]
)
@pytest.mark.slow
def test_gumbel_search_is_that_of_mctx(simulations, rescale, alternating):
    mctx = pytest.importorskip("mctx")
    roots, legal = random_roots()
    settings = GUMBEL | {"rescale_values": rescale}
    search = partial(gumbel_search, num_simulations=simulations, max_depth=simulations, **settings)
    found = searched(search, alternating, roots, legal)
    transform = partial(mctx.qtransform_completed_by_mix_value, value_scale=0.3, rescale_values=rescale)
    right = by_mctx(
        mctx.gumbel_muzero_policy,
        alternating,
        roots,
        legal,
        num_simulations=simulations,
        max_num_considered_actions=4,
        gumbel_scale=0.0,
        qtransform=transform,
    )
    check_same(found, right)


@pytest.mark.parametrize(("simulations", "alternating"), [(7, True), (80, False)])
@pytest.mark.slow
def test_puct_is_that_of_mctx(simulations, alternating):
    mctx = pytest.importorskip("mctx")
    roots, legal = random_roots()
    search = partial(puct_search, num_simulations=simulations, max_depth=simulations, noise=NO_NOISE)
    found = searched(search, alternating, roots, legal)
    settings = {"num_simulations": simulations, "dirichlet_fraction": 0.0, "temperature": 0.0}
    check_same(found, by_mctx(mctx.muzero_policy, alternating, roots, legal, **settings))


@pytest.mark.parametrize("levels", [2, 5, 100])
@pytest.mark.slow
def test_levels_updated_at_once_change_nothing(levels, monkeypatch):
    """On a CPU levels are updated one by one, on a GPU all of them together."""
    roots, legal = random_roots()
    search = partial(gumbel_search, num_simulations=40, max_depth=16, **GUMBEL)
    right = searched(search, True, roots, legal)
    monkeypatch.setattr(tree, "LEVELS_AT_ONCE", levels)
    found = searched(search, True, roots, legal)
    np.testing.assert_array_equal(found.choice, right.choice)
    for mine, other in zip(found, right, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_search_does_not_depend_on_deeper_ones_beside_it():
    roots, legal = random_roots()
    search = partial(gumbel_search, num_simulations=24, max_depth=24, **GUMBEL)
    together = searched(search, True, roots, legal)
    alone = searched(search, True, jax.tree.map(lambda leaf: leaf[3:4], roots), legal[3:4])
    for mine, right in zip(alone, together, strict=True):
        np.testing.assert_array_equal(mine[0], right[3])


def test_nodes_at_the_greatest_depth_are_evaluated_again():
    """With a tree of one level, values of actions are those of the positions right after them."""
    roots, legal = random_roots()

    def statistics(root, legal):
        return tree.run_search(
            root,
            partial(stepped, True),
            root_rule=lambda node: jnp.argmin(jnp.where(legal, node.edges.visits, jnp.inf)),
            rule=lambda node: jnp.zeros(node.value.shape, jnp.int32),
            num_simulations=30,
            max_depth=1,
        )

    node = jax.jit(jax.vmap(statistics))(roots, legal)
    choices = jnp.arange(ACTIONS)
    after = jax.vmap(lambda state: jax.vmap(lambda choice: stepped(True, choice, state))(choices))(roots.state)
    right = np.where(legal, after.reward + after.discount * after.position.value, 0.0)
    np.testing.assert_allclose(node.edges.value, right, rtol=1e-5, atol=1e-6)
    assert (np.asarray(node.edges.visits).sum(-1) == 30).all()
    weighed = (roots.value + (node.edges.visits * right).sum(-1)) / 31
    np.testing.assert_allclose(node.value, weighed, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_dirichlet_noise_falls_on_legal_actions_alone():
    roots, legal = random_roots()
    noise = RootNoise(fraction=1.0, concentration=0.3, temperature=1.0)
    search = partial(puct_search, num_simulations=50, max_depth=8, noise=noise)
    model = partial(stepped, True)
    keys = jax.random.split(jax.random.key(3), GAMES)
    found = jax.jit(jax.vmap(lambda key, root, legal: search(key, root, legal, model)))(keys, roots, legal)
    assert (np.asarray(found.action_weights)[~np.asarray(legal)] == 0).all()
    assert np.asarray(legal)[np.arange(GAMES), np.asarray(found.choice)].all()
    quiet = searched(partial(puct_search, num_simulations=50, max_depth=8, noise=NO_NOISE), True, roots, legal)
    assert (np.asarray(found.action_weights) != np.asarray(quiet.action_weights)).any(axis=-1).mean() > 0.5

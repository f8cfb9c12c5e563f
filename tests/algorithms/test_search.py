"""Tree searches: the numbers of mctx, which walks through its trees, and properties of their own."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollmill.algorithms.search import (
    NO_NOISE,
    EvaluatedPosition,
    Expansion,
    gumbel_search,
    puct_search,
)
from rollmill.core.jax_settings import standard_promotion

ACTIONS, GAMES = 5, 32
GUMBEL = {"max_considered_actions": 4, "gumbel_scale": 1.0, "value_scale": 0.3, "rescale_values": True}


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


def by_mctx(policy, alternating, roots, legal, key, **settings):
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
        return policy((), key, root, recurrent, invalid_actions=~legal, **settings)


def random_roots():
    states = jax.vmap(jax.random.key_data)(jax.random.split(jax.random.key(1), GAMES))
    return jax.vmap(evaluated)(states)


@pytest.mark.parametrize("alternating", [True, False], ids=["two players", "one player"])
@pytest.mark.parametrize(("simulations", "rescale"), [(1, True), (7, False), (33, True), (80, False)])
def test_gumbel_search_is_that_of_mctx(alternating, simulations, rescale):
    mctx = pytest.importorskip("mctx")
    roots, legal = random_roots()
    settings = GUMBEL | {"rescale_values": rescale, "gumbel_scale": 0.0}
    search = partial(gumbel_search, num_simulations=simulations, max_depth=simulations, **settings)
    model = partial(stepped, alternating)
    found = jax.jit(jax.vmap(lambda root, legal: search(jax.random.key(0), root, legal, model)))(roots, legal)
    transform = partial(mctx.qtransform_completed_by_mix_value, value_scale=0.3, rescale_values=rescale)
    right = by_mctx(
        mctx.gumbel_muzero_policy,
        alternating,
        roots,
        legal,
        jax.random.key(0),
        num_simulations=simulations,
        max_num_considered_actions=4,
        gumbel_scale=0.0,
        qtransform=transform,
    )
    np.testing.assert_array_equal(found.choice, right.action)
    np.testing.assert_allclose(found.action_weights, right.action_weights, rtol=2e-4, atol=1e-5)
    np.testing.assert_allclose(found.value, right.search_tree.summary().value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("alternating", [True, False], ids=["two players", "one player"])
@pytest.mark.parametrize("simulations", [1, 7, 33, 80])
def test_puct_is_that_of_mctx(alternating, simulations):
    mctx = pytest.importorskip("mctx")
    roots, legal = random_roots()
    search = partial(puct_search, num_simulations=simulations, max_depth=simulations, noise=NO_NOISE)
    model = partial(stepped, alternating)
    found = jax.jit(jax.vmap(lambda root, legal: search(jax.random.key(0), root, legal, model)))(roots, legal)
    right = by_mctx(
        mctx.muzero_policy,
        alternating,
        roots,
        legal,
        jax.random.key(0),
        num_simulations=simulations,
        dirichlet_fraction=0.0,
        temperature=0.0,
    )
    np.testing.assert_allclose(found.action_weights, right.action_weights, atol=1e-6)
    np.testing.assert_array_equal(found.choice, right.action)
    np.testing.assert_allclose(found.value, right.search_tree.summary().value, rtol=1e-4, atol=1e-5)

"""Fragments of MAPPO and IPPO against PPO's, and against straightforward code.

Shape letters: `T` steps, `E` environments, `N` rows of a minibatch, `A` agents of a kind.
"""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_rollouts import check_two_devices, collect_rollout, run
from losses_by_hand import LOOSE, assert_close, first_rows, normalise_by_hand

import rollmill
from agents_envs import crowd, lone, numbered
from one_time import run_once
from rollmill.algorithms.multi_agent_losses import condition
from rollmill.dataflow import (
    Batch,
    identity,
)

E, T = 16, 6
SMALL = {
    "num_envs": E,
    "num_steps": T,
    "total_timesteps": 10 * E * T,
    "num_minibatches": 2,
    "learning_rate": 2.5e-4,
}
NETWORK = rollmill.NetworkConfig(hidden_sizes=(6, 5))


# --- with one agent it is PPO -------------------------------------------------------------------------

NO_FEATURES = lambda state, params: jnp.zeros(0, jnp.float32)
VARIANTS = {
    "ippo": ("CartPole-v1", rollmill.ippo, None, {"target_kl": 3e-6}),
    "mappo": ("Pendulum-v1", rollmill.mappo, NO_FEATURES, {"normalize_observations": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", [pytest.param("ippo", marks=pytest.mark.slow), "mappo"])
def test_a_lone_agent_learns_what_ppo_learns(variant):
    name, algorithm, central, how = VARIANTS[variant]
    env = rollmill.make(name)
    theirs, their_rows = run(rollmill.ppo(env, **SMALL, **how, normalize_values=False))
    ours, our_rows = run(algorithm(lone(env, central), **SMALL, **how, normalize_values=False))
    for a, b in zip(jax.tree.leaves(ours.weights.networks), jax.tree.leaves(theirs.weights.network), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    if how.get("normalize_observations"):
        assert_close(ours.weights.agents["only"], theirs.weights.observations)
    assert their_rows[0].keys() == our_rows[0].keys() - {"returns/only", "episodes/return_sum/only"}
    for a, b in zip(our_rows, their_rows, strict=True):
        np.testing.assert_array_equal(a["episodes/return_sum/only"], a["episodes/return_sum"])
        for metric in b:
            np.testing.assert_allclose(a[metric], b[metric], rtol=1e-3, atol=1e-5, err_msg=metric)
    if "target_kl" in how:
        assert len({row["epochs"].item() for row in our_rows}) > 1  # some iterations ended early


# --- a rollout in which agents go out -----------------------------------------------------------------


@pytest.fixture(scope="module")
def rollout():
    graph = rollmill.mappo(crowd(), **SMALL, network=NETWORK, normalize_observations=True)
    found = collect_rollout(graph)
    steps = found.trajectory.steps
    walks, walks_on = steps.observation.active["walker"], steps.final_observation.active["walker"]
    only_cut = steps.truncated & ~steps.terminated
    shown = [~walks, walks & ~walks_on, walks_on & only_cut[..., None], walks & ~walks_on & only_cut[..., None]]
    assert all(case[:-1].any() for case in shown), "the rollout shows too little"
    return found


def view_by_hand(weights, view):
    agents = {name: normalise_by_hand(weights.agents[name], x) for name, x in view.agents.items()}
    return view._replace(agents=jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), agents))


def values_by_hand(rollout, view, *, axes):
    """In the unit of rewards, under the weights and statistics from before the rollout."""
    learner, policy = rollout.before.learner, rollout.policy
    value = lambda view: policy.values(learner.weights.networks, view, ())
    for _ in range(axes):
        value = jax.vmap(value)
    said = eqx.filter_jit(value)(view_by_hand(learner.weights, view))
    raw = lambda s, x: np.asarray(x) * np.sqrt(np.asarray(s.variance) + 1e-8) + np.asarray(s.mean)
    return {name: raw(learner.targets[name], x) for name, x in said.items()}


def advantages_by_hand(rollout, name):
    """Advantages of the active samples, `[T, E, A]`; zeros elsewhere."""
    steps = jax.device_get(rollout.trajectory.steps)
    value = values_by_hand(rollout, rollout.trajectory.steps.observation, axes=2)[name]
    final = values_by_hand(rollout, rollout.trajectory.steps.final_observation, axes=2)[name]
    last = values_by_hand(rollout, rollout.trajectory.observation, axes=1)[name]
    active, stays = steps.observation.active[name], steps.final_observation.active[name]
    advantage = np.zeros(value.shape)
    for t, e, a in np.ndindex(*value.shape):
        t = T - 1 - t
        if not active[t, e, a]:
            continue
        carried, following = 0.0, 0.0
        if not (steps.terminated[t, e] or not stays[t, e, a]):
            following = final[t, e, a] if steps.truncated[t, e] else (value[t + 1] if t < T - 1 else last)[e, a]
            carried = 0.0 if steps.truncated[t, e] or t == T - 1 else advantage[t + 1, e, a]
        delta = steps.reward[name][t, e, a] + 0.99 * following - value[t, e, a]
        advantage[t, e, a] = delta + 0.99 * 0.95 * carried
    return np.where(active, value, 0), advantage


@pytest.mark.parametrize("name", ["walker", "keeper"])
@pytest.mark.slow
def test_an_episode_ends_for_an_agent_where_it_goes_out(rollout, name):
    value, advantage = advantages_by_hand(rollout, name)
    samples, weight = rollout.batch.samples.agents[name], np.asarray(rollout.batch.samples.weight[name])
    np.testing.assert_array_equal(weight, rollout.trajectory.steps.observation.active[name])
    np.testing.assert_allclose(np.asarray(samples.advantage) * weight, advantage, **LOOSE)
    statistics = rollout.learner.targets[name]
    target = (advantage + value - np.asarray(statistics.mean)) / np.sqrt(np.asarray(statistics.variance) + 1e-8)
    np.testing.assert_allclose(np.asarray(samples.target) * weight, target * weight, **LOOSE)


@pytest.mark.slow
def test_running_statistics_are_of_active_agents_alone(rollout):
    before, after = rollout.before.learner, rollout.learner
    seen = rollout.trajectory.steps.observation
    counted = np.asarray(seen.active["walker"])
    assert 0.2 < counted.mean() < 0.8
    for old, new in ((before.weights.agents, after.weights.agents), (before.targets, after.targets)):
        gained = float(new["walker"].count - old["walker"].count)
        np.testing.assert_allclose(gained, counted.sum(), rtol=1e-5)
    n, m = float(before.weights.agents["walker"].count), counted.sum()
    mean = np.asarray(before.weights.agents["walker"].mean)
    together = (n * mean + np.asarray(seen.agents["walker"])[counted].sum(axis=0)) / (n + m)
    np.testing.assert_allclose(after.weights.agents["walker"].mean, together, rtol=1e-4)


def test_learning_starts_from_a_ratio_of_one(rollout):
    learn = lambda whole: rollout.graph.gradients(rollout.learner, rollout.graph.condition(whole, identity))
    _, metrics = eqx.filter_jit(learn)(first_rows(rollout, E * T))
    for name in ("", "/walker", "/keeper"):
        assert metrics[f"losses/clip_fraction{name}"] == 0
        assert 0 <= metrics[f"losses/approx_kl{name}"] < 1e-9


def test_returns_are_means_over_agents_of_what_they_were_paid_while_active(rollout):
    steps = jax.device_get(rollout.trajectory.steps)
    ended = steps.terminated | steps.truncated
    for name in ("walker", "keeper"):
        paid = (steps.reward[name] * steps.observation.active[name]).mean(axis=-1)
        so_far = np.asarray(steps.info["agent_returns"][name])
        begins = np.roll(ended, 1, axis=0)
        np.testing.assert_allclose(
            so_far[1:], np.where(begins, 0, np.roll(so_far, 1, axis=0))[1:] + paid[1:], **LOOSE
        )
        np.testing.assert_allclose(rollout.learner.returns[name], so_far[ended].mean(), rtol=1e-4)


# --- a minibatch --------------------------------------------------------------------------------------


def minibatch(rollout, rows=E * T // 2):
    return first_rows(rollout, rows)


def test_agents_that_are_out_change_neither_gradients_nor_metrics(rollout):
    def disturbed(leaf, active):
        out = ~active.reshape(*active.shape, *(1,) * (leaf.ndim - active.ndim))
        return jnp.where(out, (leaf * 3 + 2).astype(leaf.dtype), leaf)

    rows = minibatch(rollout).samples
    active = rows.weight["walker"] > 0
    walkers = jax.tree.map(lambda leaf: disturbed(leaf, active), rows.agents["walker"])
    walkers = walkers._replace(action=jnp.clip(walkers.action, 0, 2))
    seen = disturbed(rows.view.agents["walker"], active)
    view = rows.view._replace(agents={**rows.view.agents, "walker": seen})
    other = rows._replace(view=view, agents={**rows.agents, "walker": walkers})
    gradients = eqx.filter_jit(
        lambda b: rollout.graph.gradients(rollout.learner, rollout.graph.condition(b, identity))
    )
    assert not np.array_equal(walkers.advantage, rows.agents["walker"].advantage)
    assert_close(gradients(Batch(other)), gradients(Batch(rows)), rtol=0, atol=0)
    moved = {
        **rows.agents,
        "keeper": rows.agents["keeper"]._replace(advantage=rows.agents["keeper"].advantage ** 2),
    }
    found, before = gradients(Batch(rows._replace(agents=moved)))[0], gradients(Batch(rows))[0]
    assert not np.array_equal(jax.tree.leaves(found["keeper"])[0], jax.tree.leaves(before["keeper"])[0])


def test_rewards_of_agents_that_are_out_change_nothing(rollout):
    steps = rollout.trajectory.steps
    paid = jnp.where(steps.observation.active["walker"], steps.reward["walker"], 1000.0)
    other = rollout.trajectory._replace(steps=steps._replace(reward={**steps.reward, "walker": paid}))
    prepare = eqx.filter_jit(partial(rollout.graph.prepare, reduce=identity, replicas=1))
    (learner, batch), (_, before) = (prepare(rollout.before.learner, t) for t in (other, rollout.trajectory))
    assert_close(learner, rollout.learner)
    counted = np.asarray(before.samples.weight["walker"]) > 0
    for field in ("advantage", "target"):
        ours, theirs = (np.asarray(getattr(b.samples.agents["walker"], field)) for b in (batch, before))
        np.testing.assert_array_equal(ours[counted], theirs[counted])
        assert not np.array_equal(ours[~counted], theirs[~counted])


def test_advantages_are_standardised_for_each_kind_over_active_agents(rollout):
    each = partial(condition, rollout.policy.sets, reduce=identity, standardise=True)
    rows = jax.jit(each)(minibatch(rollout)).samples
    for name in ("walker", "keeper"):
        weight, advantage = np.asarray(rows.weight[name]), np.asarray(rows.agents[name].advantage)
        np.testing.assert_allclose(weight.mean(), 1, rtol=1e-5)
        np.testing.assert_allclose(advantage[weight > 0].mean(), 0, atol=1e-5)
        np.testing.assert_allclose(advantage[weight > 0].std(), 1, rtol=1e-4)


@pytest.mark.parametrize(("active", "expected"), [(1, [3.0]), (2, [1.0, -1.0])])
def test_the_advantage_of_a_single_active_agent_stays_as_it_is(rollout, active, expected):
    """Standardised it would be zero. Those of two, 3 and 1, become 1 and -1."""
    whole = minibatch(rollout)
    rows = whole.samples
    weight = jnp.zeros_like(rows.weight["walker"]).at[0, 0].set(1).at[1, 0].set(float(active == 2))
    advantage = jnp.zeros_like(weight).at[0, 0].set(3).at[1, 0].set(1)
    walkers = rows.agents["walker"]._replace(advantage=advantage)
    given = whole._replace(
        samples=rows._replace(weight=rows.weight | {"walker": weight}, agents=rows.agents | {"walker": walkers})
    )
    for parts in (1, 2):
        halves = jax.tree.map(lambda leaf: leaf.reshape(parts, -1, *leaf.shape[1:]), given)  # noqa: B023
        mean = partial(jax.lax.pmean, axis_name="part")
        each = partial(condition, rollout.policy.sets, reduce=mean, standardise=True, num_rows=len(weight))
        found = (
            jax.jit(jax.vmap(each, axis_name="part"))(halves)
            .samples.agents["walker"]
            .advantage.reshape(weight.shape)
        )
        np.testing.assert_allclose(found[:active, 0], expected, rtol=1e-4)


def test_unequal_parts_of_a_minibatch_make_the_whole(rollout):
    """As on two devices: one holds more active agents than the other."""
    gradients, learner = rollout.graph.gradients, rollout.learner
    whole = minibatch(rollout)
    order = jnp.argsort(whole.samples.weight["walker"].sum(axis=1))
    halves = jax.tree.map(lambda leaf: leaf[order].reshape(2, -1, *leaf.shape[1:]), whole)
    shares = [float(half.mean()) for half in halves.samples.weight["walker"]]
    assert shares[1] > 1.5 * shares[0]
    mean = partial(jax.lax.pmean, axis_name="half")
    each = lambda half: mean(gradients(learner, rollout.graph.condition(half, mean)))
    parts = eqx.filter_jit(jax.vmap(each, axis_name="half"))(halves)
    together = eqx.filter_jit(lambda b: gradients(learner, rollout.graph.condition(b, identity)))(whole)
    assert_close(jax.tree.map(lambda leaf: leaf[0], parts), together, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_two_devices_give_the_numbers_of_one():
    graph = rollmill.mappo(crowd(), **SMALL, network=NETWORK, normalize_observations=True)
    check_two_devices(graph)


# --- the update ---------------------------------------------------------------------------------------


def test_each_parameter_set_is_clipped_by_itself(rollout):
    slopes = jax.tree.map(jnp.ones_like, rollout.learner.weights.networks)
    louder = {**slopes, "walker": jax.tree.map(lambda leaf: leaf * 1e6, slopes["walker"])}
    step = eqx.filter_jit(rollout.graph.update)
    ours, theirs = (step(rollout.learner, s).weights.networks for s in (slopes, louder))
    assert_close(ours["keeper"], theirs["keeper"], rtol=0, atol=0)
    assert_close(ours["walker"], theirs["walker"])  # only the direction is left of it


@pytest.mark.slow
def test_agents_of_their_own_are_updated_one_by_one():
    graph = rollmill.ippo(numbered(), **SMALL, network=NETWORK, sharing={"agent": "independent"})
    learner = run_once(graph.start_learner, jax.random.key(0))
    firsts = jax.tree.leaves(learner.weights.networks)[0]
    assert len(firsts) == 3 and not np.array_equal(firsts[0], firsts[1])
    slopes = jax.tree.map(
        lambda leaf: jnp.asarray(np.random.default_rng(0).normal(size=leaf.shape), jnp.float32),
        learner.weights.networks,
    )
    louder = jax.tree.map(lambda leaf: leaf.at[1].multiply(1e6), slopes)
    step = eqx.filter_jit(graph.update)
    ours, theirs = (step(learner, s).weights.networks for s in (slopes, louder))
    assert_close(ours, theirs)

"""V-trace against the paper's definitions, and its fixed point on a small decision process.

Espeholt et al., "IMPALA", ICML 2018: equation 1, remarks 1 and 2, and section 4.1.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollmill.algorithms import bootstrap_values, generalised_advantages, vtrace

INF = float("inf")


@eqx.filter_jit
def compute(log_ratio, reward, value, next_value, done, gamma, clip_rho, clip_c, trace_decay):
    return vtrace(
        log_ratio,
        reward,
        value,
        next_value,
        done,
        gamma=gamma,
        clip_rho=clip_rho,
        clip_c=clip_c,
        trace_decay=trace_decay,
    )


def floats(*values):
    return jnp.array(values, jnp.float32)


def test_by_hand():
    """gamma = 1/2; ratios 2, 1/2, 4, 1; bounds 1 and 1/2 on rho and c. The second step ends an episode.

    rho = 1, 1/2, 1, 1; delta = 1 (1 + 2/2 - 4), 1/2 (2 + 8/2 - 2), 1 (3 + 6/2 - 2), 1 (4 + 2/2 - 6) = -2, 2, 4, -1
    v - V, from the back: -1; 4 + 1/2 1/2 (-1) = 3.75; 2; -2 + 1/2 1/2 2 = -1.5
    advantages: -2 + 1/2 2; 2; 4 + 1/2 (-1); -1, where only rho weighs what follows
    """
    found = compute(
        jnp.log(floats(2, 0.5, 4, 1)),
        floats(1, 2, 3, 4),
        floats(4, 2, 2, 6),
        floats(2, 8, 6, 2),
        jnp.array([False, True, False, False]),
        0.5,
        1.0,
        0.5,
        1.0,
    )
    np.testing.assert_allclose(found.target, [4 - 1.5, 2 + 2, 2 + 3.75, 6 - 1], rtol=1e-6)
    np.testing.assert_allclose(found.advantage, [-1, 2, 3.5, -1], rtol=1e-6)


class Case:
    """A random rollout of 23 steps with every kind of end; arrays in float64."""

    def __init__(self, seed):
        random = np.random.default_rng(seed)
        self.reward, self.value, self.final_value = random.normal(size=(3, 23)).astype(np.float32)
        self.log_ratio = random.normal(size=23, scale=0.7).astype(np.float32)
        self.last_value = np.float32(random.normal())
        self.terminated, self.truncated = random.random((2, 23)) < 0.15
        self.terminated[10] = self.truncated[10] = True
        self.done = self.terminated | self.truncated
        rollout = (self.value, self.last_value, self.final_value, self.terminated, self.truncated)
        self.next_value = np.asarray(eqx.filter_jit(bootstrap_values)(*map(jnp.asarray, rollout)))

    def __call__(self, gamma, clip_rho, clip_c, trace_decay):
        rollout = (self.log_ratio, self.reward, self.value, self.next_value, self.done)
        return compute(*map(jnp.asarray, rollout), gamma, clip_rho, clip_c, trace_decay)

    def pieces(self, gamma, clip_rho, clip_c, trace_decay):
        ratio = np.exp(np.float64(self.log_ratio))
        rho, c = np.minimum(clip_rho, ratio), trace_decay * np.minimum(clip_c, ratio)
        return rho, c, rho * (self.reward + gamma * self.next_value - self.value)


def by_the_sum(case, gamma, clip_rho, clip_c, trace_decay):
    """Equation 1: v_s = V(x_s) + sum_t gamma^(t-s) (prod_(i=s)^(t-1) c_i) delta_t, up to the episode's end."""
    _, c, delta = case.pieces(gamma, clip_rho, clip_c, trace_decay)
    targets = np.float64(case.value)
    for s in range(len(delta)):
        ends = np.flatnonzero(case.done[s:])
        last = s + ends[0] if len(ends) else len(delta) - 1
        targets[s] += sum(gamma ** (t - s) * np.prod(c[s:t]) * delta[t] for t in range(s, last + 1))
    return targets


def by_recursion(case, gamma, clip_rho, clip_c, trace_decay):
    """Remark 1: v_s = V(x_s) + delta_s + gamma c_s (v_(s+1) - V(x_(s+1))); and the advantages of section 4.2."""
    rho, c, delta = case.pieces(gamma, clip_rho, clip_c, trace_decay)
    targets, advantages = np.zeros(len(delta)), np.zeros(len(delta))
    for s in reversed(range(len(delta))):
        goes_on = s + 1 < len(delta) and not case.done[s]
        following = targets[s + 1] if goes_on else case.next_value[s]
        targets[s] = case.value[s] + delta[s] + gamma * c[s] * (following - case.next_value[s])
        advantages[s] = rho[s] * (case.reward[s] + gamma * following - case.value[s])
    return targets, advantages


@pytest.mark.parametrize(("clip_rho", "clip_c"), [(1.0, 1.0), (2.0, 0.5), (INF, INF)])
@pytest.mark.parametrize(("gamma", "trace_decay"), [(0.9, 1.0), (1.0, 0.8), (0.5, 0.0)])
def test_both_definitions_of_the_paper(clip_rho, clip_c, gamma, trace_decay):
    for seed in range(4):
        case, settings = Case(seed), (gamma, clip_rho, clip_c, trace_decay)
        found = case(*settings)
        np.testing.assert_allclose(found.target, by_the_sum(case, *settings), rtol=1e-3, atol=1e-4)
        targets, advantages = by_recursion(case, *settings)
        np.testing.assert_allclose(found.target, targets, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(found.advantage, advantages, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("trace_decay", [0.0, 0.7, 1.0])
def test_on_policy_it_is_generalised_advantages(trace_decay):
    """Targets for every lambda; advantages for 1, where both are the return up to the rollout's end."""
    for seed in range(3):
        case = Case(seed)
        case.log_ratio = np.zeros_like(case.log_ratio)
        found = case(0.9, 1.0, 1.0, trace_decay)
        rollout = map(jnp.asarray, (case.reward, case.value, case.next_value, case.done))
        expected = generalised_advantages(*rollout, gamma=0.9, gae_lambda=trace_decay)
        np.testing.assert_allclose(found.target, expected.target, rtol=1e-4, atol=1e-5)
        if trace_decay == 1.0:
            np.testing.assert_allclose(found.advantage, expected.advantage, rtol=1e-4, atol=1e-5)


def test_a_trace_does_not_cross_the_end_of_an_episode():
    """Steps after an end change nothing before it, whichever kind of end it is."""
    case = Case(0)
    before = case(0.9, 1.0, 1.0, 1.0)
    case.reward[11:] += 100
    after = case(0.9, 1.0, 1.0, 1.0)
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old[:11], new[:11])
        assert np.abs(np.asarray(old[11:] - new[11:])).min() > 1


# --- what it converges to -----------------------------------------------------------------------------

TRANSITION = np.array(  # [state, action, next state]
    [[[0.1, 0.6, 0.3], [0.5, 0.0, 0.5]], [[0.8, 0.1, 0.1], [0.0, 0.3, 0.7]], [[0.2, 0.2, 0.6], [0.4, 0.6, 0.0]]]
)
REWARD = np.array([[1.0, -2.0], [0.5, 3.0], [-1.0, 2.0]])
BEHAVIOUR = np.array([[0.9, 0.1], [0.3, 0.7], [0.5, 0.5]])
POLICY = np.array([[0.2, 0.8], [0.6, 0.4], [0.1, 0.9]])
GAMMA = 0.8


def values_of(policy):
    """V = sum_a pi(a) (r + gamma P V), solved."""
    transition = np.einsum("sa,san->sn", policy, TRANSITION)
    return np.linalg.solve(np.eye(3) - GAMMA * transition, np.sum(policy * REWARD, axis=1))


def between(clip_rho):
    """The policy whose values V-trace learns (equation 3): proportional to min(rho-bar mu, pi)."""
    weight = np.minimum(clip_rho * BEHAVIOUR, POLICY)
    return weight / weight.sum(axis=1, keepdims=True)


def expected_correction(value, clip_rho, clip_c):
    """E[v_s - V(x_s)] over all trajectories of two steps that the behaviour makes, for each s."""
    states, actions = np.arange(3), np.arange(2)
    paths = np.stack(np.meshgrid(states, actions, states, actions, states, indexing="ij"), -1).reshape(-1, 5)
    s0, a0, s1, a1, s2 = paths.T
    chance = BEHAVIOUR[s0, a0] * TRANSITION[s0, a0, s1] * BEHAVIOUR[s1, a1] * TRANSITION[s1, a1, s2]
    ratio = np.stack([POLICY[s0, a0] / BEHAVIOUR[s0, a0], POLICY[s1, a1] / BEHAVIOUR[s1, a1]], 1)
    reward = np.stack([REWARD[s0, a0], REWARD[s1, a1]], 1)
    rollouts = (np.log(ratio), reward, value[paths[:, [0, 2]]], value[paths[:, [2, 4]]])
    settings = (GAMMA, clip_rho, clip_c, 1.0)
    one = lambda *rollout: compute(*rollout, jnp.zeros(2, bool), *settings).target[0]
    target = np.asarray(jax.vmap(one)(*(jnp.asarray(x, jnp.float32) for x in rollouts)), np.float64)
    return np.array([np.sum((chance * (target - value[s0]))[s0 == s]) for s in states])


@pytest.mark.parametrize("clip_c", [0.3, 1.0])
@pytest.mark.parametrize("clip_rho", [0.5, 1.0, 2.0, INF])
def test_the_fixed_point_is_the_value_of_the_policy_in_between(clip_rho, clip_c):
    """It moves with rho-bar, from near the behaviour's value to the policy's, and not with c-bar."""
    fixed = values_of(between(clip_rho))
    np.testing.assert_allclose(expected_correction(fixed, clip_rho, clip_c), np.zeros(3), atol=1e-5)
    for other in (values_of(between(rho)) for rho in (0.5, 1.0, 2.0, INF) if rho != clip_rho):
        assert np.abs(expected_correction(other, clip_rho, clip_c)).max() > 0.01


def test_the_ends_of_the_range_are_the_two_policies():
    np.testing.assert_allclose(between(INF), POLICY)
    np.testing.assert_allclose(between(1e-3), BEHAVIOUR)
    distance = [np.abs(values_of(between(rho)) - values_of(POLICY)).max() for rho in (0.5, 1.0, 2.0, INF)]
    assert distance == sorted(distance, reverse=True) and distance[-1] == 0

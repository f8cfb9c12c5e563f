import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollmill.networks import (
    MASKED_LOGIT,
    Bernoulli,
    Categorical,
    DiagonalGaussian,
    Distribution,
    MultiCategorical,
    TanhGaussian,
)
from rollmill.networks.distributions import _inverse_cdf

DRAWS = 20_000


def draw(distribution, seed=0, count=DRAWS):
    return np.asarray(jax.vmap(distribution.sample)(jax.random.split(jax.random.key(seed), count)))


def tanh_gaussian(mean, std, low=-1.0, high=1.0):
    mean = jnp.asarray(np.atleast_1d(np.float32(mean)))
    std = jnp.broadcast_to(jnp.float32(std), mean.shape)
    return TanhGaussian(mean, jnp.log(std), (low,) * mean.size, (high,) * mean.size)


EXAMPLES = [
    Categorical(jnp.array([0.3, -1.0, 2.0]), start=5),
    MultiCategorical(jnp.array([[0.3, -1.0, 2.0], [0.1, 0.7, -jnp.inf]]), start=(0, -2)),
    Bernoulli(jnp.array([[0.5, -3.0], [0.0, 1.0]])),
    DiagonalGaussian(jnp.array([0.5, -1.0]), jnp.array([0.1, -0.7])),
    TanhGaussian(jnp.array([0.5, -1.0]), jnp.array([0.1, -0.7]), (-2.0, 0.0), (2.0, 1.0)),
]


@pytest.mark.parametrize("distribution", EXAMPLES, ids=lambda d: type(d).__name__)
class TestEvery:
    def test_follows_the_protocol(self, distribution):
        assert isinstance(distribution, Distribution)

    def test_shapes_and_dtypes_agree(self, distribution):
        action, log_prob = distribution.sample_and_log_prob(jax.random.key(1))
        mode = distribution.mode()
        assert (action.shape, action.dtype) == (mode.shape, mode.dtype)
        assert log_prob.shape == () == distribution.entropy().shape
        assert log_prob.dtype == jnp.float32 == distribution.entropy().dtype

    def test_sample_and_log_prob_agree_with_each(self, distribution):
        keys = jax.random.split(jax.random.key(2), 100)
        actions, log_probs = jax.vmap(distribution.sample_and_log_prob)(keys)
        np.testing.assert_array_equal(actions, jax.vmap(distribution.sample)(keys))
        np.testing.assert_allclose(log_probs, jax.vmap(distribution.log_prob)(actions), atol=1e-4)

    def test_a_batch_equals_a_loop(self, distribution):
        def everything(distribution, key):
            sampled = distribution.sample_and_log_prob(key)
            return *sampled, distribution.entropy(), distribution.mode()

        stacked = jax.tree.map(lambda x: jnp.stack([x, x + 0.5, x - 1.0]), distribution)
        keys = jax.random.split(jax.random.key(3), 3)
        batch = eqx.filter_jit(jax.vmap(everything))(stacked, keys)
        for i in range(3):
            one = eqx.filter_jit(everything)(jax.tree.map(lambda x, i=i: x[i], stacked), keys[i])
            for got, want in zip(batch, one, strict=True):
                np.testing.assert_allclose(got[i], want, rtol=1e-5, atol=1e-6)

    def test_entropy_is_the_mean_of_minus_log_prob(self, distribution):
        keys = jax.random.split(jax.random.key(4), DRAWS)
        _, log_probs = jax.vmap(distribution.sample_and_log_prob)(keys)
        error = 5.0 * np.std(log_probs) / math.sqrt(DRAWS)
        assert abs(float(distribution.entropy()) + np.mean(log_probs)) < error + 1e-4

    def test_gradients_are_finite(self, distribution):
        action = distribution.sample(jax.random.key(5))
        for f in (lambda d: d.log_prob(action), lambda d: d.entropy()):
            assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.grad(f)(distribution)))


class TestCategorical:
    @pytest.mark.parametrize("n", [1, 2, 5, 32, 40])
    def test_frequencies_follow_probabilities(self, n):
        distribution = Categorical(jax.random.normal(jax.random.key(n), (n,)), start=-3)
        actions = draw(distribution)
        probabilities = np.asarray(jax.nn.softmax(distribution.logits))
        frequencies = np.bincount(actions + 3, minlength=n) / DRAWS
        assert actions.min() >= -3 and actions.max() < n - 3
        tolerance = 5.0 * np.sqrt(probabilities * (1.0 - probabilities) / DRAWS)
        assert np.all(np.abs(frequencies - probabilities) <= tolerance + 1e-9)

    def test_log_prob_and_entropy_in_closed_form(self):
        logits = np.array([0.3, -1.0, 2.0])
        p = np.exp(logits) / np.exp(logits).sum()
        distribution = Categorical(jnp.asarray(logits, jnp.float32), start=5)
        got = [distribution.log_prob(jnp.int32(a)) for a in (5, 6, 7)]
        np.testing.assert_allclose(got, np.log(p), rtol=1e-5)
        np.testing.assert_allclose(distribution.entropy(), -(p * np.log(p)).sum(), rtol=1e-5)
        assert distribution.mode() == 7

    def test_log_prob_takes_a_narrow_integer(self):
        distribution = Categorical(jnp.zeros(4), start=1, dtype=np.dtype(np.int8))
        action, log_prob = distribution.sample_and_log_prob(jax.random.key(0))
        assert action.dtype == jnp.int8
        np.testing.assert_allclose(log_prob, -math.log(4), rtol=1e-6)

    @pytest.mark.parametrize("masked", [MASKED_LOGIT, -math.inf])
    @pytest.mark.parametrize("n", [2, 5, 8, 40])
    def test_masked_choices_are_never_drawn(self, masked, n):
        legal = np.arange(n) % 3 == 1
        distribution = Categorical(
            jnp.where(jnp.asarray(legal), jax.random.normal(jax.random.key(n), (n,)), masked)
        )
        assert legal[draw(distribution)].all()
        assert legal[int(distribution.mode())]

    @pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0 - 2.0**-23, 1.0 - 2.0**-24])
    @pytest.mark.parametrize("masked", [MASKED_LOGIT, -math.inf])
    def test_the_ends_of_the_unit_interval_reach_legal_choices_only(self, uniform, masked):
        rng = np.random.default_rng(0)
        logits = rng.normal(size=(2000, 8), scale=3.0)
        legal = rng.random((2000, 8)) < 0.4
        legal[np.arange(2000), rng.integers(8, size=2000)] = True
        logits = jnp.asarray(np.where(legal, logits, masked), jnp.float32)
        chosen = np.asarray(eqx.filter_jit(_inverse_cdf)(logits, jnp.full(2000, uniform, jnp.float32)))
        assert np.take_along_axis(legal, chosen[:, None], axis=1).all()

    @pytest.mark.parametrize("masked", [MASKED_LOGIT, -math.inf])
    def test_masked_numbers_and_gradients_are_those_of_the_legal_choices(self, masked):
        mask = jnp.array([True, False, True, False])
        logits = jnp.array([0.3, 4.0, -1.0, 2.0])

        def both(build):
            return jax.value_and_grad(lambda x: build(x).entropy() + build(x).log_prob(jnp.int32(0)))

        value, gradient = both(lambda x: Categorical(jnp.where(mask, x, masked)))(logits)
        expected, expected_gradient = both(Categorical)(logits[::2])
        np.testing.assert_allclose(value, expected, rtol=1e-6)
        np.testing.assert_allclose(gradient[::2], expected_gradient, atol=1e-6)
        np.testing.assert_array_equal(gradient[1::2], 0.0)

    def test_nothing_legal_is_uniform_and_finite(self):
        distribution = Categorical(jnp.full(3, MASKED_LOGIT))
        np.testing.assert_allclose(distribution.entropy(), math.log(3), rtol=1e-6)
        assert np.isfinite(jax.grad(lambda d: d.entropy() + d.log_prob(jnp.int32(1)))(distribution).logits).all()

    def test_an_illegal_choice_has_a_finite_log_prob(self):
        assert np.isfinite(Categorical(jnp.array([1.0, MASKED_LOGIT])).log_prob(jnp.int32(1)))


class TestMultiCategorical:
    logits = jnp.array([[0.3, -1.0, 2.0], [0.1, 0.7, -jnp.inf]])

    def test_is_the_product_of_its_choices(self):
        distribution = MultiCategorical(self.logits, start=(0, -2))
        parts = [Categorical(self.logits[0]), Categorical(self.logits[1, :2], start=-2)]
        action = jnp.array([2, -1])
        expected = sum(part.log_prob(a) for part, a in zip(parts, action, strict=True))
        np.testing.assert_allclose(distribution.log_prob(action), expected, rtol=1e-6)
        np.testing.assert_allclose(distribution.entropy(), sum(p.entropy() for p in parts), rtol=1e-6)
        np.testing.assert_array_equal(distribution.mode(), [2, -1])

    def test_frequencies_and_padding(self):
        actions = draw(MultiCategorical(self.logits, start=(0, -2)))
        assert set(actions[:, 1]) == {-2, -1}
        p = np.asarray(jax.nn.softmax(self.logits[0]))
        np.testing.assert_allclose(np.bincount(actions[:, 0]) / DRAWS, p, atol=0.02)
        assert abs(np.corrcoef(actions.T)[0, 1]) < 0.03

    def test_any_shape(self):
        distribution = MultiCategorical(jnp.zeros((2, 3, 4)), start=tuple(range(6)))
        action = distribution.sample(jax.random.key(0))
        assert action.shape == (2, 3)
        np.testing.assert_allclose(distribution.log_prob(action), -6 * math.log(4), rtol=1e-6)


class TestBernoulli:
    def test_closed_form_and_frequencies(self):
        distribution = Bernoulli(jnp.array([0.5, -3.0]))
        p = 1 / (1 + np.exp(-np.array([0.5, -3.0])))
        got = distribution.log_prob(jnp.array([1, 0], jnp.int8))
        np.testing.assert_allclose(got, math.log(p[0]) + math.log(1 - p[1]), rtol=1e-5)
        entropy = -(p * np.log(p) + (1 - p) * np.log(1 - p)).sum()
        np.testing.assert_allclose(distribution.entropy(), entropy, rtol=1e-5)
        np.testing.assert_allclose(draw(distribution).mean(axis=0), p, atol=0.02)
        np.testing.assert_array_equal(distribution.mode(), [1, 0])

    def test_large_logits_stay_finite(self):
        distribution = Bernoulli(jnp.array([200.0, -200.0]))
        np.testing.assert_allclose(distribution.log_prob(jnp.array([0, 1], jnp.int8)), -400.0)
        assert np.isfinite(jax.grad(lambda d: d.entropy())(distribution).logits).all()


class TestDiagonalGaussian:
    def test_closed_form(self):
        mean, std, action = np.array([0.5, -1.0]), np.array([2.0, 0.3]), np.array([1.5, -1.2])
        distribution = DiagonalGaussian(*(jnp.asarray(x, jnp.float32) for x in (mean, np.log(std))))
        density = np.exp(-0.5 * ((action - mean) / std) ** 2) / (std * np.sqrt(2 * np.pi))
        log_prob = distribution.log_prob(jnp.asarray(action, jnp.float32))
        np.testing.assert_allclose(log_prob, np.log(density).sum(), rtol=1e-5)
        entropy = np.log(std * np.sqrt(2 * np.pi * np.e)).sum()
        np.testing.assert_allclose(distribution.entropy(), entropy, rtol=1e-5)

    def test_moments_of_the_samples(self):
        actions = draw(DiagonalGaussian(jnp.array([0.5, -1.0]), jnp.log(jnp.array([2.0, 0.3]))))
        np.testing.assert_allclose(actions.mean(axis=0), [0.5, -1.0], atol=0.06)
        np.testing.assert_allclose(actions.std(axis=0), [2.0, 0.3], rtol=0.03)


class TestTanhGaussian:
    def test_densities_stay_plausible_where_the_mean_is_far_out(self):
        """As in soft actor-critic, whose policies may run to a bound, and whose targets contain the entropy."""
        distribution = TanhGaussian(jnp.full(1, 40.0), jnp.full(1, -3.0), (-1.0,), (1.0,))
        action, log_prob = distribution.unclipped_sample_and_log_prob(jax.random.key(0))
        slope = float(2 * (np.log(2) - 40))  # log of the tanh's slope there
        assert action == 1 and abs(float(log_prob) + slope - 3) < 4

    def test_a_mean_that_moves_on_beyond_the_limit_leaves_actions_as_likely(self):
        """A ratio of PPO would overflow otherwise: 34 and 34.5 are 580 and 590 standard deviations from 6."""
        near, far = (TanhGaussian(jnp.full(1, mean), jnp.full(1, -3.0), (-1.0,), (1.0,)) for mean in (34.0, 34.5))
        action, log_prob = near.sample_and_log_prob(jax.random.key(0))
        assert abs(float(log_prob) - 3.0 - 2.0 * (6.0 - math.log(2.0)) + 0.9) < 4.0
        np.testing.assert_allclose(far.log_prob(action), near.log_prob(action), atol=1e-5)

    def test_samples_are_the_same_either_way(self):
        distribution = TanhGaussian(jnp.array([0.5, -1.0]), jnp.array([0.1, -0.7]), (-2.0, 0.0), (2.0, 1.0))
        one = distribution.sample_and_log_prob(jax.random.key(3))
        other = distribution.unclipped_sample_and_log_prob(jax.random.key(3))
        for mine, right in zip(other, one, strict=True):
            np.testing.assert_allclose(mine, right, rtol=1e-6)

    @pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (0.8, 0.4), (-1.5, 0.7)])
    @pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (2.0, 7.0)])
    def test_density_integrates_to_one(self, mean, std, low, high):
        distribution = tanh_gaussian(mean, std, low, high)
        # Equal steps of the Gaussian variable crowd the actions where the density is steep.
        x = np.linspace(mean - 5.0 * std, mean + 5.0 * std, 4001)
        actions = (low + (high - low) * (np.tanh(x) + 1) / 2).astype(np.float32)
        log_density = jax.vmap(distribution.log_prob)(jnp.asarray(actions)[:, None])
        integral = np.trapezoid(np.exp(np.asarray(log_density, np.float64)), actions.astype(np.float64))
        np.testing.assert_allclose(integral, 1.0, atol=2e-3)

    def test_density_is_that_of_the_samples(self):
        distribution = tanh_gaussian(0.4, 0.8, -2.0, 2.0)
        edges = np.linspace(-2.0, 2.0, 21)
        observed = np.histogram(draw(distribution), edges)[0] / DRAWS
        fine = np.linspace(-2.0, 2.0, 20 * 50 + 1)
        middles = jnp.asarray((fine[1:] + fine[:-1]) / 2, jnp.float32)[:, None]
        density = np.exp(jax.vmap(distribution.log_prob)(middles))
        expected = (density * (fine[1] - fine[0])).reshape(20, 50).sum(axis=1)
        assert np.all(np.abs(observed - expected) < 5 * np.sqrt(expected / DRAWS) + 2e-3)

    @pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (3.0, 1.0), (8.0, 2.0), (0.0, 5.0), (-20.0, 0.1)])
    def test_a_stored_action_gives_back_its_log_prob(self, mean, std):
        distribution = tanh_gaussian(mean, std, -2.0, 3.0)
        keys = jax.random.split(jax.random.key(0), 2000)
        actions, log_probs = jax.vmap(distribution.sample_and_log_prob)(keys)
        again = jax.vmap(distribution.log_prob)(actions)
        assert np.all(np.isfinite(log_probs)) and np.all((actions >= -2.0) & (actions <= 3.0))
        # An error of the recovered x counts z / std times in the Gaussian's part.
        np.testing.assert_allclose(again, log_probs, atol=0.02 * (2.0 + 1.0 / std))

    @pytest.mark.parametrize("action", [-1.0, 1.0, -1.0001, 1.5, 0.9999999])
    def test_actions_at_the_bounds_have_finite_log_probs_and_gradients(self, action):
        action = jnp.full(1, action, jnp.float32)

        def log_prob(distribution, action):
            return distribution.log_prob(action)

        distribution = tanh_gaussian(0.3, 0.5)
        value = log_prob(distribution, action)
        gradients = jax.grad(log_prob, argnums=(0, 1))(distribution, action)
        assert np.isfinite(value) and all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))

    def test_entropy_against_integration(self):
        for mean, std in [(0.0, 0.2), (1.0, 1.0), (-3.0, 2.0), (0.0, 2.0)]:
            x = np.linspace(mean - 10 * std, mean + 10 * std, 100_001)
            density = np.exp(-0.5 * ((x - mean) / std) ** 2) / (std * np.sqrt(2 * np.pi))
            slope = np.log(2.5) + 2 * (np.log(2) - x - np.logaddexp(0, -2 * x))
            expected = np.log(std * np.sqrt(2 * np.pi * np.e)) + np.trapezoid(density * slope, x)
            np.testing.assert_allclose(tanh_gaussian(mean, std, 0.0, 5.0).entropy(), expected, atol=2e-3)

    def test_the_gradient_of_a_sample_passes_the_limit(self):
        def distribution(mean):
            return TanhGaussian(mean, jnp.full(1, -3.0), (-1.0,), (1.0,))

        # With the noise held, only the change of variables moves: its slope is -2 tanh(6).
        log_prob = lambda mean, key: distribution(mean).sample_and_log_prob(key)[1]
        near = jnp.full(1, 5.999)
        gradients = [jax.grad(log_prob)(near, jax.random.key(seed)) for seed in range(20)]
        np.testing.assert_allclose(gradients, 2.0 * np.tanh(6.0), rtol=1e-3)

    def test_beyond_the_limit_only_the_entropy_moves_the_mean_and_leads_back(self):
        """A policy's gradient that passed would push the mean on for ever, as nothing there changes with it."""
        far = TanhGaussian(jnp.full(1, 9.0), jnp.full(1, -1.0), (-1.0,), (1.0,))
        action = far.sample(jax.random.key(0))
        assert jax.grad(lambda distribution: distribution.log_prob(action))(far).mean == 0.0
        assert jax.grad(lambda distribution: distribution.entropy())(far).mean < 0.0

    def test_bounds_are_no_leaves(self):
        assert len(jax.tree.leaves(tanh_gaussian([0.0, 0.0], 1.0))) == 2

    def test_bounds_differ_by_dimension_and_follow_the_shape(self):
        zeros = jnp.zeros((2, 2))
        distribution = TanhGaussian(zeros, zeros, (0.0, 10.0, 20.0, 30.0), (1.0, 11.0, 21.0, 31.0))
        np.testing.assert_allclose(distribution.mode(), [[0.5, 10.5], [20.5, 30.5]])

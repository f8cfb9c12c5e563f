"""The monotonic mixing network of QMIX, which computes a team's value from the values of its agents.

Shape letters: `A` agents, `S` features of the state, `M` hidden units, `n` outputs.
"""

import math
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rollmill.core.types import Key
from rollmill.networks.layers import Linear


class Hypernetwork(eqx.Module):
    """Computes weights of another network from the state, by one linear layer, or two with a ReLU in between."""

    hidden: Linear | None
    head: Linear

    def __call__(self, state: Float[Array, " S"]) -> Float[Array, " n"]:
        """Returns the weights for one state."""
        return self.head(state if self.hidden is None else jax.nn.relu(self.hidden(state)))


class MonotonicMixer(eqx.Module):
    """Computes the value of a team, which never decreases if the value of an agent increases.

    See Rashid et al., "QMIX: Monotonic Value Function Factorisation for Deep Multi-Agent Reinforcement Learning"
    (ICML 2018), figure 2. Hypernetworks compute the weights and biases of two layers from the state. Absolute
    values keep the weights from being negative, and biases may have any sign.

    If `normalised` is true, the features of the state are normalised to mean 0 and variance 1, as in layer
    normalisation. Otherwise the weights that multiply the values grow with the size of the state. A state of one
    or two features is never normalised, because it would lose most of its information.
    """

    first: Hypernetwork
    first_bias: Hypernetwork
    last: Hypernetwork
    last_bias: Hypernetwork
    normalised: bool = eqx.field(static=True)

    def __call__(self, values: Float[Array, " A"], state: Float[Array, " S"]) -> Float[Array, ""]:
        """Returns the value of the team."""
        if self.normalised and len(state) > 2:
            centred = state - jnp.mean(state)
            state = centred / jnp.sqrt(jnp.mean(jnp.square(centred)) + 1e-5)
        first = jnp.abs(self.first(state)).reshape(len(values), -1)
        hidden = jax.nn.elu(values @ first + self.first_bias(state))
        return hidden @ jnp.abs(self.last(state)) + self.last_bias(state)[0]


def monotonic_mixer(
    key: Key, *, num_agents: int, state_size: int, mixing_size: int, hypernetwork_size: int, normalised: bool
) -> MonotonicMixer:
    """Makes a mixing network with `mixing_size` hidden units, which normalises the state if `normalised`.

    The hypernetworks of its weights have `hypernetwork_size` hidden units, or none with 0. The hypernetwork of its
    last bias has `mixing_size`.
    """
    first, first_bias, last, last_bias = jax.random.split(key, 4)
    return MonotonicMixer(
        first=_hypernetwork(first, state_size, hypernetwork_size, num_agents * mixing_size),
        first_bias=_hypernetwork(first_bias, state_size, 0, mixing_size),
        last=_hypernetwork(last, state_size, hypernetwork_size, mixing_size),
        last_bias=_hypernetwork(last_bias, state_size, mixing_size, 1),
        normalised=normalised,
    )


def _hypernetwork(key: Key, state_size: int, hidden_size: int, out_features: int) -> Hypernetwork:
    hidden_key, head_key = jax.random.split(key)
    hidden = _uniform_linear(hidden_key, state_size, hidden_size) if hidden_size else None
    return Hypernetwork(hidden, _uniform_linear(head_key, hidden_size or state_size, out_features))


def _uniform_linear(key: Key, in_features: int, out_features: int) -> Linear:
    """Returns a layer with weights and biases that are uniform up to one over the root of the number of inputs.

    This is PyTorch's default for linear layers. Biases are not zero, because a state of zeros would then give
    weights of zero, whose absolute values have no gradient.
    """
    weight_key, bias_key = jax.random.split(key)
    draw = partial(jax.random.uniform, minval=-1 / math.sqrt(in_features), maxval=1 / math.sqrt(in_features))
    return Linear(draw(weight_key, (in_features, out_features)), draw(bias_key, (out_features,)))

"""Networks: distributions, torsos and heads, and actor-critics composed of them."""

from rollmill.networks.actor_critic import (
    TORSOS,
    NetworkConfig,
    SeparateActorCritic,
    SharedActorCritic,
    actor_critic,
)
from rollmill.networks.base import ActorCritic, AgentNetwork, Distribution, Output
from rollmill.networks.critics import action_critic, action_values, deterministic_actor, stochastic_actor
from rollmill.networks.distributions import (
    MASKED_LOGIT,
    Bernoulli,
    Categorical,
    DiagonalGaussian,
    MultiCategorical,
    TanhGaussian,
)
from rollmill.networks.heads import ActionHead, action_head
from rollmill.networks.layers import Convolution, GRUCell, Linear, convolution, gru_cell, linear
from rollmill.networks.observations import flat_size, flatten, resolve_layout
from rollmill.networks.registry import NetworkFactory, find_network, register_network, registered_networks
from rollmill.networks.torsos import (
    CNN,
    MLP,
    FeedForwardTorso,
    RecurrentTorso,
    Torso,
    cnn,
    feed_forward_torso,
    mlp,
    recurrent_torso,
)

__all__ = [
    "CNN",
    "MASKED_LOGIT",
    "MLP",
    "TORSOS",
    "ActionHead",
    "ActorCritic",
    "AgentNetwork",
    "Bernoulli",
    "Categorical",
    "Convolution",
    "DiagonalGaussian",
    "Distribution",
    "FeedForwardTorso",
    "GRUCell",
    "Linear",
    "MultiCategorical",
    "NetworkConfig",
    "NetworkFactory",
    "Output",
    "RecurrentTorso",
    "SeparateActorCritic",
    "SharedActorCritic",
    "TanhGaussian",
    "Torso",
    "action_critic",
    "action_head",
    "action_values",
    "actor_critic",
    "cnn",
    "convolution",
    "deterministic_actor",
    "feed_forward_torso",
    "find_network",
    "flat_size",
    "flatten",
    "gru_cell",
    "linear",
    "mlp",
    "recurrent_torso",
    "register_network",
    "registered_networks",
    "resolve_layout",
    "stochastic_actor",
]

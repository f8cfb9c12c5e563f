"""Neural networks: torsos, heads, action distributions, and actor-critics."""

from rollmill.networks.actor_critic import (
    TORSOS as TORSOS,
    NetworkConfig as NetworkConfig,
    SeparateActorCritic as SeparateActorCritic,
    SharedActorCritic as SharedActorCritic,
    actor_critic as actor_critic,
)
from rollmill.networks.base import (
    ActorCritic as ActorCritic,
    AgentNetwork as AgentNetwork,
    Distribution as Distribution,
    Output as Output,
    RecurrentAgentNetwork as RecurrentAgentNetwork,
)
from rollmill.networks.critics import (
    action_critic as action_critic,
    action_values as action_values,
    deterministic_actor as deterministic_actor,
    recurrent_critic as recurrent_critic,
    recurrent_stochastic_actor as recurrent_stochastic_actor,
    stochastic_actor as stochastic_actor,
)
from rollmill.networks.distributions import (
    MASKED_LOGIT as MASKED_LOGIT,
    Bernoulli as Bernoulli,
    Categorical as Categorical,
    DiagonalGaussian as DiagonalGaussian,
    MultiCategorical as MultiCategorical,
    TanhGaussian as TanhGaussian,
)
from rollmill.networks.heads import ActionHead as ActionHead, action_head as action_head
from rollmill.networks.layers import (
    Convolution as Convolution,
    GRUCell as GRUCell,
    LayerNorm as LayerNorm,
    Linear as Linear,
    LSTMCell as LSTMCell,
    LSTMState as LSTMState,
    convolution as convolution,
    gru_cell as gru_cell,
    layer_norm as layer_norm,
    linear as linear,
    lstm_cell as lstm_cell,
    max_pool as max_pool,
)
from rollmill.networks.mixing import MonotonicMixer as MonotonicMixer, monotonic_mixer as monotonic_mixer
from rollmill.networks.observations import (
    flat_size as flat_size,
    flatten as flatten,
    resolve_layout as resolve_layout,
)
from rollmill.networks.registry import (
    NetworkFactory as NetworkFactory,
    find_network as find_network,
    is_network as is_network,
    register_network as register_network,
    registered_networks as registered_networks,
)
from rollmill.networks.torsos import (
    CNN as CNN,
    MLP as MLP,
    FeedForwardTorso as FeedForwardTorso,
    ImpalaCNN as ImpalaCNN,
    RecurrentTorso as RecurrentTorso,
    ResidualMLP as ResidualMLP,
    ResNet as ResNet,
    Torso as Torso,
    cnn as cnn,
    feed_forward_torso as feed_forward_torso,
    impala_cnn as impala_cnn,
    mlp as mlp,
    recurrent_torso as recurrent_torso,
    residual_mlp as residual_mlp,
    resnet as resnet,
)

"""AlphaZero on games for two players, and MAPPO on Tag.

In Tag, taggers and runners learn at the same time, with separate parameters. The environments follow WarpDrive, at
sizes that two CPU cores can train.
"""

from rollmill.algorithms import AlphaZeroConfig, MAPPOConfig
from rollmill.networks import NetworkConfig
from rollmill.recipes.classic import Recipe


def alphazero_tic_tac_toe() -> Recipe:
    """AlphaZero on TicTacToe, which takes about a minute on two cores. With 128 simulations, it then never loses.

    Games begin with up to five random moves, so that the policy also learns replies to bad moves.
    """
    config = AlphaZeroConfig(
        total_timesteps=200_000,
        num_envs=64,
        num_steps=16,
        num_simulations=32,
        num_minibatches=4,
        learning_rate=2e-3,
        network=NetworkConfig(activation="relu", shared_torso=True),
    )
    summary = "Tic-tac-toe by self-play in a minute on two cores"
    openings = {"random_plies": 5, "fewest_random_plies": 0}
    return Recipe("alphazero", "TicTacToe-v0", config, summary, openings)


def alphazero_connect_four() -> Recipe:
    """AlphaZero on ConnectFour, for a GPU.

    Games begin with up to 28 random moves, so that the policy also sees positions that good players avoid.
    """
    config = AlphaZeroConfig(
        total_timesteps=29_491_200,
        num_envs=2048,
        num_steps=32,
        num_simulations=32,
        update_epochs=3,
        num_minibatches=32,
        learning_rate=1e-3,
        anneal_lr=True,
        weight_decay=1e-4,
        network=NetworkConfig(
            torso="resnet", num_blocks=4, channels=64, hidden_sizes=(128,), activation="relu", shared_torso=True
        ),
    )
    summary = "Connect Four by self-play, in seven minutes on one H200"
    openings = {"random_plies": 28, "fewest_random_plies": 0}
    return Recipe("alphazero", "ConnectFour-v0", config, summary, openings)


def tag_gridworld() -> Recipe:
    """MAPPO on TagGridWorld: four taggers and a runner on 21 x 21 cells."""
    config = MAPPOConfig(
        total_timesteps=1_000_000,
        num_envs=64,
        num_steps=32,
        update_epochs=4,
        num_minibatches=4,
        learning_rate=1e-3,
        ent_coef=0.01,
    )
    return Recipe("mappo", "TagGridWorld-Small-v0", config, "Tag on a grid in a minute on two cores")


def tag_continuous() -> Recipe:
    """MAPPO on TagContinuous: three taggers and nine slower runners on a square."""
    config = MAPPOConfig(
        total_timesteps=640_000,
        num_envs=64,
        num_steps=50,
        update_epochs=4,
        num_minibatches=4,
        learning_rate=3e-3,
        gamma=0.97,
        ent_coef=0.003,
    )
    return Recipe("mappo", "TagContinuous-Small-v0", config, "Tag on a square in two minutes on two cores")


RECIPES = {
    "alphazero-connect-four": alphazero_connect_four,
    "alphazero-tic-tac-toe": alphazero_tic_tac_toe,
    "tag-continuous": tag_continuous,
    "tag-gridworld": tag_gridworld,
}

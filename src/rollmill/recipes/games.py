"""AlphaZero on games for two players, at sizes that two CPU cores can train."""

from rollmill.algorithms import AlphaZeroConfig
from rollmill.networks import NetworkConfig
from rollmill.recipes.classic import Recipe


def alphazero_tic_tac_toe() -> Recipe:
    """AlphaZero on TicTacToe: self-play ends in draws, as perfect play does."""
    config = AlphaZeroConfig(
        total_timesteps=150_000,
        num_envs=64,
        num_steps=16,
        num_simulations=32,
        num_minibatches=4,
        learning_rate=3e-3,
        network=NetworkConfig(activation="relu", shared_torso=True),
    )
    return Recipe("alphazero", "TicTacToe-v0", config, "Tic-tac-toe by self-play in a minute on two cores")


def alphazero_connect_four() -> Recipe:
    """AlphaZero on ConnectFour, with residual blocks."""
    config = AlphaZeroConfig(
        total_timesteps=5_000_000,
        num_envs=256,
        num_steps=42,
        num_simulations=32,
        num_minibatches=8,
        learning_rate=1e-3,
        weight_decay=1e-4,
        network=NetworkConfig(
            torso="resnet", num_blocks=2, channels=32, hidden_sizes=(64,), activation="relu", shared_torso=True
        ),
    )
    return Recipe("alphazero", "ConnectFour-v0", config, "Connect Four by self-play, with residual blocks")


RECIPES = {
    "alphazero-connect-four": alphazero_connect_four,
    "alphazero-tic-tac-toe": alphazero_tic_tac_toe,
}

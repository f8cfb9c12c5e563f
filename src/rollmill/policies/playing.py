"""A game between a person and the policy of a run, move by move."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from rollmill.algorithms import discrete_action
from rollmill.core.errors import UsageError
from rollmill.core.types import NO_OPTIONS, Environment, Options, Timestep
from rollmill.envs import record_episodes
from rollmill.envs.board_games import SYMBOLS
from rollmill.policies.environments import check_same_spaces, on_environment
from rollmill.policies.matches import game_of
from rollmill.policies.policy import LoadedRun


class GameAgainstPolicy:
    """A game between a person and a trained policy, in `env` or by default in the run's game.

    A `stochastic` policy samples its actions as in training, instead of taking the most likely ones. Raises a
    `UsageError` if the game does not have two players, or cannot be drawn with characters.
    """

    def __init__(
        self,
        loaded: LoadedRun,
        *,
        env: Environment | str | None = None,
        env_options: Options = NO_OPTIONS,
        person_first: bool = True,
        stochastic: bool = False,
        seed: int = 0,
    ) -> None:
        game = game_of(loaded, env, env_options)
        check_same_spaces(loaded.graph, game)
        graph, self.env = on_environment(loaded.graph, game), record_episodes(game)
        if self.env.render is None:
            raise UsageError(
                f"{self.env.name} cannot be shown as text. hint: ConnectFour-v0 and TicTacToe-v0 can, and so can "
                "your own environments that define `render`."
            )
        self._weights, self._action_mask = loaded.weights, jax.jit(graph.action_mask)
        self._decide = jax.jit(graph.deployed_policy(stochastic=stochastic))
        self._step = jax.jit(self.env.step)
        self._memory = graph.start_memory()
        self._person, self._plies = 0 if person_first else 1, 0
        start_key, self._key = jax.random.split(jax.random.key(seed))
        self._observation, self._state = jax.jit(self.env.reset)(start_key, self.env.params)
        self._return: float | None = None

    @property
    def board(self) -> str:
        """The board, drawn with characters on several lines."""
        assert self.env.render is not None
        return self.env.render(self._state, self.env.params)

    @property
    def symbol(self) -> str | None:
        """The person's symbol on the board, or None if the environment does not specify it."""
        symbols = SYMBOLS.get(self.env.name)
        return None if symbols is None else symbols[self._person]

    @property
    def over(self) -> bool:
        """True once the game has ended."""
        return self._return is not None

    @property
    def persons_turn(self) -> bool:
        """Returns whether it is the person's turn."""
        assert self.env.to_move is not None
        return not self.over and int(self.env.to_move(self._state, self.env.params)) == self._person

    @property
    def legal_actions(self) -> list[int]:
        """The legal actions of the player to move."""
        space: Any = self.env.action_space
        first = int(space.start)
        if self.env.action_mask is None:
            return list(range(first, first + int(space.n)))
        return [first + int(i) for i in np.flatnonzero(self.env.action_mask(self._state, self.env.params))]

    @property
    def result(self) -> Literal["won", "drawn", "lost"] | None:
        """The result for the person, or None while the game continues."""
        if self._return is None:
            return None
        for_person = self._return if self._person == 0 else -self._return
        return "won" if for_person > 0 else "lost" if for_person < 0 else "drawn"

    def suggestion(self) -> int:
        """Returns the action that the policy would choose for the player to move, without changing the game."""
        return int(self._decision().action)

    def move(self, action: int) -> None:
        """Makes the person's move. Raises a `UsageError` with the legal moves if it is illegal."""
        legal = self.legal_actions
        if action not in legal:
            raise UsageError(f"{action} is not a legal move. Legal moves: {', '.join(map(str, legal))}.")
        first = int(getattr(self.env.action_space, "start", 0))
        self._advance(discrete_action(self.env, jnp.int32(action - first)))

    def reply(self) -> int:
        """Makes the policy's move and returns its action."""
        decision = self._decision()
        self._memory = decision.memory
        self._advance(decision.action)
        return int(decision.action)

    def _decision(self) -> Any:
        known = self._action_mask((self._state, jnp.int32(0)))
        return self._decide(self._weights, self._ply_key(1), self._memory, self._observation, known)

    def _advance(self, action: Any) -> None:
        timestep: Timestep = self._step(self._ply_key(0), self._state, action, self.env.params)
        self._plies += 1
        self._state, self._observation = timestep.state, timestep.observation
        if timestep.terminated | timestep.truncated:
            self._return = float(timestep.info["episode_return"])

    def _ply_key(self, purpose: int) -> jax.Array:
        return jax.random.fold_in(self._key, 2 * self._plies + purpose)

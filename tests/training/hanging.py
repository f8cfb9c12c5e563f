"""An environment of Gymnasium that hangs once in a process's life, and in one process only."""

import os
import threading
from pathlib import Path

import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

FILE = "ROLLMILL_TEST_HUNG"
"""The environment variable that names the file which whoever hangs makes."""


class Hanging(CartPoleEnv):
    """CartPole that stops answering at its hundredth step."""

    def __init__(self):
        super().__init__()
        self.steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps == 100:
            self.hang_unless_another_did()
        return super().step(action)

    def hang_unless_another_did(self):
        try:
            Path(os.environ[FILE]).touch(exist_ok=False)
        except FileExistsError:
            return
        threading.Event().wait()


gymnasium.register("Hanging-v0", Hanging)

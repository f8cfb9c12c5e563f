"""Host environments whose numbers are known, and which misbehave when told to."""

import gymnasium
import numpy as np
from gymnasium import spaces

TERMINATE, TRUNCATE = 2, 3
"""Actions that end an episode."""


class Script(gymnasium.Env):
    """Observes `[steps so far, a draw of its generator]` in float64; the reward is the action."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Discrete(4)

    def __init__(self):
        self.count, self.closed = 0, False

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.observe(), {}

    def step(self, action):
        self.count += 1
        return self.observe(), float(action), action == TERMINATE, action == TRUNCATE, {}

    def observe(self):
        return np.array([self.count, self.np_random.random()])

    def close(self):
        self.closed = True


class Masked(Script):
    """Forbids the action of its count, modulo four."""

    def reset(self, *, seed=None, options=None):
        observation, _ = super().reset(seed=seed)
        return observation, {"action_mask": self.mask()}

    def step(self, action):
        *rest, _ = super().step(action)
        return *rest, {"action_mask": self.mask()}

    def mask(self):
        return (np.arange(4) != self.count % 4).astype(np.int8)


class Parts(gymnasium.Env):
    """Spaces with parts; it keeps the actions that it was given."""

    observation_space = spaces.Dict(
        {
            "image": spaces.Box(0, 255, (2, 2), np.uint8),
            "pair": spaces.Tuple((spaces.Discrete(5), spaces.Box(-1.0, 1.0, (), np.float64))),
        }
    )
    action_space = spaces.Dict(
        {
            "push": spaces.Box(-1.0, 1.0, (2,), np.float64),
            "switch": spaces.Tuple((spaces.Discrete(3, start=1), spaces.MultiDiscrete([2, 2]))),
        }
    )

    def __init__(self):
        self.given, self.broken_after = [], np.inf

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observe(), {}

    def step(self, action):
        self.given.append(action)
        return self.observe(), 1, False, False, {}

    def observe(self):
        count = len(self.given)
        observation = {"image": np.full((2, 2), count, np.uint8), "pair": (count, count / 8)}
        if count > self.broken_after:
            observation["pair"] = (count, np.zeros(3))
        return observation


def keeping(made, kind=Script, **attributes):
    """A function that makes environments and appends each to `made`."""

    def make():
        made.append(kind())
        for name, value in attributes.items():
            setattr(made[-1], name, value)
        return made[-1]

    return make

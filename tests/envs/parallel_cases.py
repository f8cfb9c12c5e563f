"""Host environments of several agents whose numbers are known, with PettingZoo's parallel interface."""

import numpy as np
from gymnasium import spaces

DIE, STOP_ALL, STOP_ALONE, RAISE = 2, 3, 4, 5
"""Actions: the agent terminates; all are truncated; it alone is truncated; the environment raises."""


class Crew:
    """Rovers 0 and 1 and a scout: each observes `[steps so far, its number]`, and its reward is its action."""

    possible_agents = ["rover_0", "scout_0", "rover_1"]
    sizes = {"rover": 2, "scout": 3}
    metadata = {"render_fps": 5}
    render_mode = "rgb_array"

    def __init__(self, masked=False, most=None):
        self.agents, self.count, self.given, self.closed = [], 0, [], False
        self.masked, self.most, self.seed = masked, most, None

    def observation_space(self, agent):
        return spaces.Box(-np.inf, np.inf, (self.sizes[agent.partition("_")[0]],), np.float64)

    def action_space(self, agent):
        return spaces.Discrete(6)

    def reset(self, seed=None, options=None):
        self.agents, self.count, self.seed = list(self.possible_agents), 0, seed
        return self._observe(self.agents), self._infos(self.agents)

    def step(self, actions):
        self.given.append(actions)
        self.count += 1
        if RAISE in actions.values():
            raise RuntimeError("the crew is lost")
        limit = self.most is not None and self.count >= self.most
        terminated = {agent: action == DIE for agent, action in actions.items()}
        truncated = {a: limit or STOP_ALL in actions.values() or b == STOP_ALONE for a, b in actions.items()}
        acted = self.agents
        self.agents = [agent for agent in acted if not (terminated[agent] or truncated[agent])]
        rewards = {agent: float(action) for agent, action in actions.items()}
        return self._observe(acted), rewards, terminated, truncated, self._infos(acted)

    def render(self):
        return np.full((4, 6, 3), self.count, np.uint8)

    def close(self):
        self.closed = True

    def _observe(self, agents):
        return {
            agent: np.resize([self.count, float(agent[-1])], self.sizes[agent.partition("_")[0]])
            for agent in agents
        }

    def _infos(self, agents):
        mask = (np.arange(6) != self.count % 6).astype(np.int8)
        return {agent: {"action_mask": mask} if self.masked else {} for agent in agents}

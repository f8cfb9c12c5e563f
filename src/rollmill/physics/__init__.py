"""Physics of articulated robots in plain JAX, in the formulation of MuJoCo, independent of reinforcement learning.

`load` reads MJCF or URDF with the MuJoCo compiler, and `step(model, state, control)` is a pure function that
advances one robot.
"""

from rollmill.physics.comparing import PhysicsComparison, compare
from rollmill.physics.loading import ITERATIONS, NotCovered, load, outline
from rollmill.physics.model import Model, Params, RobotState, Structure
from rollmill.physics.stepping import initial_state, step

__all__ = [
    "ITERATIONS",
    "PhysicsComparison",
    "Model",
    "NotCovered",
    "Params",
    "RobotState",
    "Structure",
    "compare",
    "initial_state",
    "load",
    "outline",
    "step",
]

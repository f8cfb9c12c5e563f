"""Physics of articulated robots in plain JAX, in the formulation of MuJoCo, independent of reinforcement learning.

`load` reads MJCF or URDF with the MuJoCo compiler, and `step(model, state, control)` is a pure function that
advances one robot.
"""

from rollmill.physics.comparison import PhysicsComparison as PhysicsComparison, compare as compare
from rollmill.physics.loading import (
    ITERATIONS as ITERATIONS,
    UnsupportedModel as UnsupportedModel,
    load as load,
    load_outline as load_outline,
)
from rollmill.physics.model import (
    Model as Model,
    Params as Params,
    RobotState as RobotState,
    Structure as Structure,
)
from rollmill.physics.stepping import initial_state as initial_state, step as step

"""Environments draw their states."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rollmill
from rollmill.core.drawing import Circle, Drawing, Line
from rollmill.envs.drawings import RED
from rollmill.envs.drawings.classic import draw_acrobot, draw_pendulum
from rollmill.envs.drawings.tag import draw_grid
from rollmill.pictures import rasterise

NAMES = [
    "Acrobot-v1",
    "CartPole-v1",
    "ConnectFour-v0",
    "DictGoal-v0",
    "MountainCar-v0",
    "MountainCarContinuous-v0",
    "Pendulum-v1",
    "TagContinuous-Small-v0",
    "TagGridWorld-Small-v0",
    "TicTacToe-v0",
    "gymnax:CartPole-v1",
    "gymnax:Pendulum-v1",
    "gymnax:Breakout-MinAtar",
]


@pytest.mark.parametrize("name", NAMES)
def test_the_first_state_can_be_drawn(name):
    if name.startswith("gymnax:"):
        pytest.importorskip("gymnax", reason="its environments need it")
    env = rollmill.make(name)
    assert env.draw is not None
    _, state = jax.jit(env.reset)(jax.random.key(0), env.params)
    picture = rasterise(env.draw(state, env.params), 64)
    assert max(picture.shape) == 64 and len(np.unique(picture.reshape(-1, 3), axis=0)) > 2


def test_angles_are_drawn_as_they_are_defined():
    rod = next(shape for shape in draw_pendulum(np.pi / 2).shapes if isinstance(shape, Line))
    np.testing.assert_allclose(rod.points[1], (1.0, 0.0), atol=1e-6)
    links = [shape for shape in draw_acrobot(0.0, np.pi / 2).shapes if isinstance(shape, Line)][1:]
    np.testing.assert_allclose(links[0].points[1], (0.0, -1.0), atol=1e-6)
    np.testing.assert_allclose(links[1].points[1], (1.0, -1.0), atol=1e-6)


def test_stones_lie_where_they_were_dropped():
    env = rollmill.make("ConnectFour-v0")
    _, state = env.reset(jax.random.key(0), env.params)
    for column in (3, 3):
        state = env.step(jax.random.key(0), state, jnp.int32(column), env.params).state
    colours = {circle.centre: circle.colour for circle in env.draw(state, env.params).shapes[1:]}
    assert len({colours[3.5, 0.5], colours[3.5, 1.5], colours[3.5, 2.5]}) == 3


def test_transforms_draw_the_state_inside_of_theirs():
    env = rollmill.make("CartPole-v1", transforms=["frame-stack:3"])
    limited = rollmill.time_limit(env, 5)._replace(draw=None)
    mine = env._replace(draw=lambda state, params: Drawing(0, 0, 1, 1, [Circle((0.5, 0.5), 0.2, "#123456")]))
    assert rollmill.time_limit(mine, 5).draw is not None and limited.draw is None
    _, state = env.reset(jax.random.key(0), env.params)
    assert isinstance(env.draw(state, env.params), Drawing)


def test_agents_of_one_cell_are_drawn_beside_each_other():
    x, y = np.array([2, 2, 2, 2, 5, 2]), np.array([1, 1, 1, 1, 1, 1])
    drawing = draw_grid(x, y, np.ones(6, bool), num_taggers=4, cells=8)
    circles = [shape for shape in drawing.shapes if isinstance(shape, Circle)]
    assert len({circle.centre for circle in circles}) == 4
    assert all(2 < cx < 3 and 1 < cy < 2 for cx, cy in (circle.centre for circle in circles))
    assert {round(circle.radius, 3) for circle in circles} == {round(0.4 / 3, 3)}  # five agents: three in a row
    alone = draw_grid(x[4:], y[4:], np.ones(2, bool), num_taggers=1, cells=8)
    assert next(shape for shape in alone.shapes if isinstance(shape, Circle)) == Circle((5.5, 1.5), 0.4, RED)
    assert [name for _, name in drawing.legend] == ["tagger", "runner", "tagged"]

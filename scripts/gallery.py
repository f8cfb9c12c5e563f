"""Makes the pictures of docs/gallery.md in docs/figures/gallery.

    python scripts/gallery.py environments [NAME ...]     # a state of each, by default of all built-in ones
    python scripts/gallery.py pages                       # the pages that the commands write, in Chromium

Pages are from small runs of CartPole-v1 in a temporary folder. The first trial is also docs/figures/cartpole.gif.
Pictures have few colours, so that they stay small.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
from PIL import Image

from rollmill.board.server import BoardServer
from rollmill.envs import make, registered
from rollmill.envs.agents import random_action
from rollmill.pictures import rasterise

FOLDER = Path(__file__).parents[1] / "docs/figures/gallery"
STEPS = {"MountainCar-v0": 120, "MountainCarContinuous-v0": 120, "ConnectFour-v0": 18, "TicTacToe-v0": 5}
"""Steps before the picture, 25 for others."""
SIDE, WIDTH, HEIGHT = 240, 1280, 900
"""Pixels of environments and of pages."""
SWEEP = (
    "rollmill sweep ppo CartPole-v1 --over learning-rate=1e-3,2.5e-3,5e-3 --over gamma=0.95,0.99 --over seed=0..1 "
    "--total-timesteps 100000 --sweep-dir {folder}/sweep"
)
PLOT = "rollmill plot {folder}/sweep --output {folder}/curves.html"
RENDER = (
    "rollmill render {folder}/sweep/trials/00 --output {figures}/cartpole.gif --stochastic --size 320 "
    "--max-steps 120 --force"
)
BOARD = "#run=sweep/trials/00&run=sweep/trials/02&run=sweep/trials/04&run=sweep/trials/06&open=sweep/trials/00"
"""Chosen runs and open details, as the address of the board keeps them."""
PROFILE = "rollmill profile ppo CartPole-v1 --output {folder}/profile"


def main() -> None:
    """Makes the pictures of one kind."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    {"environments": environments, "pages": pages}[sys.argv[1]]()


def environments() -> None:
    """Draws a state of each built-in environment that can be drawn."""
    named = [name for name, _ in registered() if not name.startswith("Probe-")]
    for name in sys.argv[2:] or named:
        env = make(name)
        if env.draw is None:
            print(f"{name} is not drawn")
            continue
        drawing = env.draw(state_after(env, STEPS.get(name, 25)), env.params)
        pixels = rasterise(drawing, SIDE) if hasattr(drawing, "shapes") else drawing
        write(Image.fromarray(pixels), re.sub(r"\W+", "-", name).lower())


def state_after(env, steps):
    """Returns the state after random actions; a new episode begins where one ends."""
    step = jax.jit(env.step)
    key, reset_key = jax.random.split(jax.random.key(3))
    _, state = env.reset(reset_key, env.params)
    for at in range(steps):
        key, action_key, step_key = jax.random.split(key, 3)
        mask = () if env.action_mask is None else env.action_mask(state, env.params)
        timestep = step(step_key, state, random_action(action_key, env, mask), env.params)
        ended = bool(timestep.terminated | timestep.truncated)
        state = state if ended and at > steps // 2 else timestep.state
        if ended:
            break
    return state


def pages() -> None:
    """Takes pictures of the pages on a sweep, its curves and a profile of CartPole-v1."""
    folder = Path(tempfile.mkdtemp())
    for line in (SWEEP, PLOT, RENDER, PROFILE):
        run(line.format(folder=folder, figures=FOLDER.parent))
    shot((folder / "curves.html").as_uri(), "curves")
    shot((folder / "sweep/report.html").as_uri(), "sweep")
    shot(next((folder / "profile").rglob("*.html")).as_uri(), "profile")
    with BoardServer(folder) as server, server.serving():
        shot(server.url + BOARD, "board", height=1150)
    shutil.rmtree(folder)


def run(line):
    """Runs a command."""
    print(line, flush=True)
    subprocess.run([sys.executable, "-m", *line.split()], check=True, stdout=subprocess.DEVNULL)


def shot(address, name, *, height=HEIGHT):
    """Takes a picture of the top of a page, in light, once its script has had time for what it loads."""
    with tempfile.TemporaryDirectory() as profile:
        picture = Path(profile) / "page.png"
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
        command += ["--hide-scrollbars", f"--window-size={WIDTH},{height}", f"--screenshot={picture}"]
        command += ["--virtual-time-budget=8000"]
        subprocess.run([*command, address], check=True, capture_output=True)
        write(Image.open(picture).convert("RGB"), name)


def write(image, name):
    """Writes a picture with a palette, in which the colours of thin lines are kept too."""
    path = FOLDER / f"{name}.png"
    image.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size:,} bytes", flush=True)


if __name__ == "__main__":
    main()

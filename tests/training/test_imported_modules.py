"""A training imports what its plan and its names need, and traces an environment once."""

import subprocess
import sys

import pytest

TRAINS = """
import functools
import sys
from rollmill.cli.main import main
from rollmill.envs import cartpole
from rollmill.workers.program_training import ProgramTraining

def counted(name):
    function = getattr(cartpole, name)
    @functools.wraps(function)
    def call(*args, **options):
        calls.append(name)
        return function(*args, **options)
    return call

def run(self, stopping):
    modules.update(sys.modules)
    yield from reports(self, stopping)

calls, modules = [], {}
reports, ProgramTraining.run = ProgramTraining.run, run
cartpole.cartpole, cartpole.reset, cartpole.step = map(counted, ("cartpole", "reset", "step"))
try:
    sizes = "--num-envs 2 --num-steps 4 --total-timesteps 8 --num-minibatches 1 --update-epochs 1"
    main(["train", "ppo", "CartPole-v1", *sizes.split(), "--run-dir", "run", "--quiet"])
except SystemExit as end:
    assert end.code == 0, end.code
print("calls", *calls)
print("later", *sorted(sys.modules.keys() - modules.keys()))
print("modules", *sorted(name for name in sys.modules if name.partition(".")[0] == "rollmill"))
"""

MAX_MODULES = 210
"""Maximum number of modules of the package."""
UNNEEDED = ("channels", "fusion", "processes", "profiling", "profiler", "recipes", "serving", "sweeps")
"""Packages that no training in one program without kernels needs."""
OTHERS = (
    "algorithms.dqn",
    "tree_search.tree",
    "envs.check",
    "envs.named_transforms",
    "envs.pendulum",
)
"""Modules that a training by another algorithm or on another environment needs."""


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """Returns the words of each line that a training prints at its end."""
    folder = tmp_path_factory.mktemp("training")
    done = subprocess.run([sys.executable, "-c", TRAINS], cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    lines = (line.split() for line in done.stdout.splitlines()[-3:])
    return {name: words for name, *words in lines}


def test_a_training_in_one_program_imports_neither_workers_nor_the_compiler(printed):
    modules = printed["modules"]
    assert len(modules) <= MAX_MODULES, modules
    assert not {name.split(".")[1] for name in modules if "." in name} & {*UNNEEDED}
    assert not {f"rollmill.{name}" for name in OTHERS} & {*modules}


def test_nothing_is_imported_once_a_training_has_begun(printed):
    """An import on any thread holds the interpreter's lock, which the thread that dispatches waits for."""
    assert printed["later"] == []


def test_a_start_builds_its_environment_and_calls_its_functions_once(printed):
    assert sorted(printed["calls"]) == ["cartpole", "reset", "step"]

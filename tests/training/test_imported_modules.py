"""A training imports what its plan and its names need, and no more."""

import subprocess
import sys

TRAINS = """
import sys
from rollmill.cli.main import main
try:
    sizes = "--num-envs 2 --num-steps 4 --total-timesteps 8 --num-minibatches 1 --update-epochs 1"
    main(["train", "ppo", "CartPole-v1", *sizes.split(), "--run-dir", "run", "--quiet", "--no-tensorboard"])
except SystemExit as end:
    assert end.code == 0, end.code
print("modules", *sorted(name for name in sys.modules if name.partition(".")[0] == "rollmill"))
"""

MAX_MODULES = 250
MAX_OF_THE_COMPILER = 30
"""Modules that compute an optimizer's step on a CPU, if LLVM is installed. The whole compiler has more than 80."""
UNNEEDED = ("channels", "processes", "profiling", "profiler", "recipes", "serving", "sweeps")
"""Packages that no training in one program without kernels needs."""


def test_a_training_in_one_program_imports_neither_workers_nor_the_compiler(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", TRAINS], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    modules = done.stdout.splitlines()[-1].split()[1:]
    of_the_compiler = [name for name in modules if name.startswith("rollmill.fusion")]
    assert len(of_the_compiler) <= MAX_OF_THE_COMPILER, of_the_compiler
    assert len(modules) - len(of_the_compiler) <= MAX_MODULES, modules
    assert not {name.split(".")[1] for name in modules if "." in name} & {*UNNEEDED}
    assert "rollmill.envs.pendulum" not in modules

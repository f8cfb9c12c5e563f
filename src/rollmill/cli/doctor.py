"""The command `rollmill doctor [RUN]`, which checks the installation and the files of a run."""

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import jax
import numpy as np

from rollmill.cli.parsing import parse
from rollmill.cli.shared_options import Imports, Trust
from rollmill.core.installation import install_command
from rollmill.core.machine import hardware, versions
from rollmill.core.options import Arg
from rollmill.core.stored_paths import RunPath
from rollmill.core.text import format_bytes, format_count
from rollmill.gpus.jax_settings import check_platform
from rollmill.programs.cache import cache_directory
from rollmill.programs.faults.replay import Replayed
from rollmill.runs.diagnosis import examine, kept_fault, replay

EXTRAS = {
    "llvmlite": ("kernels on CPUs", install_command("fusion")),
    "triton": ("kernels on NVIDIA GPUs", install_command("fusion")),
    "ray": ("clusters", install_command("cluster")),
    "ale_py": ("ale:... environments", install_command("ale")),
    "envpool": ("envpool:... environments", install_command("envpool")),
    "mujoco": ("robots:... and the MuJoCo environments of Gymnasium", install_command("mujoco")),
    "brax": ("brax:... environments", install_command("brax")),
    "craftax": ("craftax:... environments", install_command("craftax")),
    "gymnax": ("gymnax:... environments", install_command("gymnax")),
    "jaxmarl": ("jaxmarl:... environments", install_command("jaxmarl")),
    "mujoco_playground": ("playground:... environments", install_command("playground")),
    "pettingzoo": ("pettingzoo:... environments", install_command("pettingzoo")),
    "mpe2": ("pettingzoo:mpe/... environments", install_command("pettingzoo")),
    "pgx": ("pgx:... environments", install_command("pgx")),
    "xminigrid": ("xminigrid:... environments", install_command("xminigrid")),
    "optuna": ("Optuna samplers in sweeps", install_command("optuna")),
    "httptools": ("rollmill serve", install_command("serve")),
    "jax2onnx": ("rollmill export --format onnx", install_command("onnx")),
    "PIL": ("rollmill render", install_command("render")),
    "imageio_ffmpeg": ("rollmill render --output NAME.mp4", install_command("render")),
    "matplotlib": ("rollmill plot --output NAME.png", install_command("plot")),
    "wandb": ("rollmill.hooks.wandb_log", install_command("wandb")),
    "mlflow": ("rollmill.hooks.mlflow_log", install_command("mlflow")),
    "tensorboard": ("viewing runs/*/tensorboard", "pip install tensorboard"),
}


@dataclass(frozen=True)
class Doctor:
    """Check the installation. With a run, check its files, and replay the step with the first NaN or infinity."""

    run: Annotated[RunPath | None, Arg(metavar="[RUN]", positional=True)] = None
    """Directory of a run to check."""
    trust: Trust = False
    """Let the run in this directory import the modules that it names, now and later."""
    imports: Imports = ()
    """Module to import first, because it registers the environment, the network or the algorithm."""


def run(arguments: list[str]) -> int:
    """Prints a report on the installation and a run. Returns the exit code, which is 2 if the run is damaged."""
    options = parse(Doctor, arguments, prog="rollmill doctor")
    if options.run is None:
        return _installation()
    if kept_fault(options.run):
        _show(replay(options.run, imports=options.imports, trust=options.trust))
        return 0
    examined = examine(options.run)
    print(f"run: {options.run}", *(f"  {note}" for note in examined.notes), sep="\n")
    for complaint in examined.complaints:
        print(f"rollmill: {complaint}", file=sys.stderr)
    if not examined.complaints:
        print("  nothing to replay: all computed numbers were finite, and the run's files are intact")
    return 2 if examined.complaints else 0


def _installation() -> int:
    check_platform()
    machine = hardware()
    print("versions:", *(f"  {name} {version or 'missing'}" for name, version in versions().items()), sep="\n")
    print(
        f"machine: {machine['cpu']}, {format_count(machine['cores'], 'core')}, {_memory(machine['memory_bytes'])}"
    )
    print(
        "devices:",
        *map(_device, machine["devices"]),
        sep="\n",
    )
    print(f"compilation cache: {cache_directory()}")
    print(f"computes: {_computes()}")
    installed = [name for name in EXTRAS if find_spec(name) is not None]
    print(f"optional packages: {', '.join(installed) or 'none'}")
    for name in [name for name in EXTRAS if name not in installed]:
        what, command = EXTRAS[name]
        print(f"missing: {name}, for {what}: {command}")
    if _has_idle_gpu(machine):
        print(f"missing: the JAX CUDA plugin, although this machine has an NVIDIA GPU: {install_command('cuda')}")
    return 0


def _computes() -> str:
    x = jax.numpy.arange(16.0).reshape(4, 4)
    return (
        "yes"
        if bool(jax.numpy.allclose(x @ jax.numpy.eye(4), x))
        else ("no: a matrix product gave a wrong result")
    )


def _has_idle_gpu(machine: dict) -> bool:
    on_cpu = all(device["platform"] == "cpu" for device in machine["devices"])
    return on_cpu and Path("/proc/driver/nvidia/version").exists()


def _device(device: dict) -> str:
    """Returns the line of a device. A CPU has the kind `cpu` and the memory of the machine."""
    if device["platform"] == "cpu" and device["memory_bytes"] is None:
        return "  cpu, which uses the machine's main memory"
    return f"  {device['platform']} {device['kind']}, {_memory(device['memory_bytes'])}"


def _memory(count: int | None) -> str:
    return "memory unknown" if count is None else format_bytes(count)


def _show(replayed: Replayed) -> None:
    print(f"{replayed.fault}")
    print(f"line: {replayed.line or 'no single operation made it; see the inputs'}")
    for title, tree in (*replayed.inputs.items(), ("outputs", replayed.outputs)):
        print(f"{title}:")
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            text = np.array2string(np.asarray(leaf), precision=6, threshold=32, edgeitems=4).replace(
                "\n", "\n      "
            )
            print(f"  {jax.tree_util.keystr(path) or 'value'}: {text}")

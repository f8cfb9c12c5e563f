"""The command `rollmill explain fusion ENVIRONMENT`, which explains whether training fuses and how its kernels
compile.
"""

import sys
import time
from dataclasses import dataclass, make_dataclass
from typing import Annotated, Any, TypeAlias

from rollmill.cli.parsing import HELP, parse_given, parse_known
from rollmill.cli.requests import MERGED, request_of
from rollmill.cli.shared_options import EnvOptions, Imports, NetworkName, Transforms
from rollmill.core.errors import UsageError
from rollmill.core.installation import install_command
from rollmill.core.options import Arg, options_of
from rollmill.dataflow import Graph
from rollmill.fusion import (
    CannotFuse,
    Chip,
    Explanation,
    KernelResources,
    Launch,
    Numerics,
    check_package,
    compiled_resources,
    compiler_stages,
    cpu_backend,
    envs_per_multiprocessor,
    explain,
    find_chip,
    lower_gradients,
    lower_rollout,
    many_products,
)
from rollmill.runs.algorithms import ALGORITHMS
from rollmill.runs.options import RunOptions
from rollmill.training.request import find_own_algorithm, resolve

SUBJECTS = ("fusion",)

LITTLE = 64
"""Bytes of local memory per thread up to which a kernel does not count as spilling registers. Function calls
within it may take this much."""


DEFAULT_ALGORITHM = "ppo"
AlgorithmName: TypeAlias = Annotated[
    str,
    Arg(
        metavar="NAME",
        help="Algorithm whose policy and gradients are compiled. Multi-agent environments need mappo or ippo.",
    ),
]


@dataclass(frozen=True)
class _Named:
    """The options that decide which others there are."""

    algorithm: AlgorithmName = DEFAULT_ALGORITHM
    imports: Imports = ()


@dataclass(frozen=True)
class KernelOptions:
    """Options that select the kernel to explain."""

    chip: str | None = None
    """GPU to compute bounds for. Default: the GPU of this machine, or an H200."""
    numerics: Numerics = "tf32"
    """Precision of matrix products in the kernel."""
    block: int = 64
    """Number of environments per program of the kernel."""
    num_warps: int = 4
    """Number of warps per program of the kernel."""
    verbose: bool = False
    """Also print operations, memory and speed bounds of the rollout kernel, and compile it, which may take
    minutes."""
    ir: bool = False
    """Print the kernels' programs after each stage of the compiler instead."""


def run(arguments: list[str]) -> int:
    """Prints the explanation, and returns the exit code."""
    if not arguments or arguments[0] in HELP:
        print(
            "usage: rollmill explain fusion ENVIRONMENT [OPTIONS]\n\n`rollmill explain fusion --help` lists the "
            "options."
        )
        return 0
    subject, *rest = arguments
    if subject not in SUBJECTS:
        raise UsageError(f"unknown subject {subject!r}. Subjects of `rollmill explain`: {', '.join(SUBJECTS)}.")
    named = parse_known(_Named, rest, prog="rollmill explain fusion").options
    find_own_algorithm(named.algorithm, None if HELP & set(rest) else RunOptions(), named.imports, environment="")
    kind = _arguments(named.algorithm)
    chosen, given = parse_given(kind, rest, prog="rollmill explain fusion")
    kernel: KernelOptions = chosen.kernel
    _check_power_of_two("block", kernel.block, 16, 256)
    _check_power_of_two("num_warps", kernel.num_warps, 1, 16)
    name, chip = find_chip(kernel.chip)
    graph = resolve(request_of(named.algorithm, chosen, given, options_of(kind))).graph()
    if graph.host is not None:
        print(f"{chosen.environment} does not fuse: its environments are stepped by Python on the host.")
        return 0
    if kernel.ir:
        return _print_stages(graph)
    try:
        found = explain(graph, chip, kernel.numerics, Launch(kernel.block, kernel.num_warps))
    except CannotFuse as reason:
        print(
            f"{chosen.environment} does not fuse: {reason}",
            "You can still train on it: XLA compiles the program.",
            sep="\n",
        )
        return 0
    print(*_verdict(chosen.environment, found, name, graph), sep="\n", flush=True)
    if kernel.verbose:
        print(*_lines(found, name), sep="\n", flush=True)
        _print_compiled(found, chip)
    else:
        print("`--verbose` prints costs and bounds, and compiles the kernel.")
    return 0


def _verdict(environment: str, found: Explanation, chip: str, graph: Graph) -> list[str]:
    """Returns sentences for somebody who decides: what fuses, what `--fusion auto` does, and the gain at most."""
    limit, rate = min(found.bounds.items(), key=lambda item: item[1])
    on_gpu = "times kernels at the start of a run, and uses them if they are faster than XLA."
    if products := many_products(found.pressure):
        on_gpu = f"leaves the rollout to XLA, because {products}; `--fusion rollout` uses a kernel anyway."
    elif found.compile_seconds:
        on_gpu = (
            f"times the kernel only in long runs, because it takes about {found.compile_seconds:,.0f} s to "
            "compile, and uses it if it is faster than XLA."
        )
    return [
        f"{environment} fuses: policy and environment become one kernel for all steps of a rollout.",
        f"Gradients: {_gradients(graph).rstrip('.')}.",
        f"On a GPU, `--fusion auto`, the default, {on_gpu}",
        f"One {chip} makes at most {_rate(rate)} steps/s of such rollouts, limited by {limit}.",
        f"On a CPU: {_code().rstrip('.')}.",
    ]


def _print_compiled(found: Explanation, chip: Chip) -> None:
    """Compiles the kernel and prints the resources that it takes, last because it may take minutes."""
    print(f"compiling the kernel of {found.pressure.num_operations:,} operations ...", file=sys.stderr)
    began = time.perf_counter()
    resources = compiled_resources(found, chip)
    print(*_kernel(found, resources), sep="\n")
    if resources is not None:
        print(_line("", f"compiled in {time.perf_counter() - began:.1f} s"))


def _print_stages(graph: Graph) -> int:
    """Prints the programs of both kernels after each stage of the compiler."""
    for kernel, lower in (("rollout", lower_rollout), ("gradients", lower_gradients)):
        try:
            stages = compiler_stages(lower(graph).lowered)
        except CannotFuse as reason:
            print(f"=== {kernel}: not fused: {reason}\n")
            continue
        for stage in stages:
            print(f"=== {kernel}: {stage.name}\n{stage.text}\n")
    return 0


def _arguments(algorithm: str) -> Any:
    """Returns the options of the command and of the algorithm."""
    config = ALGORITHMS[algorithm].config()
    environment = Arg(metavar="ENVIRONMENT", help="Id of the environment.", positional=True)
    arguments = make_dataclass(
        "Explain",
        [
            ("environment", Annotated[str, environment]),
            ("algorithm", AlgorithmName, DEFAULT_ALGORITHM),
            ("env_options", EnvOptions, ()),
            ("transforms", Transforms, ()),
            ("network_name", NetworkName, None),
            ("imports", Imports, ()),
            ("kernel", Annotated[KernelOptions, MERGED], KernelOptions()),
            ("hyperparameters", Annotated[type(config), MERGED], config),
        ],
        frozen=True,
    )
    arguments.__module__ = __name__
    arguments.__doc__ = (
        "Shows whether policy and environment become one kernel, the resources it needs, and its highest "
        "possible speed."
    )
    return arguments


def _check_power_of_two(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most or value & (value - 1):
        raise UsageError(f"{name}={value} must be a power of two from {least} to {most}.")


def _lines(found: Explanation, chip: str) -> list[str]:
    (always, sometimes), pressure = found.costs, found.pressure
    lines = [
        _line(
            "program",
            f"{pressure.num_operations:,} operations of scalars and rows a step, in about "
            f"{pressure.num_instructions:,} instructions",
        ),
        _line("", f"up to {pressure.live_registers:,} registers hold values that are read later"),
        _line(
            "carried", f"{found.state_bytes} B of each environment, in registers from the first step to the last"
        ),
        _line("written", f"{found.written_bytes} B a step"),
        _line(
            "a step",
            f"{always.floats:,.0f} float, {always.integers:,.0f} integer and {always.special:,.0f} special "
            f"operations, {always.tensor:,.0f} of matrix products",
        ),
    ]
    if sometimes.instructions:
        lines.append(_line("", f"{sometimes.instructions:,.0f} more in a step that ends an episode"))
    bounds = sorted(found.bounds.items(), key=lambda item: item[1])
    (limit, rate), *others = [(limit, _rate(rate)) for limit, rate in bounds]
    return [
        *lines,
        _line("at most", f"{rate} steps/s on one {chip} by {limit}"),
        *(_line("", f"{rate} by {limit}") for limit, rate in others),
    ]


def _code() -> str:
    try:
        check_package(cpu_backend())
    except UsageError as missing:
        return str(missing)
    return "LLVM compiles machine code at the start of a run"


def _kernel(found: Explanation, resources: KernelResources | None) -> list[str]:
    if resources is None:
        return [_line("kernel", f"not compiled: {install_command('fusion')}")]
    registers, spilled, shared, code = resources
    block, warps = found.launch.block, found.launch.num_warps
    of_each = f"{registers * warps * 32 / block:,.0f} registers and {shared / block:,.0f} B on chip an environment"
    held = f"{envs_per_multiprocessor(resources, found.launch):,} environments at once on each multiprocessor"
    lines = [
        _line("kernel", f"{block} environments by {warps} warps, {registers} registers a thread"),
        _line("", of_each),
        _line("", f"{held}, {code / 1024:,.0f} KiB of code"),
    ]
    if spilled > LITTLE:
        lines.append(_line("", f"{spilled} B of a thread found no register: try a smaller block, or more warps"))
    return lines


def _gradients(graph: Graph) -> str:
    try:
        lower_gradients(graph)
    except CannotFuse as reason:
        return f"not fused: {reason}"
    return "one kernel for each minibatch"


def _line(title: str, text: str) -> str:
    return f"  {title:<10} {text}"


def _rate(rate: float) -> str:
    return f"{rate / 1e9:.1f} G" if rate >= 1e9 else f"{rate / 1e6:.0f} M"

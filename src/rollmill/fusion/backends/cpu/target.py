"""Compiles LLVM IR for the processor of this machine."""

import ctypes
import ctypes.util
import functools
from typing import Any, NamedTuple

from rollmill.core.errors import CannotFuse
from rollmill.core.installation import install_command
from rollmill.core.machine import usable_cores
from rollmill.fusion.cache import stored_code


class Processor(NamedTuple):
    """The processor that machine code is generated for."""

    name: str
    """LLVM's name for the processor, such as `znver4`."""
    features: str
    lanes: int
    """Number of 32-bit elements in a vector register."""
    accumulators: int
    """Number of vector registers that the accumulators of a matrix product may occupy."""
    cores: int
    """Number of cores that this process may use."""


class CodeOptimiser(NamedTuple):
    """Settings with which LLVM optimises a kernel's machine code."""

    speed_level: int = 3
    unrolls_loops: bool = True
    joins_scalars: bool = False
    """Whether LLVM vectorises scalar code. It is off because the code already consists of vectors."""
    code_level: int = 3
    """Optimisation level of instruction selection, from 0 to 3."""


WRITTEN_OUT = CodeOptimiser(speed_level=1, unrolls_loops=False)
"""Settings for code whose loops are already unrolled. Compiling takes a third of the time."""

WIDEST = (("avx512f", 16, 16), ("avx2", 8, 8), ("neon", 4, 16))
"""CPU feature, number of lanes and number of accumulators, with the widest vectors first."""
NARROWEST = (4, 8)

_engines: list[Any] = []  # machine code is freed with its engine, so engines are kept


@functools.cache
def processor() -> Processor:
    """Returns the processor of this machine. Raises `CannotFuse` if LLVM is not installed."""
    binding = _binding()
    features = binding.get_host_cpu_features()
    lanes, accumulators = next(
        ((lanes, room) for feature, lanes, room in WIDEST if features.get(feature)), NARROWEST
    )
    if lanes == 16:
        features["prefer-256-bit"] = False
    return Processor(binding.get_host_cpu_name(), features.flatten(), lanes, accumulators, usable_cores())


def function_address(module: str, name: str, *, written_out: bool = False) -> int:
    """Compiles an LLVM module for this processor, and returns the address of its function `name`.

    Modules are compiled one at a time, because LLVM's Python binding has one context for all threads. Object code
    is cached by module, processor and optimisation settings. `written_out` disables loop unrolling.
    """
    binding, own, optimiser = _binding(), processor(), WRITTEN_OUT if written_out else CodeOptimiser()
    known = [module, optimiser, own.name, own.features, binding.llvm_version_info]
    code = stored_code(known, lambda: _compile(module, optimiser), packages=["llvmlite"])
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _machine(optimiser))
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    return engine.get_function_address(name)


def _compile(module: str, optimiser: CodeOptimiser) -> bytes:
    """Returns the object file of a module."""
    parsed, machine = _binding().parse_assembly(module), _machine(optimiser)
    parsed.verify()
    _optimise(parsed, machine, optimiser)
    return machine.emit_object(parsed)


def _optimise(module: Any, machine: Any, optimiser: CodeOptimiser) -> None:
    binding = _binding()
    options = binding.create_pipeline_tuning_options(speed_level=optimiser.speed_level)
    options.loop_unrolling = optimiser.unrolls_loops
    options.slp_vectorization = optimiser.joins_scalars
    passes = binding.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)


def _machine(optimiser: CodeOptimiser) -> Any:
    binding, own = _binding(), processor()
    target = binding.Target.from_triple(binding.get_process_triple())
    level = optimiser.code_level
    return target.create_target_machine(cpu=own.name, features=own.features, opt=level, jit=True)


@functools.cache
def _binding() -> Any:
    try:
        import llvmlite.binding as binding
    except ImportError as error:
        raise CannotFuse(
            "machine code needs a package that is not installed", advice=install_command("fusion")
        ) from error
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    library = ctypes.util.find_library("m")
    if library is not None:  # library of C functions that are called for single elements
        binding.load_library_permanently(library)
    return binding

"""The processor that runs this program, and machine code for it, by LLVM."""

import ctypes
import ctypes.util
import functools
from typing import Any, NamedTuple

from rollmill.core.errors import CannotFuse
from rollmill.core.installation import install_command
from rollmill.core.machine import usable_cores
from rollmill.fusion.cache import stored_code


class Processor(NamedTuple):
    """The processor that code is generated for."""

    name: str
    """LLVM's name of the processor."""
    features: str
    lanes: int
    """Numbers of 32 bits in a vector."""
    accumulators: int
    """Vectors that a product of matrices may hold in registers, beside its operands."""
    cores: int
    """Cores that this process may use."""


class CodeOptimiser(NamedTuple):
    """Settings that LLVM optimises with."""

    speed_level: int = 3
    unrolls_loops: bool = True
    joins_scalars: bool = False
    """Off, as everything is in vectors already."""
    code_level: int = 3
    """That of instructions."""


WRITTEN_OUT = CodeOptimiser(speed_level=1, unrolls_loops=False)
"""For loops that are written out, which takes a third of the time to compile."""

WIDEST = (("avx512f", 16, 16), ("avx2", 8, 8), ("neon", 4, 16))
"""Feature, lanes and accumulators, the best first."""
NARROWEST = (4, 8)

_engines: list[Any] = []  # machine code lives as long as its engine


@functools.cache
def processor() -> Processor:
    """Returns this processor. Raises `CannotFuse` if LLVM is missing."""
    binding = _binding()
    features = binding.get_host_cpu_features()
    lanes, accumulators = next(
        ((lanes, room) for feature, lanes, room in WIDEST if features.get(feature)), NARROWEST
    )
    if lanes == 16:
        features["prefer-256-bit"] = False
    return Processor(binding.get_host_cpu_name(), features.flatten(), lanes, accumulators, usable_cores())


def function_address(module: str, name: str, *, written_out: bool = False) -> int:
    """Compiles a module of LLVM IR for this processor, and returns a function's address.

    Modules are compiled one at a time: LLVM's binding has one context for all threads. Loops that are
    `written_out` remain as they are. The code is stored, and found by the module, the processor and the settings
    that it was optimised with.
    """
    binding, own, optimiser = _binding(), processor(), WRITTEN_OUT if written_out else CodeOptimiser()
    known = [module, optimiser, own.name, own.features, binding.llvm_version_info]
    code = stored_code(known, lambda: _compiled(module, optimiser), packages=["llvmlite"])
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _machine(optimiser))
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    return engine.get_function_address(name)


def _compiled(module: str, optimiser: CodeOptimiser) -> bytes:
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
    if library is not None:  # the functions of C that are called for single numbers
        binding.load_library_permanently(library)
    return binding

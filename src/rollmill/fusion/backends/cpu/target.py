"""The processor that runs this program, and machine code for it, by LLVM."""

import ctypes
import ctypes.util
import functools
from typing import Any, NamedTuple

from rollmill.core.errors import CannotFuse
from rollmill.core.installation import install_command
from rollmill.core.machine import usable_cores


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
    """Returns the address of a function of a module in LLVM's language, compiled for this processor.

    Modules are compiled one at a time: LLVM's binding has one context for all threads. Loops that are
    `written_out` remain as they are, which takes a third of the time to compile.
    """
    binding = _binding()
    parsed = binding.parse_assembly(module)
    parsed.verify()
    machine = _machine()
    _optimise(parsed, machine, written_out)
    engine = binding.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    _engines.append(engine)
    return engine.get_function_address(name)


def _optimise(module: Any, machine: Any, written_out: bool) -> None:
    binding = _binding()
    options = binding.create_pipeline_tuning_options(speed_level=1 if written_out else 3)
    options.loop_unrolling = not written_out
    options.slp_vectorization = False  # everything is in vectors already
    passes = binding.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)


def _machine() -> Any:
    binding, own = _binding(), processor()
    target = binding.Target.from_triple(binding.get_process_triple())
    return target.create_target_machine(cpu=own.name, features=own.features, opt=3, jit=True)


@functools.cache
def _binding() -> Any:
    try:
        import llvmlite.binding as binding
    except ImportError as error:
        raise CannotFuse(
            "machine code needs a package that is missing", advice=install_command("fusion")
        ) from error
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    library = ctypes.util.find_library("m")
    if library is not None:  # the functions of C that are called for single numbers
        binding.load_library_permanently(library)
    return binding

"""Exports policies as ONNX with jax2onnx, and runs them with ONNX Runtime."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from rollmill.core.errors import UsageError
from rollmill.core.installation import install_command
from rollmill.gpus.jax_settings import standard_promotion
from rollmill.policies.exporting.interface import ExportedFunction
from rollmill.policies.exporting.metadata import BATCH
from rollmill.policies.exporting.parity import Run

METADATA_KEY = "rollmill"
"""Key in the ONNX model's `metadata_props` under which the description is stored."""

OPSET = 21
"""Version of the ONNX operators. It belongs to ONNX 1.16, which ONNX Runtime supports from version 1.18 on."""

CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
"""JAX primitives that call a program, with the parameter that holds the program."""


def to_onnx(exported: ExportedFunction, metadata: str) -> bytes:
    """Converts an exported policy to an ONNX model with named inputs and outputs `[batch, ...]`.

    Args:
        exported: the policy as a function of arrays.
        metadata: text to store in the model.

    Raises:
        UsageError: jax2onnx or ONNX Runtime is missing, or jax2onnx does not support an operation of the policy.
    """
    converter = _package("jax2onnx")
    _package("onnxruntime")
    given = [jax.ShapeDtypeStruct((BATCH, *each.shape), each.struct.dtype) for each in exported.inputs]
    try:
        with standard_promotion(), _quiet("onnx_ir"):
            model = converter.to_onnx(
                jax.vmap(simplify_function(exported)),
                given,
                model_name="policy",
                opset=OPSET,
                input_names=[each.name for each in exported.inputs],
                output_names=[each.name for each in exported.outputs],
            )
    except Exception as error:  # jax2onnx raises errors of many kinds
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise UsageError(
            f"this policy cannot be converted to ONNX: {type(error).__name__}: {reason}. hint: the format "
            "stablehlo supports all JAX operations."
        ) from error
    entry = model.metadata_props.add()
    entry.key, entry.value = METADATA_KEY, metadata
    return model.SerializeToString()


def run_onnx(data: bytes, exported: ExportedFunction) -> Run:
    """Returns an ONNX model as a function of NumPy arrays, computed on the CPU."""
    runtime = _package("onnxruntime")
    try:
        session = runtime.InferenceSession(data, providers=["CPUExecutionProvider"])
    except Exception as error:  # the errors of ONNX Runtime have no common base class
        raise UsageError(f"ONNX Runtime cannot run the exported policy: {error}") from error
    names, outputs = ([each.name for each in part] for part in (exported.inputs, exported.outputs))
    kept = {each.name for each in session.get_inputs()}

    def run(inputs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        feed = {name: array for name, array in zip(names, inputs, strict=True) if name in kept}
        return session.run(outputs, feed)

    return run


def simplify_function(exported: ExportedFunction) -> Callable[..., tuple[Any, ...]]:
    """Returns a function of ONE observation that computes the results of `exported` with fewer operations.

    Arrays without elements are left out of concatenations, because ONNX cannot reshape a batch of them. Calls, and
    choices between platforms, are inlined, and common subexpressions are computed once.
    """
    program = jax.make_jaxpr(exported.function)(*[each.struct for each in exported.inputs])
    return lambda *inputs: tuple(_evaluate(program.jaxpr, program.consts, inputs, {}))


def _evaluate(
    program: Any, constants: Sequence[Any], inputs: Sequence[Any], known: dict[Any, list[Any]]
) -> list[Any]:
    """Returns the outputs of a program. `known` holds results by operation and operands."""
    values: dict[Any, Any] = dict(zip([*program.constvars, *program.invars], [*constants, *inputs], strict=True))
    read = lambda atom: atom.val if isinstance(atom, core.Literal) else values[atom]
    for equation in program.eqns:
        operands = [read(atom) for atom in equation.invars]
        name = equation.primitive.name
        if name in CALLS:
            inner = equation.params[CALLS[name]]
            results = _evaluate(inner.jaxpr, inner.consts, operands, known)
        elif name == "platform_index":
            results = [_index_on_cpu(equation.params["platforms"])]
        elif name == "cond" and equation.params["branches_platforms"] is not None:
            chosen = equation.params["branches"][_index_on_cpu(equation.params["branches_platforms"])]
            results = _evaluate(chosen.jaxpr, chosen.consts, operands[1:], known)
        elif name == "concatenate":
            results = [_concatenate(equation, operands)]
        else:
            results = _apply(equation, operands, known)
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in program.outvars]


def _index_on_cpu(platforms: Sequence[tuple[str, ...] | None]) -> int:
    """Returns the index of the platforms that include the CPU. None stands for all platforms."""
    return next(i for i, names in enumerate(platforms) if names is None or "cpu" in names)


def _apply(equation: Any, operands: list[Any], known: dict[Any, list[Any]]) -> list[Any]:
    same = tuple(_identity(atom, operand) for atom, operand in zip(equation.invars, operands, strict=True))
    try:
        operation = (equation.primitive, same, tuple(sorted(equation.params.items(), key=lambda item: item[0])))
        hash(operation)
    except TypeError:  # the parameters include something that cannot be compared, such as an array
        operation = object()
    if operation not in known:
        results = equation.primitive.bind(*operands, **equation.params)
        # Storing the operands keeps them alive, so that their ids are not reused.
        known[operation] = [operands, results if equation.primitive.multiple_results else [results]]
    return known[operation][1]


def _identity(atom: Any, operand: Any) -> Any:
    if isinstance(atom, core.Literal):
        return (str(atom.aval), np.asarray(operand).tobytes())
    return id(operand)


def _concatenate(equation: Any, operands: list[Any]) -> Any:
    parts = [operand for atom, operand in zip(equation.invars, operands, strict=True) if atom.aval.size]
    if not parts:
        result = equation.outvars[0].aval
        return jnp.zeros(result.shape, result.dtype)
    return parts[0] if len(parts) == 1 else jax.lax.concatenate(parts, equation.params["dimension"])


def _package(name: str) -> Any:
    try:
        return __import__(name)
    except ImportError as error:
        raise UsageError(
            f"the format onnx needs {name}, which is not installed: {install_command('onnx')}. hint: --format "
            "stablehlo needs only JAX."
        ) from error


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Hides a logger's warnings within the block."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)

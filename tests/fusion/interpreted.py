"""Computes a gradient kernel by Triton's interpreter, as a program: the differences from the reference.

Instructions of a GPU that read and write are replaced by Triton's own; everything else is what a GPU computes.
"""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import triton.language as tl
from triton.runtime import interpreter

import rollmill
from rollmill.dataflow import init_state, shuffled_rows
from rollmill.fusion import GradientLaunch, first_batch, lower_gradients, run_gradients_reference
from rollmill.fusion.backends.triton import operations
from rollmill.fusion.backends.triton.gradients import gradient_kernel
from rollmill.fusion.kernels.minibatch_loop import example_minibatch
from rollmill.fusion.kernels.wide_gradients import wide_gradients

HEADER = f"""\
import triton
import triton.language as tl


@triton.jit
def read(places):
    return tl.load(places)


@triton.jit
def read_where(places, inside):
    return tl.load(places, mask=inside, other=0)


@triton.jit
def read_four(places):
    return tl.load(places), tl.load(places + 1), tl.load(places + 2), tl.load(places + 3)


@triton.jit
def read_cell(places):
    return tl.load(places)


@triton.jit
def write_cell(places, numbers, inside):
    tl.store(places, numbers, mask=inside)


@triton.jit
def write_where(places, numbers, inside):
    tl.store(places, numbers, mask=inside)


{operations.HELPERS}

@triton.jit
def larger(x, y, is_signed: tl.constexpr):
    return tl.maximum(x, y)


@triton.jit
def smaller(x, y, is_signed: tl.constexpr):
    return tl.minimum(x, y)


@triton.jit
def either(condition, x, y):
    return tl.where(condition, x, y)
"""
SIZES = {"num_envs": 24, "num_steps": 4, "total_timesteps": 96, "num_minibatches": 2}


class Buffer:
    """An array as the interpreter takes a tensor's pointer."""

    def __init__(self, array):
        self.array, self.dtype = array, array.dtype.name

    def data_ptr(self):
        return self.array.ctypes.data


def by_numpy(function):
    def call(x):
        found = function(x.handle.data).astype(x.handle.data.dtype)
        return tl.core.tensor(interpreter.TensorHandle(found, x.handle.dtype), x.type)

    return call


def interpreter_of(kernel, folder):
    """The function that runs a kernel on arrays."""
    file = folder / "kernel.py"
    file.write_text(HEADER + kernel.source)
    spec = importlib.util.spec_from_file_location("kernel", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names = ("tanh", "exp", "log", "log1p", "expm1")
    module.libdevice = SimpleNamespace(**{name: by_numpy(getattr(np, name)) for name in names})
    executor = interpreter.GridExecutor(module.kernel.fn, module.kernel.arg_names, (kernel.programs,))
    executor._init_args_hst = lambda arrays, constants: (arrays, constants)  # they are on the host already
    executor._restore_args_dev = lambda *_: None
    return executor


def interpreted(kernel, arrays, folder):
    """The outputs of a kernel on arrays."""
    arrays = [np.array(array, order="C") for array in arrays]
    outputs = [np.zeros(output.shape, output.dtype) for output in kernel.outputs]
    interpreter_of(kernel, folder)(*map(Buffer, [*arrays, *outputs]), **kernel.constants)
    return outputs


def main():
    algorithm, environment, folder, tile = sys.argv[1:]
    network = rollmill.NetworkConfig(hidden_sizes=(88, 72) if int(tile) else (20,), layer_norm=tile != "0")
    graph = getattr(rollmill, algorithm)(environment, **SIZES, network=network)
    index = jnp.arange(SIZES["num_envs"], dtype=jnp.int32)

    @jax.jit
    def begin(key):
        return *first_batch(graph, init_state(graph, key, index)), shuffled_rows(key, index, graph.loops)

    step, launch = lower_gradients(graph), GradientLaunch(2, 16, 1, tile=int(tile))
    minibatch = example_minibatch(graph, step, *begin(jax.random.key(3)))
    kernel, arrays = gradient_kernel(step, minibatch, launch=launch, numerics="float32")
    sums, *rows = interpreted(kernel, arrays, Path(folder))
    mine = sums.sum(0) / minibatch.num_samples
    if launch.tile:
        assert len(rows) == 4  # of an actor and a critic
        mine = np.asarray(wide_gradients(step, launch.tile).assembled(mine, rows, "float32"))
    right = np.asarray(run_gradients_reference(step, minibatch, precision="highest"))
    print(float(np.abs(mine - right).max() / np.abs(right).max()))


if __name__ == "__main__":
    main()

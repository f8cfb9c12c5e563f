"""Threads that wait for the programs of a call, and take them one by one beside the thread that was called.

A call is done by its own thread whether or not others come: threads that are busy, late or gone cost time and
nothing else. They wait in the operating system, not in Python, and are started once for a process.
"""

import ctypes
import functools
import os
from typing import Any

from llvmlite import binding, ir

from rollmill.fusion.backends.cpu.builder import INT32, INT64, POINTER, Emitter, Value, byte, read
from rollmill.fusion.backends.cpu.target import function_address, processor

FUNCTION, NEXT, HELPERS, ACTIVE, MOST_HELPERS, ARRAYS, SCRATCH = range(0, 56, 8)
"""Bytes from the start of a task: what a thread calls with the task and its own number, the next program to be
taken, threads that have come, those that are at work, how many may come; and what the function needs."""
TASK = ir.LiteralStructType([POINTER, INT64, INT64, INT64, INT64, POINTER, POINTER])

MUTEX, CONDITION, PUBLISHED, SIZE = 0, 128, 256, 512
"""Bytes from the start of the pool: its lock, its condition, and the task that threads may join."""

SHARE, POOL = "rollmill_share", "rollmill_pool"
"""Names by which machine code knows the function that shares a task, and the pool."""


def start_pool() -> None:
    """Makes this process's pool known to machine code, with a thread for each core but one."""
    _start_pool(os.getpid())


@functools.cache
def _start_pool(process: int) -> None:
    memory = (ctypes.c_char * SIZE)()
    _pools.append(memory)
    _reset(memory)
    os.register_at_fork(after_in_child=lambda: _reset(memory))
    binding.add_symbol(POOL, ctypes.addressof(memory))
    worker = function_address(str(_module()), "worker")
    binding.add_symbol(SHARE, function_address(str(_module()), "share"))
    library, thread = ctypes.CDLL(None), ctypes.c_void_p()
    arguments = ctypes.c_void_p(worker), ctypes.c_void_p(ctypes.addressof(memory))
    for _ in range(processor().cores - 1):
        if library.pthread_create(ctypes.byref(thread), None, *arguments) == 0:
            library.pthread_detach(thread)


_pools: list[Any] = []  # as long as the process


def _reset(memory: Any) -> None:
    """Nobody holds the lock, and nothing is published; a forked process has none of its parent's threads."""
    library, pool = ctypes.CDLL(None), ctypes.addressof(memory)
    ctypes.memset(memory, 0, SIZE)
    library.pthread_mutex_init(ctypes.c_void_p(pool + MUTEX), None)
    library.pthread_cond_init(ctypes.c_void_p(pool + CONDITION), None)


# --- machine code ----------------------------------------------------------------------------------------------


def _module() -> ir.Module:
    module = ir.Module("rollmill_pool")
    _write_share(ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER]), "share"))
    _write_worker(ir.Function(module, ir.FunctionType(POINTER, [POINTER]), "worker"))
    return module


def _write_share(function: ir.Function) -> None:
    """Publishes a task unless another one is, does what nobody else takes, and waits for who is at work."""
    emit = Emitter(function, 1)
    builder, (task,) = emit.builder, function.args
    null = ir.Constant(POINTER, None)
    pool = ir.GlobalVariable(function.module, ir.IntType(8), POOL)
    pool.type = POINTER
    _call(emit, "pthread_mutex_lock", pool, MUTEX)
    is_free = builder.icmp_unsigned("==", read(builder, pool, PUBLISHED), null)
    with builder.if_then(is_free):
        builder.store(task, byte(builder, pool, PUBLISHED))
        _call(emit, "pthread_cond_broadcast", pool, CONDITION)
    _call(emit, "pthread_mutex_unlock", pool, MUTEX)
    _do(emit, task, INT64(0))
    with builder.if_then(is_free):
        _call(emit, "pthread_mutex_lock", pool, MUTEX)
        builder.store(null, byte(builder, pool, PUBLISHED))
        at_work = lambda: builder.icmp_unsigned("!=", read(builder, task, ACTIVE, INT64), INT64(0))
        with emit.repeat_while(at_work):
            _wait(emit, pool)
        _call(emit, "pthread_mutex_unlock", pool, MUTEX)
    builder.ret_void()


def _write_worker(function: ir.Function) -> None:
    """Waits for a task that may be joined, joins it, and begins again."""
    emit = Emitter(function, 1)
    builder, (pool,) = emit.builder, function.args
    _call(emit, "pthread_mutex_lock", pool, MUTEX)
    with emit.repeat_while(lambda: ir.Constant(ir.IntType(1), 1)):
        with emit.repeat_while(lambda: _nothing_to_join(emit, pool)):
            _wait(emit, pool)
        task = read(builder, pool, PUBLISHED)
        number = _add(builder, task, HELPERS, 1)
        _add(builder, task, ACTIVE, 1)
        _call(emit, "pthread_mutex_unlock", pool, MUTEX)
        _do(emit, task, number)
        _call(emit, "pthread_mutex_lock", pool, MUTEX)
        left = _add(builder, task, ACTIVE, -1)
        with builder.if_then(builder.icmp_unsigned("==", left, INT64(0))):
            _call(emit, "pthread_cond_broadcast", pool, CONDITION)
    builder.ret(ir.Constant(POINTER, None))


def _nothing_to_join(emit: Emitter, pool: Value) -> Value:
    builder = emit.builder
    task = read(builder, pool, PUBLISHED)
    is_nothing = emit.slot(ir.IntType(1))
    builder.store(ir.Constant(ir.IntType(1), 1), is_nothing)
    with builder.if_then(builder.icmp_unsigned("!=", task, ir.Constant(POINTER, None))):
        helpers, most = read(builder, task, HELPERS, INT64), read(builder, task, MOST_HELPERS, INT64)
        builder.store(builder.icmp_unsigned(">=", helpers, most), is_nothing)
    return builder.load(is_nothing, typ=ir.IntType(1))


def _do(emit: Emitter, task: Value, number: Value) -> None:
    kind = ir.FunctionType(ir.VoidType(), [POINTER, INT64])
    function = read(emit.builder, task, FUNCTION)
    function.type = kind.as_pointer()
    emit.builder.call(function, [task, number])


def _add(builder: ir.IRBuilder, task: Value, field: int, number: int) -> Value:
    """A field after it has been added to."""
    total = builder.add(read(builder, task, field, INT64), INT64(number))
    builder.store(total, byte(builder, task, field))
    return total


def _call(emit: Emitter, name: str, pool: Value, part: int) -> None:
    emit.call(name, byte(emit.builder, pool, part), result=INT32)


def _wait(emit: Emitter, pool: Value) -> None:
    parts = [byte(emit.builder, pool, part) for part in (CONDITION, MUTEX)]
    emit.call("pthread_cond_wait", *parts, result=INT32)

"""Divides the programs of one kernel call among XLA threads, each of which takes the next program in turn.

The calling thread works too, and waits only for programs that other threads have begun. Busy or late threads
therefore cost time but never block, and concurrent calls in all XLA threads do not wait for each other. A thread
that arrives after the call has ended finds no program left. The last thread to leave frees the task.
"""

from llvmlite import ir

from rollmill.fusion.backends.cpu.builder import INT32, INT64, POINTER, Emitter, Value, byte, read
from rollmill.fusion.backends.cpu.denormals import flush_denormals

NEXT, DONE, COME, HOLDERS, ARRAYS, SCRATCH, SIZE = range(0, 56, 8)
"""Byte offsets in a task: the next program, the number of finished programs, the threads that have arrived, the
threads that may still read the task, and the arguments of the programs."""

FIRST_FUNCTION = 48
"""Offset in bytes of the first function in the interface of XLA (xla/ffi/api/c_api.h, version 0). Each function
takes 8 bytes."""
DESTROY_ERROR, SCHEDULE = FIRST_FUNCTION + 2 * 8, FIRST_FUNCTION + 11 * 8
API_SIZE = 0
"""Offset of the interface's size, which shows whether XLA provides threads."""


class SharedPrograms:
    """The programs of a CPU kernel, which several XLA threads run in parallel.

    The kernel's function `program(arrays, number, scratch)` is called for each number below `programs`. Every
    thread has its own scratch memory.
    """

    def __init__(self, program: ir.Function, programs: int, scratch: int) -> None:
        self._program, self._programs, self._scratch = program, programs, scratch
        self._help = _internal(program.module, "help", [POINTER])
        self._work = _internal(program.module, "work", [POINTER])
        self._leave = _internal(program.module, "leave", [POINTER])
        self._write_work()
        self._write_leave()
        self._write_help()

    def write_call(
        self, emit: Emitter, api: Value, context: Value, arrays: Value, scratch: Value, helpers: int
    ) -> None:
        """Emits code that calls every program once, on the calling thread and at most `helpers` XLA threads.

        `emit` emits the function that XLA calls, with the XLA interface `api` and the call's `context`. `arrays`
        is the first argument of each program, and `scratch` holds scratch memory for all threads.
        """
        builder = emit.builder
        task = emit.call("malloc", INT64(SIZE), result=POINTER)
        for field, number in {NEXT: 0, DONE: 0, COME: 0, HOLDERS: helpers + 1}.items():
            builder.store(INT64(number), byte(builder, task, field))
        for field, pointer in {ARRAYS: arrays, SCRATCH: scratch}.items():
            builder.store(pointer, byte(builder, task, field))
        if helpers:
            with emit.loop(helpers):
                self._schedule(emit, api, context, task)
        builder.call(self._work, [task])
        with emit.repeat_while(lambda: self._is_at_work(builder, task)):
            emit.call("sched_yield", result=INT32)
        builder.call(self._leave, [task])

    def _schedule(self, emit: Emitter, api: Value, context: Value, task: Value) -> None:
        """Requests a thread. If none is available, the other threads do its share."""
        builder, null = emit.builder, ir.Constant(POINTER, None)
        refused = emit.slot(ir.IntType(1))
        builder.store(ir.Constant(ir.IntType(1), 1), refused)
        size = read(builder, api, API_SIZE, INT64)
        with builder.if_then(builder.icmp_unsigned(">", size, INT64(SCHEDULE))):
            error = _call_api(emit, api, SCHEDULE, [context, self._help, task])
            failed = builder.icmp_unsigned("!=", error, null)
            builder.store(failed, refused)
            with builder.if_then(failed):
                _call_api(emit, api, DESTROY_ERROR, [error])
        with builder.if_then(builder.load(refused, typ=ir.IntType(1))):
            builder.call(self._leave, [task])

    def _is_at_work(self, builder: ir.IRBuilder, task: Value) -> Value:
        done = builder.load_atomic(byte(builder, task, DONE), "acquire", 8, typ=INT64)
        return builder.icmp_unsigned("<", done, INT64(self._programs))

    def _write_work(self) -> None:
        """Writes the function that takes programs until none is left."""
        emit = Emitter(self._work, 1)
        builder, (task,) = emit.builder, self._work.args
        arrays, scratch = (read(builder, task, field) for field in (ARRAYS, SCRATCH))
        # The index is below the number of holders, for which there is scratch memory, because each holder works
        # once.
        number = builder.atomic_rmw("add", byte(builder, task, COME), INT64(1), "monotonic")
        own = emit.at(scratch, builder.mul(number, INT64(self._scratch)), ir.IntType(8))
        taken = emit.slot(INT64)
        before = flush_denormals(emit)

        def takes_one() -> Value:
            program = builder.atomic_rmw("add", byte(builder, task, NEXT), INT64(1), "monotonic")
            builder.store(program, taken)
            return builder.icmp_unsigned("<", program, INT64(self._programs))

        with emit.repeat_while(takes_one):
            builder.call(self._program, [arrays, builder.load(taken, typ=INT64), own])
            # Releases the results to threads that read the counter of finished programs.
            builder.atomic_rmw("add", byte(builder, task, DONE), INT64(1), "release")
        before.restore()
        builder.ret_void()

    def _write_leave(self) -> None:
        """Writes the function that frees a task once no other thread reads it."""
        emit = Emitter(self._leave, 1)
        builder, (task,) = emit.builder, self._leave.args
        holders = builder.atomic_rmw("sub", byte(builder, task, HOLDERS), INT64(1), "acq_rel")
        with builder.if_then(builder.icmp_unsigned("==", holders, INT64(1))):
            builder.call(emit.declared("free", ir.VoidType(), [POINTER]), [task])
        builder.ret_void()

    def _write_help(self) -> None:
        """Emits the function run by XLA threads."""
        builder, (task,) = Emitter(self._help, 1).builder, self._help.args
        builder.call(self._work, [task])
        builder.call(self._leave, [task])
        builder.ret_void()


def _internal(module: ir.Module, name: str, arguments: list[ir.Type]) -> ir.Function:
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), arguments), name)
    function.linkage = "internal"
    return function


def _call_api(emit: Emitter, api: Value, offset: int, values: list[Value]) -> Value:
    """Calls a function of the XLA interface with a struct of its own size, no extension, and pointers."""
    builder, fields = emit.builder, len(values) + 2
    struct = emit.slot(ir.ArrayType(POINTER, fields))
    builder.store(INT64(8 * fields), struct)
    for n, value in enumerate([ir.Constant(POINTER, None), *values], start=1):
        builder.store(value, byte(builder, struct, 8 * n))
    function = read(builder, api, offset)
    function.type = ir.FunctionType(POINTER, [POINTER]).as_pointer()
    return builder.call(function, [struct])

"""Distinguishes the compiled code of a simulator from the Python code around it in recordings.

As in RL-Scope (Gleeson et al., MLSys 2021), calls from Python into compiled code are intercepted. This uses
`sys.monitoring`, which exists since Python 3.12 (PEP 669). In earlier versions, a whole environment step counts as
the simulator.
"""

import sys
import threading
from types import CodeType, FunctionType, MethodType
from typing import Any

import jax

from rollmill.core.operations import span, stepped_operation

TOOL = "rollmill"
CALL = "__call__"
NOT_SIMULATORS = frozenset({"builtins", "jax", "jaxlib", "numpy", "rollmill"}) | sys.stdlib_module_names
"""Packages with compiled code that are part of Python, or that every environment calls."""


class SimulatorCalls:
    """Records a span for each call of a simulator, in all threads that step environments."""

    def __init__(self) -> None:
        self._open: dict[int, list[Any]] = {}
        self._on = False
        self._ignore: object = None
        """Returned for a call in a place of the code, makes it cost nothing any more."""

    def start(self) -> None:
        """Starts intercepting calls, unless this Python version cannot, or another tool is already profiling."""
        if sys.version_info < (3, 12) or sys.monitoring.get_tool(sys.monitoring.PROFILER_ID) is not None:
            return
        monitoring, events = sys.monitoring, sys.monitoring.events
        monitoring.use_tool_id(monitoring.PROFILER_ID, TOOL)
        monitoring.register_callback(monitoring.PROFILER_ID, events.CALL, self._on_call)
        for event in (events.C_RETURN, events.C_RAISE):
            monitoring.register_callback(monitoring.PROFILER_ID, event, self._on_return)
        monitoring.set_events(monitoring.PROFILER_ID, events.CALL | events.C_RETURN | events.C_RAISE)
        monitoring.restart_events()
        self._on, self._ignore = True, monitoring.DISABLE

    def stop(self) -> None:
        """Stops intercepting calls."""
        if self._on and sys.version_info >= (3, 12):
            sys.monitoring.set_events(sys.monitoring.PROFILER_ID, sys.monitoring.events.NO_EVENTS)
            sys.monitoring.free_tool_id(sys.monitoring.PROFILER_ID)
            self._on = False
            self._open.clear()

    def _on_call(self, code: CodeType, offset: int, function: object, argument: object) -> object:
        if not is_simulator(function):
            return self._ignore
        operation = stepped_operation()
        if operation is not None:
            opened = span(operation, "simulator")
            opened.__enter__()
            self._open.setdefault(threading.get_ident(), []).append((function, opened))
        return None

    def _on_return(self, code: CodeType, offset: int, function: object, argument: object) -> None:
        stack = self._open.get(threading.get_ident())
        if stack and stack[-1][0] is function:
            stack.pop()[1].__exit__(None, None, None)


def is_simulator(function: object) -> bool:
    """Returns whether a function is compiled code of a package other than Python, NumPy, JAX and Rollmill."""
    if isinstance(function, (FunctionType, MethodType, type, jax.stages.Wrapped)):
        return False
    if isinstance(getattr(type(function), CALL, None), FunctionType):  # an instance of a Python class
        return False
    return (_module_of(function) or "builtins").partition(".")[0] not in NOT_SIMULATORS


def _module_of(function: object) -> str | None:
    """Returns the module of a compiled function, or of its class for a method."""
    module = getattr(function, "__module__", None)
    if isinstance(module, str) and module != "builtins":
        return module
    owner = getattr(function, "__objclass__", None) or type(getattr(function, "__self__", None))
    return getattr(owner, "__module__", None)

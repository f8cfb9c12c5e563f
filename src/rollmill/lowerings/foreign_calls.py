"""Registers machine code with XLA, so that programs on CPUs can call it."""

import ctypes

import jax


def register_call(name: str, address: int) -> None:
    """Registers a function of machine code under a name, which no other function of this process may have.

    XLA calls the function by its typed foreign function interface. Raises a `RuntimeError` if the function is for
    another version of the interface.
    """
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    jax.ffi.register_ffi_target(name, make(address, None, None), platform="cpu")

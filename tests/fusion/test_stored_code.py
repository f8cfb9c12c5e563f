"""Machine code of a module is compiled once for a processor, and found in the cache afterwards."""

import ctypes

import pytest

pytest.importorskip("llvmlite")

from rollmill.fusion.backends.cpu import target

MODULE = "define i32 @answer(i32 %x) {{ %y = add i32 %x, {} \n ret i32 %y }}"


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """Returns the modules that are compiled, in a cache that is empty."""
    modules, compiled = [], target._compile
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(target, "_compile", lambda *args: modules.append(args) or compiled(*args))
    return modules


def answer(number, **options):
    address = target.function_address(MODULE.format(number), "answer", **options)
    return ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32)(address)(1)


def test_a_module_is_compiled_once(compiled, monkeypatch):
    assert [answer(2), answer(2), answer(3), answer(2)] == [3, 3, 4, 3]
    assert len(compiled) == 2
    answer(2, written_out=True)
    other = target.processor()._replace(name="x86-64")
    monkeypatch.setattr(target, "processor", lambda: other)
    answer(2)
    assert len(compiled) == 4


def test_damaged_code_is_compiled_again(compiled, tmp_path):
    answer(2)
    for file in (tmp_path / "code").iterdir():
        file.write_bytes(file.read_bytes()[:-1])
    assert answer(2) == 3 and len(compiled) == 2

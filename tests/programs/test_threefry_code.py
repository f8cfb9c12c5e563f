"""Random numbers of CPU programs by machine code: bit for bit those of JAX, in programs that can be stored."""

import platform
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry2x32_p
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from stored_draws import made

from rollmill.lowerings.threefry import MAX_CODED, THREEFRY_CALL, rolled_threefry, small_programs, unroll_threefry
from rollmill.programs import program_store, threefry_code
from rollmill.programs.program_store import ProgramStore, unknown_calls

pytest.importorskip("llvmlite")
pytestmark = pytest.mark.skipif(
    (sys.platform, platform.machine()) != threefry_code.TESTED, reason="no machine code"
)


@pytest.fixture(autouse=True)
def machine_code():
    """Draws by machine code, though other tests leave draws to XLA or have lowered them without it."""
    assert threefry_code.register_threefry()
    unroll_threefry(threefry_code.register_threefry)
    jax.clear_caches()


def lower(function, *arguments):
    return jax.jit(function).lower(*arguments)


def words_of(*words):
    return lower(lambda *words: threefry2x32_p.bind(*words), *words).compile()(*words)


# the vectors that are published with the generator
@pytest.mark.parametrize(
    ("key", "count", "expected"),
    [
        ((0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_known_vectors(key, count, expected):
    assert tuple(int(word) for word in words_of(*map(jnp.uint32, (*key, *count)))) == expected


SHAPES = {
    "one key": ((), (), (7,), (7,)),
    "one key, matrix": ((), (), (3, 21), (3, 21)),
    "a key for each word": ((33,), (33,), (33,), (33,)),
    "a key for each row": ((5, 1), (5, 1), (1, 9), (1, 9)),
    "one of the keys is a scalar": ((), (5,), (5,), (5,)),
    "one counter is a scalar": ((4,), (4,), (), (4,)),
    "scalars": ((), (), (), ()),
    "nothing": ((), (), (0, 3), (0, 3)),
    "no key": ((0,), (0,), (0,), (0,)),
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
def test_words_equal_those_of_a_loop_for_all_shapes(shapes):
    random = np.random.default_rng(3)
    words = [random.integers(0, 2**32, shape, dtype=np.uint32) for shape in shapes]
    whole = np.broadcast_arrays(*words)
    np.testing.assert_array_equal(words_of(*words), jax.jit(rolled_threefry)(*whole))


@pytest.mark.parametrize("count", [*range(1, 40), 1_000, 4_099])
def test_all_lengths(count):
    counts = np.arange(2 * count, dtype=np.uint32).reshape(2, count)
    keys = np.uint32(11), np.uint32(5)
    loop = jax.jit(rolled_threefry)(*(np.full(count, key) for key in keys), *counts)
    np.testing.assert_array_equal(words_of(*keys, *counts), loop)


def test_a_program_calls_the_code_and_can_be_stored():
    lowered = lower(lambda key: jax.random.normal(key, (8,)), jax.random.key(0))
    assert THREEFRY_CALL in lowered.as_text()
    assert not unknown_calls(lowered)


def test_many_words_are_left_to_xla():
    draws = lambda size: lower(lambda key: jax.random.bits(key, (size,)), jax.random.key(0)).as_text()
    assert THREEFRY_CALL in draws(MAX_CODED)
    assert THREEFRY_CALL not in draws(4 * MAX_CODED)


def draws_of(keys):
    return jax.vmap(lambda key: jax.random.bits(key, (4,)))(keys)


def test_a_program_whose_arrays_xla_divides_is_left_to_xla():
    mesh = Mesh(np.array(jax.devices()[:2]), ("i",))
    draws = jax.jit(draws_of, out_shardings=NamedSharding(mesh, PartitionSpec("i")))
    keys = jax.random.split(jax.random.key(0), 6)
    assert THREEFRY_CALL not in draws.lower(keys).as_text()
    np.testing.assert_array_equal(draws(keys), draws_of(keys))


def test_each_device_of_a_program_for_several_calls_the_code():
    mesh = Mesh(np.array(jax.devices()[:2]), ("i",))
    sides = {"in_specs": PartitionSpec("i"), "out_specs": PartitionSpec("i")}
    draws = jax.jit(jax.shard_map(draws_of, mesh=mesh, **sides))
    keys = jax.random.split(jax.random.key(0), 6)
    assert THREEFRY_CALL in draws.lower(keys).as_text()
    np.testing.assert_array_equal(draws(keys), draws_of(keys))


def test_a_program_of_which_xla_divides_one_axis_is_left_to_xla():
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(2, 1), ("i", "j"))
    sides = {"in_specs": PartitionSpec("i"), "out_specs": PartitionSpec("i"), "axis_names": {"i"}}
    draws = jax.jit(jax.shard_map(draws_of, mesh=mesh, **sides))
    keys = jax.random.split(jax.random.key(0), 6)
    assert THREEFRY_CALL not in draws.lower(keys).as_text()
    np.testing.assert_array_equal(draws(keys), draws_of(keys))


DRAWS = {
    "bits": lambda key: jax.random.bits(key, (3, 5)),
    "uniform": lambda key: jax.random.uniform(key, (9,)),
    "normal": lambda key: jax.random.normal(key, (2, 1, 4)),
    "integers": lambda key: jax.random.randint(key, (6,), 0, 100),
    "permutation": lambda key: jax.random.permutation(key, 11),
    "split": lambda key: jax.random.key_data(jax.random.split(key, 4)),
    "fold": lambda key: jax.random.key_data(jax.random.fold_in(key, 3)),
    "seed": lambda key: jax.random.key_data(jax.random.key(jax.random.bits(key))),
}


@pytest.mark.parametrize("batch", [(), (7,), (2, 3)], ids=str)
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_draws_equal_those_of_loops(draw, batch):
    keys = jax.random.split(jax.random.key(5), batch)
    for _ in batch:
        draw = jax.vmap(draw)
    coded = jax.jit(draw).lower(keys)
    unroll_threefry()
    jax.clear_caches()
    with small_programs():
        looped = jax.jit(lambda keys: draw(keys)).lower(keys)
    assert THREEFRY_CALL in coded.as_text() and THREEFRY_CALL not in looped.as_text()
    np.testing.assert_array_equal(coded.compile()(keys), looped.compile()(keys))


def test_an_exported_program_needs_no_code():
    draws = jax.jit(lambda key: jax.random.bits(key, (3,)))
    key = jax.random.key(2)
    exported = jax.export.export(draws, platforms=["cpu"])(key)
    assert THREEFRY_CALL not in exported.mlir_module()
    np.testing.assert_array_equal(exported.call(key), draws(key))


def bits_of(lowered):
    return lowered.compile()(jax.random.key(0))


def test_without_code_draws_are_left_to_xla():
    draws = lambda: lower(lambda key: jax.random.bits(key, (3,)), jax.random.key(0))
    coded = draws()
    unroll_threefry(lambda: False)
    jax.clear_caches()
    lowered = draws()
    assert THREEFRY_CALL in coded.as_text() and THREEFRY_CALL not in lowered.as_text()
    np.testing.assert_array_equal(bits_of(lowered), bits_of(coded))


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path))
    return tmp_path / threefry_code.FOLDER


def fail(*_, error=ImportError):
    raise error


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("installed_version", lambda name: None),
        ("TESTED", ("plan9", "x86_64")),
        ("compile_instructions", lambda source: None),
        ("compile_instructions", fail),
        ("_executable", partial(fail, error=PermissionError)),
        ("register_call", partial(fail, error=RuntimeError)),
    ],
    ids=["no LLVM", "another machine", "no plain code", "broken LLVM", "no executable memory", "another XLA"],
)
def test_a_machine_may_have_no_code(name, other, empty_cache, monkeypatch):
    monkeypatch.setattr(threefry_code, "register_call", lambda name, address: None)  # each name only once
    assert threefry_code._is_registered.__wrapped__()
    for file in empty_cache.iterdir():
        file.unlink()
    monkeypatch.setattr(threefry_code, name, other)
    assert not threefry_code._is_registered.__wrapped__()


def test_code_is_compiled_once_and_again_if_it_is_damaged(empty_cache, monkeypatch):
    code = threefry_code._instructions()
    (file,) = empty_cache.iterdir()
    with monkeypatch.context() as patched:
        patched.setattr(threefry_code, "compile_instructions", fail)
        assert threefry_code._instructions() == code
    file.write_bytes(file.read_bytes()[:-1])
    assert threefry_code._instructions() == code
    monkeypatch.setattr(threefry_code, "identify_processor", lambda: ("another",))
    threefry_code._instructions()
    assert len({*empty_cache.iterdir()}) == 2


@pytest.mark.parametrize(
    "source",
    [
        "declare void @other()\ndefine void @one() { call void @other()\n ret void }",
        "@data = global i32 3\ndefine i32 @one() { %value = load i32, ptr @data\n ret i32 %value }",
        "@data = internal global i32 3\ndefine ptr @one() { ret ptr @data }",
    ],
    ids=["call", "data", "address"],
)
def test_code_that_refers_to_others_is_refused(source):
    assert threefry_code.compile_instructions(source) is None
    assert threefry_code.compile_instructions("define i32 @one() { ret i32 1 }")


def test_code_runs_at_any_address():
    code = threefry_code._instructions()
    first, second = (threefry_code._executable(code) for _ in range(2))
    assert first != second
    name = f"{THREEFRY_CALL}_{second:x}"
    threefry_code.register_call(name, second)
    words = np.arange(20, dtype=np.uint32).reshape(4, 5)
    kind = jax.ShapeDtypeStruct((5,), np.uint32)
    np.testing.assert_array_equal(jax.ffi.ffi_call(name, [kind, kind])(*words), words_of(*words))


def loaded(script):
    """The only line that a script prints in a process of its own."""
    folder = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


LOADS = """
import sys
import jax
import numpy as np
from stored_draws import made
from rollmill.programs.program_store import ProgramStore

loaded = ProgramStore("draws", jax.devices()[0]).load(made())
print(None if loaded is None else loaded(np.array([1, 2], np.uint32)).tolist(), "llvmlite" in sys.modules)
"""


def test_a_process_that_loads_a_program_imports_no_compiler(empty_cache, monkeypatch):
    monkeypatch.setattr(program_store, "MIN_COMPILE_SECONDS", 0.0)
    store, make = ProgramStore("draws", jax.devices()[0]), made()
    compiled = store.compile(make, make.lower("draws"))
    expected = compiled(np.array([1, 2], np.uint32)).tolist()
    assert store.has(make) and THREEFRY_CALL in compiled.as_text()
    threefry_code._instructions()  # in this cache
    assert loaded(LOADS) == f"{expected} False"
    without = "from rollmill.programs import threefry_code\nthreefry_code.TESTED = ()\n"
    assert loaded(without + LOADS) == "None False"

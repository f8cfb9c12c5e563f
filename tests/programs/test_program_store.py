"""Compiled programs are found by what they depend on, and by nothing else."""

from collections import Counter
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rollmill
from rollmill.dataflow import iteration_digest, program_digests
from rollmill.dataflow.program_digests import Digests
from rollmill.programs import iteration_programs, kernel_choice, program_store
from rollmill.programs.compiled import lower
from rollmill.programs.iteration_programs import MAKERS, PACKAGE, MadeBeside, load_or_compile
from rollmill.programs.kernel_choice import KernelRequest
from rollmill.programs.kernels import Implementation, plain_kernels
from rollmill.programs.program_store import ProgramStore, StorableProgram, calls_of, store_for

SIZES = {"num_envs": 2, "num_steps": 4, "num_minibatches": 1, "update_epochs": 1, "total_timesteps": 8}
LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
SCALE = 1.0


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """Returns the folder of stored programs, which is empty. No other test has compiled the same programs.

    Programs are loaded from it each time.
    """
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TF_ONLY_HERE", str(tmp_path))
    monkeypatch.setattr(program_store, "MIN_COMPILE_SECONDS", 0.0)
    monkeypatch.setattr(program_store, "MAX_RECENT", 0)
    return tmp_path / program_store.FOLDER


@pytest.fixture
def lowerings():
    """Counts programs that are lowered, by their names."""
    counts = Counter()

    def hear(event, seconds, fun_name="", **_):
        counts.update([fun_name] if event == LOWERED else [])

    jax.monitoring.register_event_duration_secs_listener(hear)
    yield counts
    jax.monitoring.unregister_event_duration_listener(hear)


def of_training(lowerings):
    return [name for name in lowerings if "start_" in name or "step_" in name]


def graph_of(algorithm="ppo", environment="CartPole-v1", **options):
    network = rollmill.NetworkConfig(hidden_sizes=(4,))
    return getattr(rollmill, algorithm)(environment, network=network, **options)


def leaves_after(program, count=2):
    state = program.start()
    for _ in range(count):
        state, metrics = program.advance(state)
    of_keys = partial(jax.dtypes.issubdtype, b=jax.dtypes.prng_key)
    leaves = [jax.random.key_data(x) if of_keys(x.dtype) else x for x in jax.tree.leaves(state)]
    return [*map(np.asarray, (*leaves, metrics))]


SMALL_DQN = {
    "num_envs": 2,
    "num_steps": 4,
    "total_timesteps": 64,
    "buffer_size": 64,
    "batch_size": 4,
    "learning_starts": 8,
}


@pytest.mark.parametrize("settings", [SIZES, {"algorithm": "dqn", **SMALL_DQN}])
@pytest.mark.slow_beyond(1)
def test_a_stored_program_is_neither_lowered_nor_another_one(settings, stored, lowerings):
    compiled = lower(graph_of(**settings), seeds=(3,))
    assert len(of_training(lowerings)) == 2 and len(list(stored.iterdir())) == 2
    lowerings.clear()
    loaded = lower(graph_of(**settings), seeds=(3,))
    assert of_training(lowerings) == []
    assert loaded.metric_names == compiled.metric_names and loaded.donates_state == compiled.donates_state
    jax.tree.map(np.testing.assert_array_equal, leaves_after(compiled), leaves_after(loaded))


def doubled_twice(store):
    """Returns the result of a small program, which is found in a store or compiled."""
    number = jax.ShapeDtypeStruct((), jnp.float32)
    return load_or_compile(StorableProgram("step", lambda x: 4 * x, [number], lambda: number, {}), store)(1.5)


def test_a_damaged_program_is_compiled_again(stored, lowerings):
    assert doubled_twice(ProgramStore("name", jax.devices()[0])) == 6
    (file,) = stored.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    lowerings.clear()
    assert doubled_twice(ProgramStore("name", jax.devices()[0])) == 6
    assert lowerings.total() == 1 and len(file.read_bytes()) > len(whole) - 100
    lowerings.clear()
    assert doubled_twice(ProgramStore("name", jax.devices()[0])) == 6
    assert lowerings.total() == 0


@pytest.fixture
def loads(monkeypatch):
    """Lists the parts of programs that are loaded from files."""
    parts, load = [], ProgramStore._load
    monkeypatch.setattr(
        ProgramStore, "_load", lambda self, file, make: parts.append(make.part) or load(self, file, make)
    )
    return parts


def test_a_process_neither_lowers_nor_loads_again_what_it_has_compiled(stored, lowerings, loads, monkeypatch):
    monkeypatch.setattr(program_store, "MAX_RECENT", 2)
    compiled = lower(graph_of(**SIZES), seeds=(3,))
    lowerings.clear()
    again = lower(graph_of(**SIZES, learning_rate=0.5), seeds=(3,))  # the same programs
    assert of_training(lowerings) == loads == []
    assert any(not np.array_equal(a, b) for a, b in zip(leaves_after(compiled), leaves_after(again), strict=True))
    same = lower(graph_of(**SIZES), seeds=(3,))
    jax.tree.map(np.testing.assert_array_equal, leaves_after(compiled), leaves_after(same))
    for file in stored.iterdir():
        file.touch()  # another process may have replaced it
    lower(graph_of(**SIZES), seeds=(3,))
    assert of_training(lowerings) == [] and sorted(loads) == ["start", "step"]


def test_the_programs_used_last_are_kept_for_arguments_of_their_structure(stored, loads, monkeypatch):
    monkeypatch.setattr(program_store, "MAX_RECENT", 2)
    number, device = jax.ShapeDtypeStruct((), jnp.float32), jax.devices()[0]
    tree = StorableProgram("step", lambda x: {"x": 4 * x["x"]}, [{"x": number}], lambda: {"x": number}, {})
    for name in ("a", "b", "a", "c", "a"):
        assert doubled_twice(ProgramStore(name, device)) == 6
    assert loads == []
    doubled_twice(ProgramStore("b", device))
    assert loads == ["step"]
    assert program_store.RECENT.find(ProgramStore("b", device)._file(tree), tree) is None
    monkeypatch.setattr(program_store.RECENT, "programs", type(program_store.RECENT.programs)())
    doubled_twice(ProgramStore("b", device))
    assert loads == ["step", "step"]


def test_a_program_that_calls_other_code_says_so_and_is_not_stored(stored):
    matrix = jax.ShapeDtypeStruct((3, 3), jnp.float32)
    program = StorableProgram("step", jnp.linalg.cholesky, [matrix], lambda: matrix, {})
    store = ProgramStore("name", jax.devices()[0])
    compiled = load_or_compile(program, store)
    np.testing.assert_allclose(compiled(4 * np.eye(3, dtype=np.float32)), 2 * np.eye(3))
    assert store.refusal.startswith("it calls lapack_") and not stored.exists()


def test_a_start_that_cannot_be_loaded_is_lowered_with_the_settings_of_its_caller(stored):
    seen = []

    def function(x):
        seen.append(jax.config.jax_numpy_rank_promotion)
        return x + 1

    number = jax.ShapeDtypeStruct((), jnp.float32)
    program = StorableProgram("start", function, [number], lambda: number, {})
    store = ProgramStore("name", jax.devices()[0])
    stored.mkdir()
    store._file(program).write_bytes(b"damaged")
    with jax.numpy_rank_promotion("warn"), MadeBeside(program, store) as begun:  # of this thread alone
        assert begun.wait()(1.0) == 2
    assert seen == ["warn"]


def test_a_program_with_kernels_is_loaded_without_writing_them(stored, lowerings, monkeypatch):
    monkeypatch.setattr(iteration_programs, "KERNEL_PLATFORMS", ("cpu",))
    monkeypatch.setattr(program_store, "calls_of", lambda text: set())  # this process has their code
    make = lambda: lower(graph_of(**SIZES), fusion="rollout")
    compiled = make()
    lowerings.clear()
    with monkeypatch.context() as changed:
        changed.setattr(kernel_choice, "choose_kernels", lambda *_, **__: pytest.fail("kernels are chosen again"))
        loaded = make()
    assert of_training(lowerings) == []
    assert loaded.launches == compiled.launches and loaded.launches["rollouts"] is not None
    assert loaded.notes == [note for note in compiled.notes if "finding kernels" not in note]
    jax.tree.map(np.testing.assert_array_equal, leaves_after(compiled), leaves_after(loaded))
    (stored / next(file.name for file in stored.iterdir() if file.name.startswith("step"))).unlink()
    assert make().launches == compiled.launches and len(of_training(lowerings)) == 1


@pytest.mark.parametrize("has_kernels", [False, True])
def test_iterations_with_a_replay_memory_are_stored_where_that_was_tested(monkeypatch, has_kernels):
    store = program_store.ProgramStore("digest")
    monkeypatch.setattr(iteration_programs, "store_for", lambda *_: store)
    monkeypatch.setattr(iteration_programs, "may_be_stored", lambda mesh: True)
    device = SimpleNamespace(platform="gpu")
    request = KernelRequest(graph_of("dqn", **SMALL_DQN), "full", "float32", 1, [device], 1, None)
    mesh = SimpleNamespace(devices=np.array([device]))
    maker = iteration_programs.StepMaker(request, None, mesh, None, None, None, [])
    kernels = plain_kernels(1)
    if has_kernels:
        kernels = kernels._replace(gradients=Implementation(None, True, None, (8,)))
    assert (maker._store(kernels) is store) == (not has_kernels)


def test_programs_of_a_gpu_depend_on_its_driver_and_not_on_the_processor(monkeypatch):
    gpu = SimpleNamespace(
        platform="gpu",
        device_kind="H200",
        compute_capability="9.0",
        client=SimpleNamespace(platform="gpu", platform_version="cuda 13"),
    )
    around = program_store.surroundings(gpu)
    monkeypatch.setattr(program_store, "identify_processor", lambda: ("another",))
    assert program_store.surroundings(gpu) == around
    monkeypatch.setattr(program_store, "_driver", lambda: "another")
    assert program_store.surroundings(gpu) != around


def environment(name="Scaled", host=False):
    """Returns an environment that reads a global number, and may call a function of the host."""
    cartpole = rollmill.make("CartPole-v1")

    def step(key, state, action, params):
        timestep = cartpole.step(key, state, action, params)
        reward = timestep.reward * SCALE
        if host:
            reward = jax.pure_callback(
                np.asarray, jax.ShapeDtypeStruct((), jnp.float32), reward, vmap_method="sequential"
            )
        return timestep._replace(reward=reward)

    return cartpole._replace(name=name, step=step)


def test_a_number_that_the_environment_reads_makes_another_program(monkeypatch):
    first = iteration_digest(rollmill.ppo(environment(), **SIZES))
    assert first == iteration_digest(rollmill.ppo(environment(), **SIZES))
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    assert first != iteration_digest(rollmill.ppo(environment(), **SIZES))


def test_a_program_that_calls_a_function_of_the_host_is_not_stored(stored):
    graph = rollmill.ppo(environment(host=True), **SIZES)
    assert iteration_digest(graph) is None
    lower(graph)
    assert [file.name.partition("-")[0] for file in stored.iterdir()] == ["start"]


class Doubling:
    """A rule with a text that tells nothing of it."""

    def __repr__(self):
        return "rule"


def test_an_object_that_tells_nothing_of_itself_makes_a_digest_incomplete(monkeypatch):
    primitive = jax.extend.core.Primitive("held")
    primitive.def_abstract_eval(lambda x, **_: x)
    monkeypatch.setattr(program_digests, "_primitives", lambda _: {id(primitive)})
    digest = lambda held: Digests().whole(jax.make_jaxpr(lambda x: primitive.bind(x, held=held))(1.0))
    assert digest(Doubling()) is None and digest(lambda: 0) is None
    assert digest("text") != digest("texts") and digest((1, None)) is not None


class FTTuple:
    """A tree of arguments, as scans of JAX 0.11 hold one."""

    def __init__(self, *elts):
        self.elts = elts

    def __repr__(self):
        return "tree"


FTTuple.__module__ = "jax._src.flattree"


def test_a_tree_of_arguments_is_known_by_its_parts():
    digest = lambda held: Digests()._value(held)
    assert digest(FTTuple(FTTuple(None), ())) == digest(FTTuple(FTTuple(None), ()))
    assert digest(FTTuple(FTTuple(None), ())) != digest(FTTuple(FTTuple(None, None), ()))
    digests = Digests()
    digests._value(FTTuple(FTTuple(None), 1))
    assert digests._is_whole
    digests._value(FTTuple(Doubling()))
    assert not digests._is_whole


def test_a_primitive_of_another_package_makes_a_digest_incomplete():
    primitive = jax.extend.core.Primitive("sin")
    primitive.def_abstract_eval(lambda x: x)
    digest = lambda function: Digests().whole(jax.make_jaxpr(function)(1.0))
    assert digest(primitive.bind) is None and digest(jax.jit(primitive.bind)) is None
    assert digest(jax.lax.sin_p.bind) is not None


def test_random_numbers_of_another_kind_make_another_program():
    def draw(is_partitionable):
        with jax.threefry_partitionable(is_partitionable):
            return jax.random.bits(jax.random.key(0), (3,))

    digests = {Digests().whole(jax.make_jaxpr(lambda kind=kind: draw(kind))()) for kind in (True, False)}
    assert len(digests) == 2


def test_a_store_that_cannot_be_entered_is_passed_over(stored, monkeypatch):
    def refuse(path, **_):
        raise PermissionError(path)

    monkeypatch.setattr(program_store.Path, "exists", refuse)
    assert doubled_twice(ProgramStore("name", jax.devices()[0])) == 6


def test_files_that_lower_primitives_make_programs():
    lowering = [file for file in PACKAGE.rglob("*.py") if "register_lowering(" in file.read_text()]
    assert lowering and set(lowering) <= set(MAKERS)


def named(known=(), sources=(), digest="digest"):
    return store_for(jax.devices()[0], digest, known, sources).name


def test_the_place_of_a_program_depends_on_settings_variables_and_sources(tmp_path, monkeypatch):
    source = tmp_path / "source.py"
    source.write_text("1")
    before = named(sources=[source])
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", "elsewhere")
    monkeypatch.chdir(tmp_path)
    assert named(sources=[source]) == before
    with jax.default_matmul_precision("float32"):
        assert named(sources=[source]) != before
    with monkeypatch.context() as changed:
        changed.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
        assert named(sources=[source]) == before, "XLA has read its flags"
        changed.setattr(program_store, "_flags", lambda: "others")
        assert named(sources=[source]) != before
    with monkeypatch.context() as changed:
        changed.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        assert named(sources=[source]) != before
    with monkeypatch.context() as changed:
        changed.setenv("NVIDIA_VISIBLE_DEVICES", "GPU-0123")
        assert named(sources=[source]) == before
    assert named(["other"], [source]) != before and named(sources=[source], digest="other") != before
    source.write_text("2")
    assert named(sources=[source]) != before
    assert named(digest=None) is None
    assert store_for(SimpleNamespace(platform="tpu"), "digest", (), ()).name is None


def test_calls_out_of_a_program_are_found():
    solved = jax.jit(jnp.linalg.cholesky).lower(jnp.eye(3)).as_text()
    foreign = jax.ffi.ffi_call("my-op::x", jax.ShapeDtypeStruct((), jnp.float32))
    assert calls_of(jax.jit(foreign).lower(1.0).as_text()) == {"my-op::x"}
    assert calls_of(solved) and not calls_of(jax.jit(jnp.sin).lower(1.0).as_text())

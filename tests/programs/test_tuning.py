"""Searches for fast kernels: what compiles in the background ends with them."""

import contextlib
import subprocess
import sys
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import rollmill
from rollmill.fusion import Search, Tuned
from rollmill.fusion.tune import timing
from rollmill.fusion.tune.search import structure_text
from rollmill.programs import compiled, iteration_programs, kernels, search_cost
from rollmill.programs.compiled import lower
from rollmill.programs.iteration_programs import StepMaker, seconds_of_iteration
from rollmill.programs.kernel_choice import KernelRequest
from rollmill.programs.kernels import Implementation, plain_kernels
from rollmill.programs.search_cost import SearchCost, StoredSeconds
from rollmill.programs.tuning import Tuner
from wordings import raises


@contextlib.contextmanager
def compiling_for_an_hour(processes):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    processes.append(process)
    try:
        yield process.wait
    finally:
        process.kill()
        process.wait()


def search_in(folder, compile_ahead, traced=lambda: None):
    def fused(launch):
        def function(x):
            traced()
            return x * launch[0]

        return function

    shapes = [jax.ShapeDtypeStruct((8,), jnp.float32)]
    return Search(folder / "launch.json", [(1,), (2,)], fused, lambda x: x, shapes, compile_ahead)


def no_wait():
    return contextlib.nullcontext(lambda: None)


def test_a_search_that_is_interrupted_ends_its_processes_and_compiles_nothing_more(tmp_path):
    processes, traced = [], []
    search = search_in(tmp_path, lambda: compiling_for_an_hour(processes), lambda: traced.append(1))
    with pytest.raises(KeyboardInterrupt), Tuner(jax.devices()[0]) as tuner:
        tuner.start(search, lambda: lambda: [jnp.ones(8)])
        raise KeyboardInterrupt
    assert [process.poll() is not None for process in processes] == [True]
    for thread in threading.enumerate():
        if thread.name.startswith("rollmill-compile"):
            thread.join(30)
            assert not thread.is_alive()
    assert not traced and not search.file.exists()


def test_candidates_are_timed_once_and_their_result_is_stored(tmp_path):
    search, prepared = search_in(tmp_path, no_wait), []

    def prepare():
        prepared.append(1)
        return lambda: [jnp.ones(8)]

    for is_stored in (False, True):
        with Tuner(jax.devices()[0]) as tuner:
            tuned = tuner.start(search, prepare)()
            assert isinstance(tuned, Tuned) and tuned.launch in search.launches
            assert (tuner.seconds == 0) == is_stored
    assert prepared == [1]


@pytest.fixture
def clock(monkeypatch):
    """Returns a clock that stands until something advances it, in the place of all that time searches."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(timing, "clock", lambda: clock.now)
    return clock


def taking(clock, *seconds):
    """Returns candidates that take so long in each of their calls, the last for all later ones."""

    def candidate(seconds):
        left = list(seconds)

        def function():
            clock.now += left.pop(0) if len(left) > 1 else left[0]
            return ()

        return lambda: function

    return [candidate(each if isinstance(each, tuple) else (each,)) for each in seconds]


@pytest.mark.parametrize(("times", "chosen"), [((1.0, 0.98), (1,)), ((0.98, 1.0), (1,)), ((1.0, 0.9), (2,))])
def test_of_launches_that_are_as_fast_the_first_is_taken(times, chosen, tmp_path, clock):
    """So that searches on the same machine choose the same."""
    tuned = timing.fastest(search_in(tmp_path, no_wait), taking(clock, *times, 2.0), ())
    assert tuned.launch == chosen
    assert (tuned.seconds, tuned.unfused_seconds) == pytest.approx((times[chosen[0] - 1], 2.0))


def test_kernels_that_were_asked_for_are_not_compared_with_xla(tmp_path, clock):
    search = search_in(tmp_path, no_wait)
    alone = search.without_comparison()
    assert len(timing.compile_candidates(search)) == 3 and len(timing.compile_candidates(alone)) == 2
    assert timing.fastest(alone, taking(clock, 1.0, 0.5), ()).gain is None
    assert search.stored() is None and alone.stored() == ((2,), pytest.approx(0.5), None)
    timing.fastest(search, taking(clock, 1.0, 0.5, 2.0), ())
    assert search.without_comparison() == search  # the times are known


def alone_in(folder):
    """Returns a search whose kernels are timed alone, and the launches of which whole functions were traced."""
    traced = []
    search = search_in(folder, no_wait)
    whole = lambda launch: traced.append(launch) or search.fused(launch)
    kernel = lambda launch: lambda doubled, one: doubled * launch[0] + one
    return search._replace(fused=whole, alone=kernel, inputs=lambda x: (2 * x, x[0])), traced


def test_kernels_are_compiled_alone_and_get_what_is_computed_of_the_arguments(tmp_path):
    search, traced = alone_in(tmp_path)
    inputs = search.inputs(jnp.ones(8))
    first, second, unfused = (each() for each in timing.compile_candidates(search))
    assert [float(each(*inputs)[0]) for each in (first, second)] == [3.0, 5.0] and not traced
    assert float(unfused(jnp.ones(8))[0]) == 1.0
    for way in (search, search.without_comparison()):
        with Tuner(jax.devices()[0]) as tuner:
            assert tuner.start(way, lambda: lambda: [jnp.ones(8)])().launch in search.launches
    assert len(traced) == 1  # the fastest, to be compared with XLA's


def test_the_launch_is_chosen_by_its_kernel_and_compared_by_the_whole(tmp_path, clock):
    (whole,) = taking(clock, 3.0)
    search, traced = alone_in(tmp_path)
    candidates = taking(clock, 1.0, 0.5, 6.0)
    tuned = timing.fastest(search, candidates, (), inputs=(), compile_whole=lambda function, shapes: whole())
    assert traced == [(2,)]
    assert (tuned.launch, tuned.seconds, tuned.unfused_seconds) == ((2,), pytest.approx(3.0), pytest.approx(6.0))


def test_a_call_that_the_machine_disturbed_changes_no_choice(tmp_path, clock):
    disturbed = (5.0, 1.1, 3.0, 0.9)  # the first call, one alone, one in a row, and all others
    tuned = timing.fastest(search_in(tmp_path, no_wait), taking(clock, 1.0, disturbed, 2.0), ())
    assert tuned.launch == (2,) and tuned.seconds == pytest.approx(0.9)


def test_a_launch_that_is_far_slower_is_called_twice_alone(tmp_path, clock):
    timing.fastest(search_in(tmp_path, no_wait), taking(clock, 1.0, 100.0, 1.0), ())
    assert clock.now < 2 * 100 + 20


def test_a_search_that_is_late_takes_the_fastest_until_then_and_stores_nothing(tmp_path, clock):
    search, candidates = search_in(tmp_path, no_wait), taking(clock, 1.0, 0.1, 2.0)
    tuned = timing.fastest(search, candidates, (), is_late=lambda: clock.now >= 2)
    assert tuned.launch == (1,) and not search.file.exists()


def test_a_search_ends_when_compiling_takes_as_long_as_its_kernels_can_save(tmp_path):
    processes, clock = [], SimpleNamespace(now=0.0)
    search = search_in(tmp_path, lambda: compiling_for_an_hour(processes))
    with Tuner(jax.devices()[0], limit=30.0, clock=lambda: clock.now) as tuner:
        find = tuner.start(search, lambda: lambda: [jnp.ones(8)])
        clock.now = 31.0
        with raises("kernels-still-compile-after-s", "30"):
            find()
        assert tuner.was_late and tuner.seconds == 31
    assert [process.poll() is not None for process in processes] == [True]


def test_a_search_ends_when_the_function_with_its_fastest_kernel_compiles_too_long(tmp_path):
    search, _ = alone_in(tmp_path)
    compiling, goes_on = threading.Event(), threading.Event()

    def fused(launch):
        def function(x):
            compiling.set()
            goes_on.wait(60)
            return x * launch[0]

        return function

    def now():
        return 31.0 if compiling.is_set() else 0.0

    search = search._replace(fused=fused)
    with Tuner(jax.devices()[0], limit=30.0, clock=now) as tuner:
        find = tuner.start(search, lambda: lambda: [jnp.ones(8)])
        submit = tuner.compile

        def compile_first(*arguments):
            compiled = submit(*arguments)
            assert compiling.wait(60)
            return compiled

        tuner.compile = compile_first
        with raises("kernels-still-compile-after-s", "30"):
            find()
        assert tuner.was_late and not search.file.exists()
        goes_on.set()


@pytest.mark.parametrize(
    ("platform", "seconds", "pays"),
    [("gpu", 14.0, False), ("gpu", 17.0, True), ("cpu", 14.0, False), ("cpu", 17.0, True), ("tpu", 1e9, False)],
)
def test_a_search_is_begun_if_kernels_can_save_more_than_it_takes(platform, seconds, pays):
    cost = SearchCost(platform, seconds)
    assert cost.pays == pays
    assert cost.limit == pytest.approx(0.6 * seconds)
    assert f"takes about {seconds:,.0f} s without kernels" in str(cost)


STORED_KERNELS = plain_kernels(1)._replace(rollouts=Implementation(None, True, "a kernel", (8,)))


@pytest.mark.parametrize(
    ("seconds", "seconds_by_xla", "taken"),
    [
        (0.05, 0.10, True),  # a search would pay for neither, and kernels are there
        (0.10, 0.05, False),
        (0.05, 0.05, False),
        (0.20, 0.90, False),  # a search can save more than it takes
        (0.05, None, True),  # compiling XLA's program takes as long as the training
        (0.15, None, False),
    ],
)
def test_kernels_that_are_stored_cost_no_search(tmp_path, monkeypatch, seconds, seconds_by_xla, taken):
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(iteration_programs, "KERNEL_PLATFORMS", ("cpu",))
    choices = {"full": None, "rollout": STORED_KERNELS}
    stored = lambda request, makers: SimpleNamespace(read=lambda: choices.get(request.fusion))
    monkeypatch.setattr(iteration_programs, "StoredChoices", stored)
    monkeypatch.setattr(StepMaker, "_store", lambda self, kernels: SimpleNamespace(load=lambda make: "loaded"))
    monkeypatch.setattr(StepMaker, "_seconds_by_xla", lambda self: SimpleNamespace(read=lambda: seconds_by_xla))
    kept = StoredSeconds("kernels")
    monkeypatch.setattr(StepMaker, "_stored_seconds", lambda self, known, makers: kept)
    graph = SimpleNamespace(loops=SimpleNamespace(iterations=100))
    request = KernelRequest(graph, "auto", "float32", 1, jax.devices()[:1], 1, None)
    maker = StepMaker(request, lambda kernels: None, None, None, None, lambda step: seconds, [])
    assert maker._ready() == ((STORED_KERNELS, "loaded") if taken else None)
    assert kept.read() == seconds  # so that the next run decides alike


def test_an_iteration_is_timed_without_its_first_call():
    clock, calls = SimpleNamespace(now=0.0), []

    def run(state):
        clock.now += 0.05 if calls else 9.0
        calls.append(state)
        return state + 1

    assert seconds_of_iteration(lambda: 0, run, lambda: clock.now) == pytest.approx(0.05)
    assert calls == [0, 1, 2, 3, 4]


def test_the_pace_of_an_iteration_is_measured_once(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path))
    stored = StoredSeconds("name")
    assert stored.read() is None
    stored.keep(0.5)
    stored.keep(0.7)
    assert (
        StoredSeconds("name").read() == 0.5 and StoredSeconds("other").read() is StoredSeconds(None).read() is None
    )
    for content in ("-1.0", "Infinity", '"fast"', "{"):
        (tmp_path / "seconds" / "name.json").write_text(content)
        assert StoredSeconds("name").read() is None


@pytest.fixture
def lowered_by_auto(tmp_path, monkeypatch):
    """Returns a function that compiles a small training, for which any number of steps is enough to search."""
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernels, "MIN_STEPS_TO_TUNE", {"cpu": 0})
    monkeypatch.setattr(search_cost, "SEARCH_SECONDS", {"cpu": 1e6})
    network = rollmill.NetworkConfig(hidden_sizes=(4,))
    sizes = {"num_envs": 2, "num_steps": 4, "num_minibatches": 1, "update_epochs": 1, "total_timesteps": 16}
    return lambda: lower(rollmill.ppo("CartPole-v1", network=network, **sizes), fusion="auto")


def test_auto_searches_only_where_that_pays(lowered_by_auto, tmp_path):
    program = lowered_by_auto()
    (note,) = program.notes
    assert program.launches is not None  # which the run records, and goes on with
    assert program.launches.get("rollouts") is program.launches.get("gradients") is None
    assert "without kernels, and the search for the fastest kernels 1,000,000 s" in note
    assert len(list((tmp_path / "seconds").iterdir())) == 1


@pytest.mark.slow
def test_auto_searches_where_it_is_not_known_what_kernels_can_save(lowered_by_auto, tmp_path, monkeypatch):
    def fail(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(compiled, "seconds_of_iteration", fail)
    *_, search = lowered_by_auto().notes
    assert "the search for kernels took" in search and not (tmp_path / "seconds").exists()


def test_the_structure_of_a_pytree_has_no_address_in_its_text():
    """Otherwise the result of a search would never be found again."""
    texts = {structure_text(jax.tree_util.Partial(function, 1.0)) for function in (lambda x: x, lambda x: x)}
    assert len(texts) == 1 and "lambda" in texts.pop()

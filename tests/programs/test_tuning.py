"""Searches for fast kernels: what compiles in the background ends with them."""

import concurrent.futures
import contextlib
import subprocess
import sys
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rollmill
from rollmill.core.errors import CannotFuse
from rollmill.fusion import LaunchSearch, TunedLaunch
from rollmill.fusion.tune import timing
from rollmill.fusion.tune.search import structure_text
from rollmill.programs import compiled, iteration_programs, kernels, search_cost, tuning
from rollmill.programs.compiled import lower
from rollmill.programs.iteration_programs import StepMaker, seconds_of_call
from rollmill.programs.kernel_choice import KernelRequest
from rollmill.programs.kernels import Implementation, plain_kernels
from rollmill.programs.search_cost import (
    LIKELY_SAVING,
    MAX_LOSS,
    MAX_RISK,
    SearchBudget,
    SearchRecords,
    SearchTooLong,
    StoredSeconds,
)
from rollmill.programs.tuning import Tuner
from wordings import raises


@contextlib.contextmanager
def compiling_for_an_hour(processes):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    processes.append(process)
    try:
        yield lambda number: process.wait()
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
    return LaunchSearch(folder / "launch.json", [(1,), (2,)], fused, lambda x: x, shapes, compile_ahead)


def no_wait():
    return contextlib.nullcontext(lambda number: None)


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
            assert isinstance(tuned, TunedLaunch) and tuned.launch in search.launches
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
    tuned = timing.find_fastest_launch(search_in(tmp_path, no_wait), taking(clock, *times, 2.0), ())
    assert tuned.launch == chosen
    assert (tuned.seconds, tuned.unfused_seconds) == pytest.approx((times[chosen[0] - 1], 2.0))


def test_kernels_that_were_asked_for_are_not_compared_with_xla(tmp_path, clock):
    search = search_in(tmp_path, no_wait)
    alone = search.without_comparison()
    assert len(timing.compile_candidates(search)) == 3 and len(timing.compile_candidates(alone)) == 2
    assert timing.find_fastest_launch(alone, taking(clock, 1.0, 0.5), ()).speedup is None
    assert search.stored_result() is None and alone.stored_result() == ((2,), pytest.approx(0.5), None)
    timing.find_fastest_launch(search, taking(clock, 1.0, 0.5, 2.0), ())
    assert search.without_comparison() == search  # the times are known


def alone_in(folder):
    """Returns a search whose kernels are timed alone, and the launches of which whole functions were traced."""
    traced = []
    search = search_in(folder, no_wait)
    whole = lambda launch: traced.append(launch) or search.fused(launch)
    kernel = lambda launch: lambda doubled, one: doubled * launch[0] + one
    return search._replace(fused=whole, kernel_only=kernel, inputs=lambda x: (2 * x, x[0])), traced


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
    tuned = timing.find_fastest_launch(
        search, candidates, (), inputs=(), compile_whole=lambda function, shapes: whole()
    )
    assert traced == [(2,)]
    assert (tuned.launch, tuned.seconds, tuned.unfused_seconds) == ((2,), pytest.approx(3.0), pytest.approx(6.0))


def test_a_call_that_the_machine_disturbed_changes_no_choice(tmp_path, clock):
    disturbed = (5.0, 1.1, 3.0, 0.9)  # the first call, one alone, one in a row, and all others
    tuned = timing.find_fastest_launch(search_in(tmp_path, no_wait), taking(clock, 1.0, disturbed, 2.0), ())
    assert tuned.launch == (2,) and tuned.seconds == pytest.approx(0.9)


def test_a_launch_that_is_far_slower_is_called_twice_alone(tmp_path, clock):
    timing.find_fastest_launch(search_in(tmp_path, no_wait), taking(clock, 1.0, 100.0, 1.0), ())
    assert clock.now < 2 * 100 + 20


def test_a_search_that_is_late_takes_the_fastest_until_then_and_stores_nothing(tmp_path, clock):
    search, candidates = search_in(tmp_path, no_wait), taking(clock, 1.0, 0.1, 2.0)
    tuned = timing.find_fastest_launch(search, candidates, (), is_late=lambda: clock.now >= 2)
    assert tuned.launch == (1,) and not search.file.exists()


@pytest.fixture
def records(tmp_path, monkeypatch):
    """Returns the records of searches on a kind of machine, which are empty."""
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path / "cache"))
    return SearchRecords("cpu", "a processor")


def test_a_search_ends_when_it_has_taken_what_it_may(tmp_path, records):
    processes, clock = [], SimpleNamespace(now=0.0)
    search = search_in(tmp_path, lambda: compiling_for_an_hour(processes))
    with Tuner(jax.devices()[0], budget=SearchBudget(300.0, 5.0, records), clock=lambda: clock.now) as tuner:
        find = tuner.start(search, lambda: lambda: [jnp.ones(8)])
        clock.now = 31.0
        with raises("kernels-still-compile-after-s", "30"):
            find()
        assert tuner.was_late and tuner.seconds == 31
    assert [process.poll() is not None for process in processes] == [True]
    assert records.predict(1) == 1.5 * 62  # twice as long, as it had not ended, and a margin


def test_a_search_ends_when_the_function_with_its_fastest_kernel_compiles_too_long(tmp_path, records):
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
    with Tuner(jax.devices()[0], budget=SearchBudget(300.0, 5.0, records), clock=now) as tuner:
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


def test_the_seconds_of_a_search_are_predicted_from_those_on_the_same_kind_of_machine(records):
    assert records.predict(100) == records.least() == 10.0  # nothing is known
    for size, seconds in ((100, 4.0), (200, 6.0), (200, 50.0), (10_000, 60.0)):
        records.add(size, seconds)
    assert records.predict(100) == 1.5 * 6  # the median of similar size
    assert records.predict(400) == 1.5 * 16  # larger than all three
    assert records.predict(20_000) == 1.5 * 120
    assert records.predict(1_000_000) == 1.5 * 6000
    assert records.predict(1_000_000, 150.0) == 150.0  # known better than from searches of another size
    assert records.predict(400, 150.0) == 1.5 * 16
    assert SearchRecords("cpu", "a processor").least() == 4.0
    assert SearchRecords("cpu", "another").least() == 10.0
    assert SearchRecords("tpu", "another").least() == float("inf")


def test_a_kernel_that_compiles_for_minutes_is_tried_only_in_long_runs(tmp_path, records):
    search = search_in(tmp_path, no_wait)._replace(compile_seconds=150.0, launches=[(1,)])

    def found_in(training):
        budget = SearchBudget(training, 5.0, records)
        with Tuner(jax.devices()[0], budget=budget, clock=lambda: 0.0) as tuner:
            return tuner.start(search, lambda: lambda: [jnp.ones(8)])()

    with raises("search-for-fastest-takes-about", "150", "100", kind=SearchTooLong):
        found_in(1000.0)
    assert found_in(1600.0).launch == (1,)


def test_damaged_records_are_forgotten(records, tmp_path):
    records.add(100, 4.0)
    (file,) = (tmp_path / "cache" / "searches").iterdir()
    for content in ("{}", '[{"size": 0, "seconds": 1.0}]', '[{"size": 1, "seconds": Infinity}]', "["):
        file.write_text(content)
        assert records.least() == 10.0


@pytest.mark.parametrize(("seconds", "pays"), [(29.0, False), (31.0, True), (float("inf"), True)])
def test_a_search_begins_if_kernels_are_likely_to_save_more_than_it_takes(records, seconds, pays):
    budget = SearchBudget(seconds, 5.0, records)
    assert budget.pays == pays
    if seconds < 1e9:
        assert f"takes about {seconds:,.0f} s without kernels" in str(budget)


class ArtificialMachine:
    """Searches for kernels of given sizes, that take given seconds to compile one after the other, and save given
    shares of the training's seconds. Nothing is compiled.
    """

    def __init__(self, folder, records):
        self._folder, self._records = folder, records
        self._clock, self._ends = 0.0, {}
        self._of_thread = threading.local()  # a thread that has compiled is ahead of the clock
        self.begun = []
        """Seconds of compilation of the searches that were begun."""

    def now(self):
        return getattr(self._of_thread, "now", self._clock)

    def wait(self, futures, timeout):
        concurrent.futures.wait(futures)
        compiled, end = max(self._ends.values()), self._clock + (float("inf") if timeout is None else timeout)
        self._clock = max(self._clock, min(compiled, end))
        return SimpleNamespace(not_done=futures if compiled > end else [])

    def compile_candidates(self, search, wait_for_kernel):
        self._of_thread.now = self._ends[search.file]
        return ()

    def seconds_lost(self, training, program, kernels):
        """Returns the seconds that a training takes longer than without kernels."""
        self._clock = 0.0
        self._ends.clear()
        self.begun.clear()
        budget = SearchBudget(training, program, self._records)
        if not budget.pays:
            return 0.0
        with Tuner(jax.devices()[0], budget=budget, clock=self.now) as tuner:
            refused = self._search(tuner, kernels, training)
            if refused and budget.saved:
                self._search(tuner, refused, training)
        return self._clock - (budget.saved - program if budget.uses_kernels else 0.0)

    def _search(self, tuner, kernels, training):
        """Searches for kernels, and returns those whose search was not begun."""
        found, refused = [], []
        for kernel in kernels:
            try:
                found.append((self._start(tuner, *kernel[:2]), kernel))
            except SearchTooLong:
                refused.append(kernel)
        for find, kernel in found:
            with contextlib.suppress(CannotFuse):
                find()
                tuner.budget.saved += kernel[2] * training
        return refused

    def _start(self, tuner, size, seconds):
        search = search_in(self._folder / str(size), no_wait)._replace(size=size)
        end = max([self._clock, *self._ends.values()]) + seconds
        self._ends[search.file] = end
        try:
            find = tuner.start(search, lambda: lambda: [])
        except SearchTooLong:
            del self._ends[search.file]
            raise
        self.begun.append(seconds)
        return find


@pytest.fixture
def machine(tmp_path, records, monkeypatch):
    machine = ArtificialMachine(tmp_path, records)
    monkeypatch.setattr(tuning, "wait", machine.wait)
    monkeypatch.setattr(tuning, "find_fastest_launch", lambda *_: None)
    monkeypatch.setattr(tuning, "compile_candidates", machine.compile_candidates)
    return machine


SLOW_GRADIENTS = [(1000, 4.0, 0.3), (9000, 200.0, 0.3)]


def test_no_search_loses_more_than_it_may(machine, records):
    """Whatever compiles how long, saves how much, and was recorded before: also if it was recorded wrongly."""
    rng = np.random.default_rng(0)
    lost = []
    for _ in range(1000):
        training, program = float(10 ** rng.uniform(0, 5)), float(10 ** rng.uniform(0, 2))
        size = lambda: int(10 ** rng.uniform(2, 5))
        kernels = [
            (size(), float(10 ** rng.uniform(-1, 3)), float(rng.choice([0.0, rng.uniform(0, 0.45)])))
            for _ in range(2)
        ]
        risk = max(MAX_LOSS * training, min(LIKELY_SAVING * training - program, MAX_RISK))
        lost.append(machine.seconds_lost(training, program, kernels) / risk)
    assert max(lost) <= 1 + 1e-9
    assert min(lost) < -5 and max(lost) > 0.9  # some paid off, and some were in vain


def test_a_search_that_compiled_in_vain_is_not_begun_again(machine):
    """The seconds of a search are known after the first."""
    assert machine.seconds_lost(300.0, 5.0, [(1000, 500.0, 0.5)]) == pytest.approx(30.0)
    assert machine.seconds_lost(300.0, 5.0, [(1000, 500.0, 0.5)]) == 0.0 and machine.begun == []


def test_savings_of_one_kernel_pay_for_the_search_of_another(machine, records):
    records.add(1000, 4.0)
    records.add(9000, 100.0)
    assert machine.seconds_lost(1400.0, 5.0, SLOW_GRADIENTS) == pytest.approx(4 + 200 + 5 - 0.6 * 1400)
    assert machine.begun == [4.0, 200.0]
    assert machine.seconds_lost(350.0, 5.0, SLOW_GRADIENTS) == pytest.approx(4 + 5 - 0.3 * 350)
    assert machine.begun == [4.0]  # 105 s are not enough for 1.5 x 100 s


STORED_KERNELS = plain_kernels(1)._replace(rollouts=Implementation(None, True, "a kernel", (8,)))


@pytest.mark.parametrize(
    ("seconds", "seconds_by_xla", "taken"),
    [
        (0.05, 0.10, True),  # a search would pay for neither, and kernels are there
        (0.10, 0.05, False),
        (0.05, 0.05, False),
        (4.00, 9.00, False),  # a search takes a small part of the training
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
    maker = StepMaker(request, lambda kernels: None, None, None, None, lambda kernels, step: seconds, [])
    assert maker._ready() == ((STORED_KERNELS, "loaded") if taken else None)
    assert kept.read() == seconds  # so that the next run decides alike


@pytest.mark.parametrize(("saved", "used"), [(0.2, True), (0.05, False), (None, True)])
def test_a_stored_choice_is_used_if_its_kernels_save_more_than_their_program_takes(monkeypatch, saved, used):
    """On a CPU, where programs with kernels are compiled in each process."""
    kernels = STORED_KERNELS._replace(saved=saved, device="a processor")
    stored = SimpleNamespace(read=lambda: kernels, keep=lambda kernels: None)
    monkeypatch.setattr(StepMaker, "_stored_choices", lambda self: stored)
    monkeypatch.setattr(StepMaker, "_weighs_cost", lambda self: True)
    monkeypatch.setattr(StepMaker, "_find_known", lambda self, kernels: None)
    monkeypatch.setattr(StepMaker, "_search", lambda self: (kernels, "with kernels"))
    monkeypatch.setattr(StepMaker, "_make_program", lambda self, kernels: "by XLA")
    graph = SimpleNamespace(loops=SimpleNamespace(iterations=100))
    request = KernelRequest(graph, "auto", "float32", 1, jax.devices()[:1], 1, None)
    maker = StepMaker(request, lambda kernels: None, None, None, None, lambda kernels, step: 1.0, [])
    chosen, compiled = maker.make()
    assert chosen.have_some == used and compiled == ("with kernels" if used else "by XLA")
    assert chosen.launches is not None  # which the run records
    assert used or "save less time in this run" in chosen.notes[0]


def test_an_iteration_is_timed_without_its_first_call():
    clock, calls = SimpleNamespace(now=0.0), []

    def run(state):
        clock.now += 0.05 if calls else 9.0
        calls.append(state)
        return state + 1

    assert seconds_of_call(lambda: 0, run, lambda: clock.now) == pytest.approx(0.05)
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
    monkeypatch.setattr(search_cost, "LOWERING_SECONDS", 0.0)
    network = rollmill.NetworkConfig(hidden_sizes=(4,))
    sizes = {"num_envs": 2, "num_steps": 4, "num_minibatches": 1, "update_epochs": 1, "total_timesteps": 16}
    return lambda: lower(rollmill.ppo("CartPole-v1", network=network, **sizes), fusion="auto")


def test_auto_searches_only_where_that_pays(lowered_by_auto, tmp_path):
    program = lowered_by_auto()
    (note,) = program.notes
    assert program.launches is not None  # which the run records, and goes on with
    assert program.launches.get("rollouts") is program.launches.get("gradients") is None
    assert "The search for the fastest kernels takes 1,000,000 s, but the limit in this run is 0.0 s" in note
    assert len(list((tmp_path / "seconds").iterdir())) == 1


@pytest.mark.slow
def test_auto_searches_where_it_is_not_known_what_kernels_can_save(lowered_by_auto, tmp_path, monkeypatch):
    def fail(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(compiled, "seconds_of_call", fail)
    *_, search = lowered_by_auto().notes
    assert "the search for kernels took" in search and not (tmp_path / "seconds").exists()


def test_the_structure_of_a_pytree_has_no_address_in_its_text():
    """Otherwise the result of a search would never be found again."""
    texts = {structure_text(jax.tree_util.Partial(function, 1.0)) for function in (lambda x: x, lambda x: x)}
    assert len(texts) == 1 and "lambda" in texts.pop()

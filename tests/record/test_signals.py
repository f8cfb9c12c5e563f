import os
import signal
import subprocess
import sys
import threading

import pytest

from rollmill.core.interruption import Interruption, handling_early_notices
from rollmill.plan_search.orders import Order, start_child
from rollmill.record.signals import stop_on_signals


@pytest.mark.parametrize(
    "number, name, code",
    [(signal.SIGINT, "SIGINT", 130), (signal.SIGTERM, "SIGTERM", 143)],
    ids=["INT", "TERM"],
)
def test_the_first_signal_is_a_request(number, name, code):
    before = signal.getsignal(number)
    with stop_on_signals() as stop:
        assert (stop.requested, stop.signal_name, stop.exit_code) == (False, None, 0)
        os.kill(os.getpid(), number)
        assert (stop.requested, stop.signal_name, stop.exit_code) == (True, name, code)
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM], ids=["INT", "TERM"])
def test_a_sigint_after_that_interrupts_at_once(first):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), stop_on_signals() as stop:
        os.kill(os.getpid(), first)
        assert stop.requested
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("nothing was raised")
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_sigterm_changes_nothing():
    with stop_on_signals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal_name == "SIGINT"


def test_another_thread_catches_nothing():
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def enter():
        with stop_on_signals() as stop:
            seen.append((stop.requested, signal.getsignal(signal.SIGINT) is before))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [(False, True)]


def test_an_interruption_that_was_lost_stops_the_training_that_begins():
    before = signal.signal(signal.SIGINT, Interruption())
    try:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        with stop_on_signals() as stop:
            assert stop.signal_name == "SIGINT"
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interruption_in_a_finaliser_is_not_printed(capsys):
    class Finalised:
        def __init__(self, error):
            self.error = error

        def __del__(self):
            raise self.error

    before, hook = signal.signal(signal.SIGINT, signal.default_int_handler), sys.unraisablehook
    sys.unraisablehook = sys.__unraisablehook__
    try:
        Interruption().install()
        del [Finalised(KeyboardInterrupt())][0]
        assert capsys.readouterr().err == ""
        del [Finalised(ValueError("mine"))][0]
        assert "ValueError: mine" in capsys.readouterr().err
        installed = sys.unraisablehook
        Interruption().install()
        assert sys.unraisablehook is installed, "the second one changes nothing"
    finally:
        sys.unraisablehook = hook
        signal.signal(signal.SIGINT, before)


def test_the_notice_of_a_batch_system_is_a_request_to_stop():
    before = signal.getsignal(signal.SIGUSR2)
    with stop_on_signals() as stop:
        os.kill(os.getpid(), signal.SIGUSR2)
        assert (stop.signal_name, stop.exit_code, stop.take_checkpoint_request()) == ("SIGUSR2", 140, False)
    assert signal.getsignal(signal.SIGUSR2) is before


def test_a_request_for_a_checkpoint_stops_nothing():
    with stop_on_signals() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (stop.requested, stop.exit_code) == (False, 0)
        assert [stop.take_checkpoint_request() for _ in range(2)] == [True, False]


def test_a_request_for_a_checkpoint_before_the_training_ends_nothing():
    with handling_early_notices():
        os.kill(os.getpid(), signal.SIGUSR1)
        with handling_early_notices(), stop_on_signals() as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert stop.take_checkpoint_request()
        os.kill(os.getpid(), signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


EARLY_NOTICE = """
import os, signal, threading
from rollmill.core.interruption import handling_early_notices
with handling_early_notices():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})  # as the main thread in a compilation
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR2)).start()
    threading.Event().wait()
"""


def test_a_notice_before_the_training_ends_the_process_with_a_sentence():
    done = subprocess.run([sys.executable, "-c", EARLY_NOTICE], capture_output=True, text=True, check=False)
    assert done.returncode == 140
    assert done.stderr == "rollmill: stopped by SIGUSR2 outside of training, so there is nothing new to save\n"


FORKED = """
import os, signal, time
from rollmill.core.interruption import handling_early_notices
with handling_early_notices():
    child = os.fork()  # as the workers of an environment that uses multiprocessing
    if child == 0:
        time.sleep(60)
        os._exit(0)
os.kill(child, signal.SIGKILL)
"""


def test_the_end_waits_for_no_process_that_was_forked_meanwhile():
    subprocess.run([sys.executable, "-c", FORKED], check=True, timeout=50)


def test_a_notice_in_a_training_is_left_to_it():
    with handling_early_notices(), stop_on_signals() as stop:
        os.kill(os.getpid(), signal.SIGUSR2)
        assert stop.signal_name == "SIGUSR2"
        assert signal.set_wakeup_fd(-1) == -1  # nobody else sees it
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1


def test_a_sigterm_after_a_notice_takes_its_place():
    with stop_on_signals() as stop:
        os.kill(os.getpid(), signal.SIGUSR2)
        noticed = stop.received_at
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal_name == "SIGTERM" and stop.received_at > noticed
        os.kill(os.getpid(), signal.SIGUSR2)
        assert stop.signal_name == "SIGTERM"


def test_a_notice_goes_to_the_handler_that_the_program_has():
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        with stop_on_signals() as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert seen == [signal.SIGUSR1] and not stop.take_checkpoint_request()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_request_for_a_checkpoint_does_not_end_a_child_that_starts():
    """Nor later: it ends because its order says nothing."""
    process = start_child(Order(), name="nothing", stderr=subprocess.PIPE, text=True)
    process.send_signal(signal.SIGUSR1)
    _, said = process.communicate(timeout=120)
    assert (process.returncode, "the order says nothing" in said) == (2, True), said
    assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, ())

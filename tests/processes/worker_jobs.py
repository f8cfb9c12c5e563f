"""Jobs of the workers of these tests, and requests of the tests to processes."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

from rollmill.processes.events import Finished, Received
from rollmill.processes.jobs import Job
from rollmill.processes.local_launcher import LocalLauncher
from rollmill.processes.supervision import ALL
from rollmill.processes.supervisor import Supervisor
from rollmill.record.signals import stop_on_signals

LONG_SECONDS = 240.0
"""How long a test waits for what takes a second on an idle machine: only one that fails waits so long."""


def job(function, replica=0, *, group="actor", settings=None, environment=None):
    entry = f"worker_jobs:{function.__name__}"
    return Job(f"{group}/{replica}", group, replica, entry, settings or {}, environment or {})


def greet(job, control):
    print("hello from", job.name)
    control.send("greeting", {"attempt": job.attempt, "settings": dict(job.settings), "pid": os.getpid()})


def echo(job, control):
    message = control.wait("numbers", 30.0)
    control.send("back", message.fields, message.arrays)


def last_of_many(job, control):
    control.wait("all sent", 30.0)
    newest, again, oldest = control.latest("number"), control.latest("number"), control.wait("command")
    control.send("taken", {"newest": newest.fields, "again": again, "oldest": oldest.fields})


def answers_while_busy(job, control):
    """Its main thread looks at nothing that it is sent before all questions are answered."""
    asked, all_asked = [], threading.Event()

    def reply(message):
        asked.append(message.fields["number"])
        if len(asked) == job.settings["questions"]:
            all_asked.set()
        return {"double": 2 * message.fields["number"]}

    control.answer("question", reply)
    all_asked.wait(30.0)
    control.wait("enough", 30.0)


def sends_many(job, control):
    for number in range(job.settings["count"]):
        control.send("number", {"number": number}, {"array": np.full(3, number)})


def sends_garbage(job, control):
    control._peer.sendall(b"GET / HTTP/1.1\r\n\r\n")
    time.sleep(1000)


def fails(job, control):
    print("about to fail")
    raise ValueError("no such reward")


def dies(job, control):
    print("last words")
    sys.stdout.flush()
    os._exit(7)


def crashes(job, control):
    os.kill(os.getpid(), signal.SIGSEGV)


def obeys(job, control):
    while True:
        control.at("working")
        control.check()
        time.sleep(0.01)


def refuses_to_stop(job, control):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    control.send("deaf", {"pid": os.getpid()})
    while True:
        time.sleep(0.01)


def waits(job, control):
    control.wait("what never comes")


def sleeps(job, control):
    control.at("waiting for weights")
    time.sleep(1000)  # it hangs here


def sleeps_briefly(job, control):
    control.at("waiting for weights")
    time.sleep(1.5)


def locks(job, control):
    lock = threading.Lock()
    with lock:
        lock.acquire()  # it deadlocks here


def expects(job, control):
    control.at("compiling", expect=1000.0)
    time.sleep(1000)


def holds_the_interpreter(job, control):
    time.sleep(0.3)
    sum(range(10**13))  # in C, without a break


def holds_the_interpreter_briefly(job, control):
    began = time.monotonic()
    ctypes.PyDLL(None).usleep(2_500_000)  # unlike CDLL, it does not let go of the interpreter
    control.send("held", {"seconds": time.monotonic() - began})


def writes(job, control):
    print("\x1b[31mred\x1b[0m")
    print("10%\r50%\r100%")
    os.write(1, b"\xff\xfe\x00binary\x07\n")
    os.write(1, b"x" * 10_000 + b"\n")
    os.write(2, b"to stderr\n")
    os.write(1, b"no newline")


def tells_environment(job, control):
    import jax

    names = ["XLA_FLAGS", "JAX_ENABLE_X64", "ROLLMILL_TEST", "OPENBLAS_NUM_THREADS"]
    values = {name: os.environ.get(name) for name in names}
    facts = {"devices": len(jax.devices("cpu")), "x64": bool(jax.config.read("jax_enable_x64"))}
    control.send("environment", values | facts | {"drawn": int(np.random.randint(2**31))})


def has_children(job, control):
    """A child in its group, one in a session of its own, and a fork without exec."""
    ordinary = subprocess.Popen(["sleep", "1000"])
    daemon = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    forked = os.fork()
    if forked == 0:
        time.sleep(1000)
    control.send("children", {"pids": [ordinary.pid, daemon.pid, forked], "pid": os.getpid()})
    obeys(job, control)


def leaves_a_daemon(job, control):
    """As daemons are made: in a session of its own, its parent gone; it has executed no program since."""
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(write, str(os.getpid()).encode())
            time.sleep(1000)
        os._exit(0)
    os.wait()
    control.send("daemon", {"pid": int(os.read(read, 20))})


def coordinate():
    """A coordinator for tests to kill: prints the process ids of all that it has started, then waits."""
    jobs = [job(has_children, replica) for replica in range(2)]
    with LocalLauncher() as launcher, Supervisor(jobs, launcher=launcher, display=lambda line: None) as supervisor:
        supervisor.start()
        sent = [message.fields for message in several(supervisor, "children", len(jobs))]
        started = [server.pid for server in launcher.servers]
        started += [pid for fields in sent for pid in (fields["pid"], *fields["pids"])]
        with stop_on_signals() as stop:
            print(*started, flush=True)
            while not stop.requested:
                supervisor.events(1.0)
    print("closed", flush=True)


def several(supervisor, wanted, count, seconds=LONG_SECONDS):
    """Reads events until as many of the wanted type came, or messages of the wanted kind; drops the others."""
    deadline, found, others = time.monotonic() + seconds, [], []
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} x {wanted} within {seconds} s, besides {others}"
        for event in supervisor.events(0.5):
            kind = event.message.kind if isinstance(event, Received) else type(event)
            (found if kind == wanted else others).append(event)
    return [event.message if isinstance(event, Received) else event for event in found]


def until(supervisor, wanted, seconds=LONG_SECONDS):
    """The first such event or message; see `several`."""
    return several(supervisor, wanted, 1, seconds)[0]


def all_events(supervisor):
    """Everything until all workers are gone."""
    events = []
    while new := supervisor.events(LONG_SECONDS):
        events += new
    return events


def alive(pid):
    """Whether there is such a process that still runs; one that nobody has reaped yet does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def gone_within(pids, seconds):
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(alive(pid) for pid in pids)


# --- conversations that are the same with processes and with threads -------------------------------------------


def assert_newest_and_oldest(supervisor):
    """With `last_of_many`."""
    for number in range(5):
        supervisor.send(ALL, "number", {"number": number})
        supervisor.send("actor", "command", {"number": number})
    supervisor.send("actor/0", "all sent")
    assert until(supervisor, "taken").fields == {"newest": {"number": 4}, "again": None, "oldest": {"number": 0}}


def assert_answered(supervisor):
    """With `answers_while_busy`, of two questions."""
    supervisor.send(ALL, "question", {"number": 1})
    assert until(supervisor, "question").fields == {"double": 2}
    supervisor.send(ALL, "question", {"number": 2})
    assert until(supervisor, "question").fields == {"double": 4}
    supervisor.send(ALL, "enough")
    until(supervisor, Finished)

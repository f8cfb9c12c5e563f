"""Where replicas end: what one of them answers, and which iterations it begins."""

import threading

import pytest

from rollmill.channels.errors import Abandoned
from rollmill.processes.mailbox import Mailbox
from rollmill.processes.messages import WorkerMessage
from rollmill.workers.replica.requests import StopParticipant

PLANNED = 10


class Line:
    """A control without a coordinator: the test puts messages, and finds the answers."""

    def __init__(self):
        self.mailbox, self.answers = Mailbox(), []
        self.latest, self.check = self.mailbox.latest, self.mailbox.check
        self.send = self.at = self.stopping = pytest.fail  # not asked for

    def wait(self, kind, timeout=30.0):
        return self.mailbox.wait(kind, timeout)

    def answer(self, kind, reply):
        self.mailbox.answer(kind, lambda message: self.answers.append(reply(message)))

    def put(self, kind, **fields):
        self.mailbox.put(WorkerMessage(kind, fields, {}))


@pytest.fixture
def line():
    return Line()


def test_without_an_order_a_replica_does_what_is_planned(line):
    ending = StopParticipant(line, begun=7, planned=PLANNED)
    assert [ending.admit(iteration) for iteration in range(7, 12)] == [1, 1, 1, 0, 0]
    assert ending.admit(8, 5) == 2


def test_a_replica_that_is_held_begins_nothing_before_it_is_told_the_end(line):
    ending = StopParticipant(line, begun=0, planned=PLANNED)
    assert ending.admit(0) == 1
    line.put("Hold")
    assert line.answers == [{"begun": 1}]  # though nobody looked
    admitted = []
    replica = threading.Thread(target=lambda: admitted.extend(ending.admit(n) for n in range(1, 4)), daemon=True)
    replica.start()
    replica.join(0.2)
    assert replica.is_alive() and admitted == []
    line.put("End", iteration=3)
    replica.join(30.0)
    assert admitted == [1, 1, 0]


def test_iterations_that_are_admitted_together_are_begun_together(line):
    """On a mesh, where they are dispatched ahead."""
    ending = StopParticipant(line, begun=0, planned=PLANNED)
    assert ending.admit(0, 4) == 4
    line.put("Hold")
    assert line.answers == [{"begun": 4}]
    line.put("End", iteration=6)
    assert ending.admit(4, 4) == 2
    assert ending.admit(6, 4) == 0


def test_what_was_ordered_before_a_replica_began_holds_too(line):
    line.put("Hold")
    ending = StopParticipant(line, begun=4, planned=PLANNED)
    assert line.answers == [{"begun": 4}]
    line.put("End", iteration=4)
    assert ending.admit(4) == 0


def test_a_replica_that_takes_anothers_place_is_told_the_end_alone(line):
    line.put("End", iteration=5)
    ending = StopParticipant(line, begun=4, planned=PLANNED)
    assert [ending.admit(4), ending.admit(5)] == [1, 0]


def test_a_replica_that_is_held_can_be_stopped(line):
    ending = StopParticipant(line, begun=0, planned=PLANNED)
    line.put("Hold")
    line.mailbox.stop()
    with pytest.raises(Abandoned):
        ending.admit(0)

"""Messages in GPU memory, with memory of the host in the place of a GPU's."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stand_in_gpu import StandInGpu

from rollmill.channels.broker.local import LocalBroker
from rollmill.channels.layout import Layout
from rollmill.channels.shm.wire import MemoryWire
from wordings import raises

AXES = {"seen": 1, "ended": 0, "nothing": 0}


def message(n, *, like=jnp):
    return {
        "seen": like.full((3, 2), n, like.float32),
        "ended": like.asarray([n % 2 == 0, True]),
        "nothing": like.zeros((0, 4), like.int32),
    }


LAYOUT = Layout.of(message(0, like=np))


@pytest.fixture
def gpu(monkeypatch):
    return StandInGpu(monkeypatch)


class Queue:
    """Two producers and a consumer, each of which can be replaced."""

    def __init__(self, *, layout=LAYOUT, checksum=False, gpu=0):
        self.wire, self.layout = MemoryWire(LocalBroker()), layout
        self.checksum, self.gpu, self.sent = checksum, gpu, 0
        self.senders = [self.sender(source) for source in range(2)]
        self.receiver = self.new_receiver()

    def sender(self, source):
        return self.wire.sender("rollouts", source=source, targets=[0], layout=self.layout, checksum=self.checksum)

    def new_receiver(self):
        return self.wire.receiver("rollouts", sources=[0, 1], target=0, layout=self.layout, gpu=self.gpu)

    def send(self, source, *, like=jnp):
        self.senders[source].send(message(self.sent, like=like), iteration=self.sent, timeout=0.0)
        self.sent += 1
        return self.sent - 1

    def receive(self, count=2, **options):
        """Gathers messages, checks their values, and returns their numbers and the batch."""
        options = options or {"count": count}
        gathered = self.receiver.gather(axis=AXES, timeout=0.0, **options)
        numbers = [header.iteration for header in gathered.headers]
        expected = [message(n, like=np) for n in numbers]
        for name, axis in AXES.items():
            whole = np.concatenate([each[name] for each in expected], axis)
            np.testing.assert_array_equal(gathered.tree[name], whole)
            assert gathered.tree[name].dtype == whole.dtype
        return numbers, gathered.tree


def is_on_gpu(tree):
    kinds = {isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tree)}
    assert len(kinds) == 1
    return kinds.pop()


def test_messages_move_to_gpu_memory_once_the_consumer_has_mapped_it(gpu):
    queue = Queue()
    assert [queue.send(0), queue.send(1)] == [0, 1]
    numbers, tree = queue.receive(sources=[0, 1])
    assert numbers == [0, 1] and not is_on_gpu(tree) and gpu.copied == 0 and gpu.opened == 2
    for _ in range(4):
        sent = [queue.send(0), queue.send(1)]
        numbers, tree = queue.receive(sources=[0, 1])
        assert numbers == sent and is_on_gpu(tree)
    assert gpu.copied == 8 and gpu.opened == 2


def test_a_batch_outlives_its_messages(gpu):
    queue = Queue()
    queue.send(0), queue.receive(1)
    queue.send(0)
    _, tree = queue.receive(1)
    before = jax.tree.map(np.array, tree)
    for _ in range(3):
        queue.send(0), queue.receive(1)
    jax.tree.map(np.testing.assert_array_equal, tree, before)


def test_messages_on_the_host_and_on_the_gpu_make_one_batch(gpu):
    queue = Queue()
    queue.send(0), queue.receive(1)
    sent = [queue.send(0), queue.send(1)]
    numbers, tree = queue.receive(sources=[0, 1])
    assert numbers == sent and is_on_gpu(tree) and gpu.copied == 1
    sent = [queue.send(0, like=np), queue.send(1)]
    numbers, tree = queue.receive(sources=[0, 1])
    assert numbers == sent and is_on_gpu(tree) and gpu.copied == 2


@pytest.mark.parametrize("refusal", ["shares", "opens", "no GPU", "checksum", "arrays of NumPy"])
def test_messages_stay_on_the_host_where_an_end_cannot_share(gpu, refusal):
    if refusal in ("shares", "opens"):
        setattr(gpu, refusal, False)
    queue = Queue(checksum=refusal == "checksum", gpu=None if refusal == "no GPU" else 0)
    for _ in range(3):
        queue.send(0, like=np if refusal == "arrays of NumPy" else jnp)
        assert not is_on_gpu(queue.receive(1)[1])
    assert gpu.copied == 0


def test_both_ends_in_one_process_use_shared_memory(gpu, monkeypatch):
    for end in ("reader", "writer"):
        monkeypatch.setattr(f"rollmill.channels.shm.ring_{end}.process_id", lambda: 7)
    queue = Queue()
    for _ in range(3):
        queue.send(0), queue.receive(1)
    assert not gpu.memory


def test_a_replaced_producer_is_read_to_its_end_and_its_memory_unmapped(gpu):
    queue = Queue()
    queue.send(0), queue.receive(1)
    left = [queue.send(0), queue.send(0)]  # in GPU memory of the producer that is replaced
    assert gpu.copied == 2
    queue.senders[0] = queue.sender(0)
    assert queue.receive(1)[0] == left[:1]
    assert queue.receive(1)[0] == left[1:]
    queue.send(0), queue.receive(1)
    gc.collect()
    assert gpu.closed == 1 and gpu.opened == 2
    queue.send(0)
    assert is_on_gpu(queue.receive(1)[1]) and gpu.copied == 3


def test_a_replaced_consumer_maps_the_memory_again(gpu):
    queue = Queue()
    queue.send(0), queue.receive(1)
    left = queue.send(0)
    queue.receiver = queue.new_receiver()
    numbers, tree = queue.receive(1)
    assert numbers == [left] and is_on_gpu(tree) and gpu.opened == 2


def test_a_message_in_memory_that_is_gone_is_reported(gpu):
    queue = Queue()
    queue.send(0), queue.receive(1)
    queue.send(0)
    queue.receiver, gpu.opens = queue.new_receiver(), False
    with raises("message-was-in-gpu-memory", 1):
        queue.receive(1)
    queue.send(0)
    assert not is_on_gpu(queue.receive(1)[1])


def test_a_message_that_is_taken_alone_is_copied_to_the_host(gpu):
    queue = Queue()
    queue.send(0), queue.receive(1)
    n = queue.send(0)
    with queue.receiver.receive(timeout=0.0) as taken:
        for tree in (taken.tree, taken.copy()):
            jax.tree.map(np.testing.assert_array_equal, tree, message(n, like=np))
            assert not is_on_gpu(tree)


def test_a_message_that_does_not_match_is_refused(gpu):
    queue = Queue()
    queue.send(0), queue.receive(1)
    with raises("was-expected-was-given", "float32"):
        queue.senders[0].send({**message(0), "seen": jnp.zeros((2, 2))}, timeout=0.0)

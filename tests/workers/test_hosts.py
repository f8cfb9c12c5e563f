"""Trainings over two hosts, made of network, mount, process and time namespaces where this may be done."""

import json
import re
import sys
import tempfile
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import host_namespaces  # noqa: E402
import hosts  # noqa: E402

sys.path.pop(0)
pytest.importorskip("ray", reason="Ray is not installed: pip install 'rollmill[cluster]'")

pytestmark = pytest.mark.slow
APART = 100_000
PAIRS = ("--distribution", "multi-learner", "--workers", 2, "--learners", 2)


@pytest.fixture(scope="module")
def pair():
    """Two hosts of one Ray cluster; the second one's monotonic clock is ahead."""
    try:
        host_namespaces.check_namespaces()
    except host_namespaces.NoNamespaces as error:
        pytest.skip(f"hosts cannot be made of namespaces here: {error}")
    with hosts.cluster(offsets={2: APART}, prefix="rmt") as pair:
        yield pair


@pytest.fixture
def folder():
    """A folder that both hosts see, unlike /tmp."""
    with tempfile.TemporaryDirectory(prefix="rollmill-test-", dir="/var/tmp") as name:
        yield Path(name)


def said(told):
    return "\n".join(text for _, text in told.lines)


def test_a_module_of_one_host_trains_on_both_and_clocks_are_told_apart(pair, folder):
    mine = folder / "mine"
    mine.mkdir()
    source = "import rollmill\nrollmill.register('mine', lambda: rollmill.make('CartPole-v1'))\n"
    (mine / "my_game.py").write_text(source)
    pair[1].run("mount", "-t", "tmpfs", "tmpfs", mine)
    words = ("mine", "--import", "my_game", *PAIRS, "--total-timesteps", 1024)
    told = hosts.train(pair[0], folder / "run", *words, PYTHONPATH=str(mine))
    assert told.process.wait(300) == 0, said(told)
    workers = json.loads((folder / "run/workers.json").read_text())
    assert len(workers) == 4 and len({each["host"] for each in workers.values()}) == 2
    assert len({each["modules"]["my_game"] for each in workers.values()}) == 1
    for each in workers.values():
        true = APART * 1e9 if each["host"].endswith("-2") else 0.0
        assert abs(each["clock"]["ahead_ns"] - true) <= each["clock"]["round_trip_ns"]
    pair[1].run("umount", mine)


def test_another_source_on_the_second_host_is_refused_with_both_digests(pair, folder):
    original = hosts.SOURCE / "algorithms/returns.py"
    (folder / "returns.py").write_text(original.read_text() + "\n# another one\n")
    pair[1].run("mount", "--bind", folder / "returns.py", original)
    try:
        told = hosts.train(pair[0], folder / "run", "CartPole-v1", *PAIRS, "--total-timesteps", 1024)
        assert told.process.wait(300) == 2, said(told)
    finally:
        pair[1].run("umount", original)
    address = pair[1].address.replace(".", r"\.")
    digests = "source of rollmill [0-9a-f]{16} here, [0-9a-f]{16} there"
    assert re.search(rf"the code on {address} differs from the driver's: {digests}", said(told)), said(told)


def test_a_link_that_is_cut_is_told_of_and_the_training_goes_on_without_it(pair, folder):
    words = ("gymnasium:CartPole-v1", *hosts.COARSE, "--total-timesteps", 100_000_000, "--log-every", 4)
    told = hosts.train(pair[0], folder / "run", *words)
    deadline = time.monotonic() + hosts.FIRST_SECONDS
    while told.iteration() < 8 and time.monotonic() < deadline:
        time.sleep(0.2)
    began, before = time.monotonic(), told.iteration()
    pair[1].link(False)
    try:
        (found,) = hosts._watch([told], began, [before], until=began + 20.0)
    finally:
        pair[1].link(True)
        hosts._end(pair[0], told)
    assert found["goes_on"], found
    times = {name: found["seconds"][name] for name in ("silence", "lost")}
    assert None not in times.values() and times["silence"] < times["lost"], found
    first = next(text for _, text in found["said"] if hosts.SAID["silence"] in text)
    silent = re.search(rf" on {re.escape(pair[1].address)} has not responded for (\d+) s\.", first)
    assert silent and 10 <= int(silent[1]) < 20 and first.endswith("It counts as lost after 20 s"), first

import errno
import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from rollmill.record import event_log
from rollmill.record.metrics import MetricsLog, read_metrics
from rollmill.record.run_directory import RunDirectory
from wordings import raises


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", config={}, versions={})


def write(run: RunDirectory, iterations: range, **options) -> None:
    with MetricsLog(run, **({"resume_from": 0} | options)) as log:
        for iteration in iterations:
            log.write(iteration, 100 * iteration, {"episode/return": np.float32(iteration)})


def read_events(directory: Path) -> list[Event]:
    """All events in the order of the files."""
    files = sorted(directory.iterdir(), key=lambda file: file.name.rpartition(".")[2])
    return [event for file in files for event in events_in(file)]


def events_in(file: Path) -> list[Event]:
    """The events of a file of TFRecord: each is its length, a checksum, the content, a checksum."""
    events, content = [], file.read_bytes()
    while content:
        (length,) = struct.unpack_from("<Q", content)
        events.append(Event.FromString(content[12 : 12 + length]))
        content = content[16 + length :]
    return events


def test_lines_are_json_with_null_for_nan(run):
    with MetricsLog(run, resume_from=0, tensorboard=False) as log:
        log.write(1, 64, {"loss": math.nan, "kl": np.float32(0.5), "note": "warm", "none": None, "ok": True})
        line = {
            "iteration": 1,
            "env_steps": 64,
            "loss": None,
            "kl": 0.5,
            "note": "warm",
            "none": None,
            "ok": True,
        }
        assert read_metrics(run.metrics_file) == [line]  # flushed before the log is closed
    json.loads(run.metrics_file.read_text(), parse_constant=pytest.fail)
    assert not run.tensorboard.path.exists()


def test_a_file_that_was_deleted_meanwhile_is_not_written_to(run):
    with MetricsLog(run, resume_from=0, tensorboard=False) as log:
        log.write(1, 10, {"loss": 1.0})
        run.metrics_file.unlink()
        with raises("was-deleted-while-run-was", str(run.metrics_file)):
            log.write(2, 20, {"loss": 1.0})


def test_event_files_are_in_order_though_the_clock_is_set_back(run, monkeypatch):
    for hours, iterations in ((0, range(1, 5)), (-3, range(3, 6)), (-3, range(5, 8)), (1, range(7, 9))):
        with monkeypatch.context() as changed:
            changed.setattr(event_log.time, "time", lambda hours=hours: 1_800_000_000.5 + 3600 * hours)
            write(run, iterations, resume_from=iterations[0] - 1)
    files = sorted(file.name for file in run.tensorboard.path.iterdir())
    assert [int(name.split(".")[3]) - 1_800_000_000 for name in files] == [0, 1, 2, 3600]
    firsts = [
        next(event.step for event in events_in(run.tensorboard.path / name) if event.summary.value)
        for name in files
    ]
    assert firsts == [100, 300, 500, 700]


def test_lines_of_a_report_are_one_piece(run):
    with MetricsLog(run, resume_from=0) as log:
        written = log.write_lines([(1, 10, {"loss": 1.0}), (2, 20, {"loss": math.inf})])
    assert read_metrics(run.metrics_file) == written
    assert [(line["iteration"], line["env_steps"], line["loss"]) for line in written] == [
        (1, 10, 1.0),
        (2, 20, None),
    ]


def test_lines_that_are_held_back_are_written_before_a_checkpoint_and_at_the_end(run):
    iterations = lambda: [line["iteration"] for line in read_metrics(run.metrics_file)]
    with MetricsLog(run, resume_from=0, tensorboard=False, seconds=3600.0) as log:
        for iteration in (1, 2, 3):
            log.write(iteration, iteration, {})
        assert iterations() == [1]  # the first at once
        log.flush()
        assert iterations() == [1, 2, 3]
        log.write(4, 4, {})
        log.rewind(2)
        assert iterations() == [1, 2]
        log.write(3, 3, {})
    assert iterations() == [1, 2, 3]


def test_tensorboard_has_the_numbers_over_environment_steps(run):
    with MetricsLog(run, resume_from=0) as log:
        log.write(1, 64, {"episode/return": 2.5, "loss": math.nan, "note": "warm"})
        log.write(2, 128, {"episode/return": 3.5})
    events = read_events(run.tensorboard.path)
    scalars = [(e.step, {v.tag: v.simple_value for v in e.summary.value}) for e in events if e.summary.value]
    assert scalars == [
        (64, {"iteration": 1, "episode/return": 2.5}),
        (128, {"iteration": 2, "episode/return": 3.5}),
    ]


def test_nothing_is_opened_before_the_first_line(run):
    MetricsLog(run, resume_from=0).close()
    assert not run.tensorboard.path.exists()


def test_resuming_cuts_later_lines_and_a_torn_one(run):
    write(run, range(1, 6))
    with run.metrics_file.open("ab") as file:
        file.write(b'{"iteration": 6, "env_st')
    assert [line["iteration"] for line in read_metrics(run.metrics_file)] == [1, 2, 3, 4, 5]
    write(run, range(4, 7), resume_from=3)
    assert [line["iteration"] for line in read_metrics(run.metrics_file)] == [1, 2, 3, 4, 5, 6]
    starts = [event for event in read_events(run.tensorboard.path) if event.HasField("session_log")]
    assert [event.step for event in starts] == [301]
    assert sorted(entry.name for entry in run.root.glob("*metrics*")) == ["metrics.jsonl"]


def test_starting_over_cuts_everything(run):
    write(run, range(1, 4), tensorboard=False)
    write(run, range(1, 2), tensorboard=False, resume_from=0)
    assert [line["iteration"] for line in read_metrics(run.metrics_file)] == [1]


def test_reading_what_is_missing_or_damaged(run):
    with raises("cannot-be-read", "metrics.jsonl"):
        read_metrics(run.metrics_file)
    write(run, range(1, 4), tensorboard=False)
    lines = run.metrics_file.read_bytes().splitlines(keepends=True)
    run.metrics_file.write_bytes(lines[0] + b"\x00\xff\n" + lines[2])
    with raises("cannot-be-read", "metrics.jsonl: line 2", "JSON is malformed"):
        read_metrics(run.metrics_file)


class FullFile:
    """Takes a few bytes and then finds the disk full, as a real one does."""

    def __init__(self, file):
        self.file, self.room = file, 10

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken, self.room = self.file.write(data[: self.room]), 0
        return taken

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_a_full_disk_leaves_whole_lines(run):
    write(run, range(1, 3), tensorboard=False)
    with MetricsLog(run, resume_from=2, tensorboard=False) as log:
        log._file = FullFile(log._file)
        with raises("cannot-be-written-disk-is", "metrics.jsonl"):
            log.write(3, 300, {})
        log._file = log._file.file
        log.write(4, 400, {})
    assert [line["iteration"] for line in read_metrics(run.metrics_file)] == [1, 2, 4]


def test_a_tensorboard_file_that_cannot_be_written_is_told(run, monkeypatch):
    def fail(directory, purge_step):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(event_log, "_open_events", fail)
    log = MetricsLog(run, resume_from=0)
    log.write(1, 1, {"a": 1.0})
    with raises("cannot-be-written-disk-is", "tensorboard"):
        log.close()

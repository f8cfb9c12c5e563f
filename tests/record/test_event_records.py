import math
import struct
import subprocess
import sys

import pytest
from tensorboardX.crc32c import crc32c as other_crc32c
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

from rollmill.record.event_records import (
    crc32c,
    hyperparameters_event,
    picture_event,
    record,
    restart_event,
    scalars_event,
    version_event,
)


def test_the_checksum_is_that_of_the_standard():
    assert crc32c(b"123456789") == 0xE3069283  # the check value of CRC-32C's definition
    assert crc32c(b"") == 0
    assert crc32c(bytes(range(256)) * 3) == other_crc32c(bytes(range(256)) * 3)


def test_events_are_read_by_their_schema():
    first, again = Event.FromString(version_event(2.5)), Event.FromString(restart_event(3.5, 7))
    assert (first.wall_time, first.file_version) == (2.5, "brain.Event:2")
    assert (again.wall_time, again.step, again.session_log.status) == (3.5, 7, 1)


@pytest.mark.parametrize("step", [0, 1, 127, 128, 2**31, 2**53 + 1, -1])
def test_steps_of_any_size(step):
    assert Event.FromString(scalars_event(1.0, step, {})).step == step


def test_a_picture_is_read_by_its_schema():
    (value,) = Event.FromString(picture_event(1.0, 7, "a/video", b"GIF89a", height=24, width=32)).summary.value
    assert (value.tag, value.image.encoded_image_string) == ("a/video", b"GIF89a")
    assert (value.image.height, value.image.width, value.image.colorspace) == (24, 32, 3)


def test_numbers_and_names():
    given = {"a": 0.1, "": 1e300, "ü/" + 200 * "x": -1e300, "none": math.nan, "zero": 0.0}
    values = Event.FromString(scalars_event(1.5, 300, given)).summary.value
    numbers = {value.tag: value.simple_value for value in values}
    assert list(numbers) == list(given)
    tenth = struct.unpack("<f", struct.pack("<f", 0.1))[0]
    assert [numbers[name] for name in ("a", "", "ü/" + 200 * "x", "zero")] == [tenth, math.inf, -math.inf, 0.0]
    assert math.isnan(numbers["none"])


def test_a_record_is_length_and_content_with_masked_checksums():
    # By hand: the checksum rotated right by 15 bits, plus the constant, modulo 2^32.
    masked = lambda data: ((crc32c(data) >> 15 | crc32c(data) << 17) % 2**32 + 0xA282EAD8) % 2**32
    length, content = struct.pack("<Q", 3), b"abc"
    assert record(content) == length + struct.pack("<I", masked(length)) + content + struct.pack(
        "<I", masked(content)
    )


WATCHED = """
import sys, threading
import rollmill, rollmill.training, rollmill.hooks

imported, began = [], []

class Watch:
    def find_spec(self, name, path=None, target=None):
        if began or threading.current_thread() is not threading.main_thread():
            imported.append((threading.current_thread().name, name))
        return None

def watch(event):
    if isinstance(event, rollmill.hooks.MetricsLogged):
        began.append(event)

sys.meta_path.insert(0, Watch())
graph = rollmill.ppo("CartPole-v1", num_envs=4, num_steps=8, num_minibatches=1, total_timesteps=32 * 6)
run = rollmill.train(graph, run_dir=sys.argv[1], quiet=True, log_every=1, checkpoint_iterations=2, hooks=[watch])
print(len(began), [entry for entry in imported])
"""


def test_nothing_is_imported_while_a_training_runs(tmp_path):
    command = [sys.executable, "-c", WATCHED, str(tmp_path / "run")]
    completed = subprocess.run(command, capture_output=True, text=True)
    assert (completed.stdout, completed.returncode) == ("6 []\n", 0), completed.stderr


def test_hyperparameters_are_read_by_their_schema():
    given = {"rate": 0.25, "steps": 128, "anneal": True, "off": False, "torso": "ü", "sizes": [64, 64]}
    (value,) = Event.FromString(hyperparameters_event(2.5, "run", given)).summary.value
    assert value.tag == "_hparams_/session_start_info" and value.metadata.plugin_data.plugin_name == "hparams"
    assert value.tensor.dtype == 1 and list(value.tensor.float_val) == [0.0]
    assert [dim.size for dim in value.tensor.tensor_shape.dim] == [1]
    session = HParamsPluginData.FromString(value.metadata.plugin_data.content).session_start_info
    assert (session.group_name, session.start_time_secs) == ("run", 2.5)
    read = {name: getattr(each, each.WhichOneof("kind")) for name, each in session.hparams.items()}
    assert read == {**given, "steps": 128.0, "sizes": "[64, 64]"}

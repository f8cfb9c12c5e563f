"""Exported policies compute what the originals do, and what cannot be exported leaves nothing behind."""

import builtins
import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from gymnasium import spaces
from untrained import REPLAY, SMALL, TINY, untrained

import rollmill
from rollmill.core.errors import CheckpointError, RollmillError, UsageError
from rollmill.policies.exporting import metadata as described, onnx
from rollmill.policies.exporting.example_inputs import situations
from rollmill.policies.exporting.interface import exported_function
from rollmill.policies.exporting.parity import _check_close, compare
from wordings import raises

ort = pytest.importorskip("onnxruntime", reason="export as ONNX is an extra")
pytestmark = pytest.mark.skipif(find_spec("jax2onnx") is None, reason="export as ONNX is an extra")

PPO = SMALL | {"num_minibatches": 1}
GRU = rollmill.NetworkConfig(torso="gru", hidden_sizes=(8,), recurrent_size=8)
LSTM = rollmill.NetworkConfig(torso="lstm", hidden_sizes=(8,), recurrent_size=8, layer_norm=True)
PARTS = ("hidden", "cell")
DIFFERS = "exported-policy-differs-from-original"
RESIDUAL = rollmill.NetworkConfig(hidden_sizes=(8, 8), residual=True)
IMPALA = rollmill.NetworkConfig(torso="impala", hidden_sizes=(16,), stages=(8, 8))
CONV = rollmill.NetworkConfig(torso="cnn", hidden_sizes=(8,))
SQUASHED = {**SMALL, **REPLAY, "network": TINY}

POLICIES = {
    "mlp": lambda: rollmill.ppo("CartPole-v1", **PPO, network=TINY),
    "cnn": lambda: rollmill.ppo("gymnax:Breakout-MinAtar", **PPO, network=CONV),
    "gru": lambda: rollmill.ppo("TMaze-v0", **PPO, network=GRU),
    "normalised": lambda: rollmill.ppo("Pendulum-v1", **PPO, network=TINY, normalize_observations=True),
    "squashed": lambda: rollmill.sac("Pendulum-v1", **SQUASHED),
}
MORE = {
    "lstm": lambda: rollmill.ppo("TMaze-v0", **PPO, network=LSTM),
    "residual": lambda: rollmill.sac("Pendulum-v1", **{**SQUASHED, "network": RESIDUAL}),
    "impala": lambda: rollmill.ppo("gymnax:Breakout-MinAtar", **PPO, network=IMPALA),
    "dqn": lambda: rollmill.dqn("CartPole-v1", **SQUASHED, duelling=True),
    "td3": lambda: rollmill.td3("Pendulum-v1", **SQUASHED),
    "discrete sac": lambda: rollmill.sac("CartPole-v1", **SQUASHED),
    "search": lambda: rollmill.alphazero("TicTacToe-v0", **PPO, network=TINY, num_simulations=4),
    "agents": lambda: rollmill.mappo("TagGridWorld-Small-v0", **PPO, network=TINY),
    "host": lambda: rollmill.ppo("gymnasium:CartPole-v1", **PPO, network=GRU),
}

CARTPOLE_METADATA = """{
  "format": "%(format)s",
  "rollmill": "%(version)s",
  "run": "untrained",
  "iteration": 0,
  "algorithm": "ppo",
  "environment": "CartPole-v1",
  "weights_sha256": "%(digest)s",
  "observation_space": {
    "type": "Box",
    "shape": [
      4
    ],
    "dtype": "float32",
    "low": [
      -4.800000190734863,
      null,
      -0.41887903213500977,
      null
    ],
    "high": [
      4.800000190734863,
      null,
      0.41887903213500977,
      null
    ]
  },
  "action_space": {
    "type": "Discrete",
    "n": 2,
    "start": 0
  },
  "inputs": [
    {
      "name": "observation",
      "shape": [
        "batch",
        4
      ],
      "dtype": "float32"
    }
  ],
  "outputs": [
    {
      "name": "action",
      "shape": [
        "batch"
      ],
      "dtype": "int32"
    },
    {
      "name": "logits",
      "shape": [
        "batch",
        2
      ],
      "dtype": "float32"
    },
    {
      "name": "value",
      "shape": [
        "batch"
      ],
      "dtype": "float32"
    }
  ],
  "note": null
}
"""


def policy_of(graph):
    """Random weights, and statistics that are far from the initial ones."""
    policy = untrained(graph, spread=0.5)
    statistics = getattr(policy.weights, "observations", None)
    if statistics is None:
        return policy
    moved = jax.tree.map(lambda leaf: leaf + 0.7, statistics)
    return policy.with_weights(replace(policy.weights, observations=moved))


def names(part):
    return [each["name"] for each in part]


def computed(path, format, inputs):
    """Outputs by name, by the file alone."""
    if format == "onnx":
        session = ort.InferenceSession(str(path))
        outputs = [each.name for each in session.get_outputs()]
        given = {each.name for each in session.get_inputs()}
        return dict(
            zip(outputs, session.run(outputs, {n: x for n, x in inputs.items() if n in given}), strict=True)
        )
    document = json.loads(path.with_name(f"{path.name}.json").read_text())
    program = jax.export.deserialize(bytearray(path.read_bytes()))
    assert program.platforms == ("cpu", "cuda")
    found = program.call(*[inputs[name] for name in names(document["inputs"])])
    return dict(zip(names(document["outputs"]), map(np.asarray, found), strict=True))


def check_actions(graph, folder, format):
    """The file's actions on 1,000 observations of rollouts, against the policy's own; returns the export."""
    policy = policy_of(graph)
    written = rollmill.export(policy, folder / f"policy.{format}", format=format)
    met = situations(policy.loaded, 1000, seed=7)
    inputs = dict(zip(names(written.metadata["inputs"]), jax.tree.leaves(tuple(met)), strict=True))
    mask = met.mask if jax.tree.leaves(met.mask) else None
    action, _ = policy.action(met.observation, memory=met.memory, action_mask=mask, search=False)
    found = computed(written.path, format, inputs)
    assert list(found) == names(written.metadata["outputs"])
    varied = 0
    for (path, wanted), name in zip(jax.tree_util.tree_leaves_with_path(action), found, strict=False):
        assert name.startswith("action") and len(wanted) == 1000, path
        varied += len(np.unique(wanted))
        if np.issubdtype(wanted.dtype, np.floating):
            np.testing.assert_allclose(found[name], wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())
        else:
            np.testing.assert_array_equal(found[name], wanted)
    assert varied > 1  # not a constant policy
    assert len(np.unique(np.concatenate([x.reshape(1000, -1) for x in inputs.values()], 1), axis=0)) > 20
    return written, found, inputs


# --- parity -------------------------------------------------------------------------------------------


def test_logits_of_impossible_choices_are_compared_without_a_warning():
    logits = np.array([[1.0, -np.inf]], np.float32)
    assert _check_close("logits", logits, logits + np.float32(1e-6), 1e-4) < 1e-5
    with pytest.raises(RollmillError, match="logits"):
        _check_close("logits", logits, np.array([[1.0, 0.0]], np.float32), 1e-4)


QUICK = {("mlp", "onnx"), ("squashed", "onnx"), ("gru", "stablehlo")}
ALL = [
    pytest.param(name, format, marks=() if (name, format) in QUICK else pytest.mark.slow)
    for name in POLICIES
    for format in ("onnx", "stablehlo")
]


@pytest.mark.parametrize(("name", "format"), ALL)
@pytest.mark.slow_beyond(1)
def test_exported_actions_are_those_of_the_policy(name, format, tmp_path):
    written, found, inputs = check_actions(POLICIES[name](), tmp_path, format)
    assert written.comparison.num_observations == 1000 and written.comparison.num_ties == 0
    alone = computed(written.path, format, {key: value[:1] for key, value in inputs.items()})
    for key, value in found.items():
        np.testing.assert_allclose(alone[key], value[:1], rtol=1e-3, atol=1e-5)
    expected = {"mlp": ["logits", "value"], "cnn": ["logits", "value"], "squashed": ["mean", "scale"]}
    expected |= {"normalised": ["mean", "scale", "value"]}
    expected |= {"gru": ["logits", "value", "next_memory.0", "next_memory.1"]}
    assert list(found) == ["action", *expected[name]]
    assert list(inputs) == ["observation", *(["memory.0", "memory.1"] if name == "gru" else [])]


def test_operations_that_depend_on_the_platform_are_exported_to_onnx_as_for_cpus():
    def function(x):
        return (jax.lax.platform_dependent(x, cuda=lambda x: x * 2, default=lambda x: x + 1),)

    x = np.array([1.0, 5.0], np.float32)
    exported = SimpleNamespace(function=function, inputs=[SimpleNamespace(struct=x)])
    simple = onnx.simplify_function(exported)
    assert [equation.primitive.name for equation in jax.make_jaxpr(simple)(x).eqns] == ["add"]
    np.testing.assert_array_equal(simple(x)[0], [2.0, 6.0])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
@pytest.mark.parametrize("format", ["onnx", "stablehlo"])
def test_other_algorithms_are_exported_too(name, format, tmp_path):
    written, found, inputs = check_actions(MORE[name](), tmp_path, format)
    outputs = {
        "dqn": ["action", "q_values"],
        "td3": ["action"],
        "discrete sac": ["action", "logits"],
        "search": ["action", "logits", "value"],
        "agents": ["action.runner", "action.tagger", "logits.runner", "logits.tagger"],
        "host": ["action", "logits", "value", "next_memory.0", "next_memory.1"],
        "lstm": ["action", "logits", "value", *(f"next_memory.{i}.{part}" for i in (0, 1) for part in PARTS)],
        "residual": ["action", "mean", "scale"],
        "impala": ["action", "logits", "value"],
    }
    assert list(found) == outputs[name]
    if name == "search":
        mask = inputs["action_mask"]
        assert not mask.all() and mask[np.arange(1000), found["action"]].all()
        assert written.metadata["note"] == described.SEARCH_NOTE


@pytest.mark.slow
def test_a_recurrent_export_plays_an_episode_by_its_own_memory(tmp_path):
    policy = policy_of(POLICIES["gru"]())
    rollmill.export(policy, tmp_path / "policy.onnx")
    session = ort.InferenceSession(str(tmp_path / "policy.onnx"))
    memory = {f"memory.{i}": np.zeros((1, 8), np.float32) for i in range(2)}
    for observation in np.random.default_rng(0).normal(size=(20, 2)).astype(np.float32):
        outputs = ["action", "next_memory.0", "next_memory.1"]
        action, *after = session.run(outputs, {"observation": observation[None], **memory})
        assert action[0] == policy(observation)
        memory = {f"memory.{i}": leaf for i, leaf in enumerate(after)}


@pytest.mark.parametrize("format", ["onnx", "stablehlo"])
@pytest.mark.slow_beyond(1)
def test_memories_that_only_training_needs_are_left_out(format, tmp_path):
    sizes = {"sequence_length": 8, "burn_in": 0, "network": GRU}
    policy = policy_of(rollmill.rsac("Pendulum-v1", **SMALL | REPLAY | sizes))
    written = rollmill.export(policy, tmp_path / f"policy.{format}", format=format)
    assert names(written.metadata["inputs"]) == ["observation", "memory.actor"]
    assert names(written.metadata["outputs"]) == ["action", "mean", "scale", "next_memory.actor"]
    memory = np.zeros((1, 8), np.float32)
    for observation in np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32):
        given = {"observation": observation[None], "memory.actor": memory}
        found = computed(written.path, format, given)
        np.testing.assert_allclose(found["action"][0], policy(observation), rtol=1e-4, atol=1e-5)
        memory = found["next_memory.actor"]


# --- metadata -----------------------------------------------------------------------------------------


def test_the_metadata_are_these_bytes(tmp_path):
    policy = policy_of(POLICIES["mlp"]())
    values = {"version": described.versions()["rollmill"], "digest": described.tree_digest(policy.weights)}
    rollmill.export(policy, tmp_path / "a.onnx")
    rollmill.export(policy, tmp_path / "a.stablehlo", format="stablehlo")
    kept = ort.InferenceSession(str(tmp_path / "a.onnx")).get_modelmeta().custom_metadata_map
    assert kept == {"rollmill": CARTPOLE_METADATA % (values | {"format": "onnx"})}
    beside = (tmp_path / "a.stablehlo.json").read_bytes()
    assert beside == (CARTPOLE_METADATA % (values | {"format": "stablehlo"})).encode()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.onnx", "a.stablehlo", "a.stablehlo.json"]


def test_all_spaces_have_a_json_form():
    space = spaces.Dict(
        {
            "box": spaces.Box(0, 255, (2, 3), np.uint8),
            "pair": spaces.Tuple([spaces.MultiBinary(3), spaces.MultiDiscrete([2, 3])]),
        }
    )
    assert described.space_document(space) == {
        "type": "Dict",
        "spaces": {
            "box": {"type": "Box", "shape": [2, 3], "dtype": "uint8", "low": 0, "high": 255},
            "pair": {
                "type": "Tuple",
                "spaces": [
                    {"type": "MultiBinary", "shape": [3]},
                    {"type": "MultiDiscrete", "nvec": [2, 3], "start": [0, 0]},
                ],
            },
        },
    }


# --- refusals -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small():
    return policy_of(POLICIES["mlp"]())


@pytest.mark.slow
def test_what_differs_is_refused(small, tmp_path, monkeypatch):
    exported = exported_function(small.loaded)
    right = lambda inputs: [np.asarray(each) for each in jax.vmap(exported.function)(*inputs)]
    assert compare(small, exported, right).num_observations == 1000

    def with_changed(index, change):
        def run(inputs):
            found = right(inputs)
            found[index] = change(found[index])
            return found

        return run

    flip_last = lambda actions: np.where(np.arange(len(actions)) == 999, 1 - actions, actions)
    for index, change, name, difference in (
        (0, flip_last, "action", "1 of 1000 observations"),
        (0, lambda actions: actions.astype(np.int64), "action", "is int64 [1000], expected int32 [1000]"),
        (1, lambda logits: logits * 1.001, "logits", "the limit of"),
        (2, lambda values: values * np.nan, "value", "the difference is nan"),
    ):
        with raises(DIFFERS, name, difference):
            compare(small, exported, with_changed(index, change))
    monkeypatch.setattr("rollmill.policies.exporting.run_onnx", lambda *_: with_changed(0, flip_last))
    with raises(DIFFERS, "action"):
        rollmill.export(small, tmp_path / "policy.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_tie_is_counted_and_not_refused(small):
    tied = jax.tree.map(lambda leaf: leaf * 0, small.weights)  # all logits are zero
    policy = small.with_weights(tied)
    exported = exported_function(policy.loaded)

    def run(inputs):
        found = [np.asarray(each) for each in jax.vmap(exported.function)(*inputs)]
        return [1 - found[0], *found[1:]]

    assert compare(policy, exported, run).num_ties == 1000


@pytest.mark.slow
def test_continuous_actions_may_differ_by_rounding_alone():
    policy = policy_of(POLICIES["squashed"]())
    exported = exported_function(policy.loaded)
    shifted = lambda factor: (
        lambda inputs: [
            np.asarray(each) * np.float32(factor if i == 0 else 1)
            for i, each in enumerate(jax.vmap(exported.function)(*inputs))
        ]
    )
    assert 1e-6 < compare(policy, exported, shifted(1 + 4e-6)).largest_difference < 1e-5
    with raises(DIFFERS, "action", "the limit of"):
        compare(policy, exported, shifted(1 + 1e-4))


def test_mistakes_are_sentences_and_write_nothing(small, tmp_path):
    (tmp_path / "there.onnx").write_bytes(b"before")
    (tmp_path / "folder").mkdir()
    (tmp_path / "taken.stablehlo.json").write_bytes(b"before")
    before = sorted(tmp_path.iterdir())
    for arguments, sentence in (
        ((small, tmp_path / "x.onnx", "onxx"), "unknown format 'onxx'. Did you mean onnx"),
        (
            (small, tmp_path / "x.stablehlo", "onnx"),
            r"x.stablehlo has the ending of .* than onnx.*--format stablehlo",
        ),
        ((small, tmp_path / "x.onnx", "stablehlo"), r"x.onnx has the ending of .* than stablehlo.*format='onnx'"),
        ((small, tmp_path / "there.onnx", "onnx"), r"there.onnx already exists. hint: --force \(force=True\)"),
        ((small, tmp_path / "taken.stablehlo", "stablehlo"), "taken.stablehlo.json already exists"),
        ((small, tmp_path / "folder", "onnx"), "folder is a folder"),
        ((small, tmp_path / "none/x.onnx", "onnx"), "the folder"),
        ((small, tmp_path / "there.onnx/x", "onnx"), "the folder"),
        ((small, 3, "onnx"), "path=3 must be a path"),
        ((small, Path("/proc/policy.onnx"), "onnx"), "/proc/.*policy.onnx.* cannot be written: "),
    ):
        source, path, format = arguments
        with pytest.raises(UsageError, match=sentence):
            rollmill.export(source, path, format=format)
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        rollmill.export(tmp_path / "nowhere", tmp_path / "x.onnx")
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "there.onnx").read_bytes() == b"before"
    rollmill.export(small, tmp_path / "there.onnx", force=True)
    assert ort.InferenceSession(str(tmp_path / "there.onnx")).get_inputs()[0].name == "observation"


@pytest.mark.parametrize("package", ["jax2onnx", "onnxruntime"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(small, tmp_path, monkeypatch, package):
    found = builtins.__import__

    def without(name, *arguments, **options):
        if name == package:
            raise ImportError(name)
        return found(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with raises("format-onnx-needs-is-missing", package, "pip install", "[onnx]"):
        rollmill.export(small, tmp_path / "policy.onnx")
    assert list(tmp_path.iterdir()) == []

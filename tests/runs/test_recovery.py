"""A run survives fewer devices, infinite settings, other hyperparameters, crowded names."""

import json
import shutil

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rollmill
from rollmill.core.errors import CheckpointError, ContractError, UsageError
from rollmill.record.checkpoints import Checkpoints
from rollmill.runs.diagnosis import examine
from rollmill.runs.specification import describe
from wordings import raises

QUIET = {"quiet": True, "tensorboard": False}


def small(**config):
    sizes = {"num_envs": 8, "num_steps": 8, "total_timesteps": 8 * 8 * 4}
    return rollmill.ppo(rollmill.make("CartPole-v1"), **(sizes | config))


@pytest.mark.slow
def test_a_run_of_two_devices_is_loaded_and_resumed_on_one(tmp_path):
    run = rollmill.train(small(), run_dir=tmp_path / "run", devices=2, **QUIET)
    assert rollmill.load(run.directory)(np.zeros(4)) in (0, 1)
    assert rollmill.evaluate(run.directory, episodes=3).returns.shape == (3,)
    assert (
        rollmill.resume(run.directory, devices=1, quiet=True).summary["weights_sha256"]
        == (run.summary["weights_sha256"])
    )


@pytest.mark.slow
def test_infinite_settings_survive(tmp_path):
    run = rollmill.train(small(max_grad_norm=float("inf")), run_dir=tmp_path / "run", **QUIET)
    saved = json.loads((run.directory / "config.json").read_text())["graph"]["config"]["max_grad_norm"]
    assert saved == "inf"
    (run.directory / "summary.json").unlink()
    assert rollmill.resume(run.directory, quiet=True).summary["status"] == "finished"


@pytest.mark.slow
def test_resuming_a_finished_run_changes_nothing(tmp_path):
    run = rollmill.train(small(), run_dir=tmp_path / "run", **QUIET)
    before = (run.directory / "summary.json").read_bytes(), (run.directory / "metrics.jsonl").read_bytes()
    assert rollmill.resume(run.directory, quiet=True).summary == json.loads(before[0])
    assert (
        (run.directory / "summary.json").read_bytes(),
        (run.directory / "metrics.jsonl").read_bytes(),
    ) == before


def test_other_hyperparameters_are_refused(tmp_path):
    run = rollmill.train(small(), run_dir=tmp_path / "run", **QUIET)
    with raises("algorithm-has-other-than-run", "hyperparameters", "gamma=0", "5 (the run has 0.99)."):
        rollmill.resume(run.directory, algorithm=small(gamma=0.5), quiet=True)


@pytest.mark.slow
def test_runs_of_one_second_get_names_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    from rollmill.runs import creation

    monkeypatch.setattr(creation, "name_run", lambda *names, **rest: tmp_path / "runs/same")
    names = [rollmill.train(small(), **QUIET).directory.name for _ in range(3)]
    assert names == ["same", "same-2", "same-3"]


def test_a_configuration_of_another_version_is_told(tmp_path):
    run = rollmill.train(small(), run_dir=tmp_path / "run", **QUIET)
    path = run.directory / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"options": {**config["options"], "warp": 9}}))
    with pytest.raises(CheckpointError, match="options.warp is unknown. Known: "):
        rollmill.resume(run.directory, quiet=True)
    path.write_text(json.dumps({"graph": {}}))
    with raises("has-no-is-run-rollmill", "imports, options"):
        rollmill.resume(run.directory, quiet=True)


@pytest.mark.slow
def test_flags_of_many_minibatches_are_not_rounded_into_a_fault(tmp_path):
    algorithm = small(
        num_envs=41, num_minibatches=41, total_timesteps=41 * 8
    )  # 41 ones have a float32 mean below 1
    assert rollmill.train(algorithm, run_dir=tmp_path / "run", **QUIET).summary["status"] == "finished"


def test_an_environment_that_holds_a_key_can_be_described():
    layout = jax.random.key(3)
    env = rollmill.make("CartPole-v1")
    moved = env._replace(
        reset=lambda key, params: env.reset(jax.random.fold_in(key, jax.random.bits(layout)), params)
    )
    assert describe(rollmill.ppo(moved))["custom"] == ["environment"]


def test_resetting_twice_is_refused():
    with raises("resets-itself-already-leave-out", "CartPole-v1"):
        describe(rollmill.ppo(rollmill.auto_reset(rollmill.make("CartPole-v1"))))


@pytest.mark.parametrize(
    ("shape", "message"),
    [((1,), "its value must return one float32 [], got float32[1]"), (None, "raised AttributeError")],
)
def test_a_network_that_breaks_the_contract_is_told(shape, message):
    class Wrong(eqx.Module):
        weight: jax.Array

        def initial_memory(self):
            return ()

        def __call__(self, observation, memory, action_mask=None):
            value = self.weight.nothing if shape is None else jnp.zeros(shape)
            return rollmill.networks.Output(rollmill.networks.Categorical(self.weight), value, memory)

        def value(self, observation, memory):
            return jnp.zeros(())

    with pytest.raises(ContractError) as caught:
        small(network=lambda key, observations, actions: Wrong(jnp.zeros(2)))
    assert message in str(caught.value)


@pytest.mark.slow
def test_a_run_goes_on_without_the_kernels_that_it_began_with(tmp_path):
    run = rollmill.train(small(), run_dir=tmp_path / "run", fusion="rollout", **QUIET)
    (run.directory / "summary.json").unlink()
    resumed = rollmill.resume(run.directory, fusion="off", quiet=True)
    assert resumed.summary["weights_sha256"] == run.summary["weights_sha256"]
    with pytest.raises(UsageError, match="unroll cannot be changed"):
        rollmill.resume(run.directory, unroll=2, quiet=True)


@pytest.mark.slow
def test_a_run_with_kernels_goes_on_without_them_where_they_are_impossible(tmp_path, capsys):
    run = rollmill.train(small(), run_dir=tmp_path / "run", fusion="rollout", **QUIET)
    later = {"total_timesteps": 2 * run.summary["total_env_steps"]}
    elsewhere = {"distribution": "multi-learner", "place": "threads"}
    with raises("fusion-rollout-makes-kernel-environment"):
        rollmill.resume(run.directory, changes=later, fusion="rollout", quiet=True, **elsewhere)
    resumed = rollmill.resume(run.directory, changes=later, **elsewhere)
    assert resumed.summary["total_env_steps"] == later["total_timesteps"]
    assert "fusion=rollout is not possible here. This run continues with fusion=auto" in capsys.readouterr().err


def test_a_checkpoint_that_a_training_deletes_meanwhile_is_not_damaged(tmp_path, monkeypatch):
    options = {"checkpoint_iterations": 1, "keep_last": 4, **QUIET}
    run = rollmill.train(small(), run_dir=tmp_path / "run", **options)
    whole = examine(run.directory)
    assert not whole.complaints and any("checkpoints: " in note for note in whole.notes)
    first, check = min(Checkpoints(run.directory / "checkpoints", read_only=True).iterations()), Checkpoints.check

    def delete_then_check(checkpoints, iteration):
        if iteration == first:
            shutil.rmtree(run.directory / "checkpoints" / str(first))
        return check(checkpoints, iteration)

    monkeypatch.setattr(Checkpoints, "check", delete_then_check)
    examined = examine(run.directory)
    assert not examined.complaints and not any(f" {first}," in note for note in examined.notes)

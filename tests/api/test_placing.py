"""Where a training may run, as its options say, before anything is started."""

import pytest

import rollmill
from rollmill.api import RunOptions, choose_plan
from rollmill.api.training import placed_anew
from rollmill.core.errors import UsageError

SIZES = {"num_envs": 8, "num_steps": 8, "num_minibatches": 2, "total_timesteps": 64}


@pytest.mark.parametrize(
    ("environment", "options", "message"),
    [
        ("gymnasium:CartPole-v1", {"place": "mesh"}, "place=mesh steps environments in JAX"),
        ("CartPole-v1", {"place": "threads", "fusion": "rollout"}, "fusion=rollout makes kernels of one program"),
        ("gymnasium:CartPole-v1", {"fusion": "full"}, "fusion=full: these environments are stepped by Python"),
    ],
)
def test_what_does_not_go_together_is_refused(environment, options, message):
    graph = rollmill.ppo(rollmill.make(environment), **SIZES)
    with pytest.raises(UsageError, match=message):
        choose_plan(graph, RunOptions(**options))


def test_of_another_policy_nothing_is_kept_that_was_said_of_the_old_one():
    voided = {"place": None, "cluster": None, "asynchronous": False}
    assert placed_anew({"distribution": "gpu-only"}) == {"distribution": "gpu-only"} | voided
    asked = {"distribution": "central", "asynchronous": True, "place": "threads"}
    assert placed_anew(asked) == asked | {"cluster": None}
    assert placed_anew({"cluster": "ray"}) == {"cluster": "ray", "place": None}
    assert placed_anew({"actors": 3}) == {"actors": 3}

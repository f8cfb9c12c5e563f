"""What a refusal advises is accepted then, by planning alone."""

import re

import pytest

import rollmill
from rollmill.core.errors import UsageError
from rollmill.planning.distribution import list_distributions
from rollmill.training.placing import choose_plan

SIZES = {"num_envs": 8, "num_steps": 8}
ALGORITHMS = {
    "ppo": lambda: rollmill.ppo("CartPole-v1", **SIZES),
    "a3c": lambda: rollmill.a3c("CartPole-v1", **SIZES),
    "impala": lambda: rollmill.impala("CartPole-v1", **SIZES),
    "mappo": lambda: rollmill.mappo("TagGridWorld-Small-v0", **SIZES),
    "dqn": lambda: rollmill.dqn("CartPole-v1"),
    "sac": lambda: rollmill.sac("Pendulum-v1"),
    "td3": lambda: rollmill.td3("Pendulum-v1"),
    "alphazero": lambda: rollmill.alphazero("TicTacToe-v0", **SIZES),
    "host": lambda: rollmill.ppo("gymnasium:CartPole-v1", **SIZES),
}
NAMES = ("place", "distribution", "workers", "actors", "learners", "asynchronous", "fusion", "num_seeds")
DEFAULTS = {"workers": None, "actors": None, "learners": None, "asynchronous": False, "fusion": "auto"}
PLACES = (None, "program", "threads", "processes", "mesh")
DEMANDS = ({"fusion": "rollout"}, {"fusion": "full"}, {"num_seeds": 2})


FAST = ("ppo",)


@pytest.fixture(
    scope="module",
    params=[name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in ALGORITHMS],
)
def graph(request):
    return ALGORITHMS[request.param]()


def advised(message, options):
    """The options of each way out that a message names: `NAME=VALUE`, or an option to leave out."""
    ways = []
    hint = re.split(r"hint: |; ", message)[-1]
    for name, value in re.findall(r"\b(\w+)=([\w-]+)", hint):
        if name in NAMES:
            ways.append({**options, name: value})
            ways[-1] |= {left: None for left in re.findall(r"--(\w+)", hint)}
            if value == "gpu-only":
                ways[-1].pop("place", None)
    for name in re.findall(r"leave (\w+) out", hint):
        if name in options:
            ways.append({key: value for key, value in options.items() if key != name})
    return ways


def complete(options):
    return {name: DEFAULTS.get(name) if value is None else value for name, value in options.items()}


@pytest.mark.parametrize("asynchronous", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("distribution", list_distributions())
def test_advice_is_accepted(graph, distribution, asynchronous):
    refused = advice = 0
    for place in PLACES:
        for demand in DEMANDS:
            for counts in ({}, {"actors": 2}, {"workers": 2}, {"learners": 2}):
                options = {"distribution": distribution, "place": place, **counts, **demand}
                options |= {"asynchronous": True} if asynchronous else {}
                try:
                    choose_plan(graph, rollmill.RunOptions(**options))
                    continue
                except UsageError as error:
                    message = str(error)
                refused += 1
                if not message.startswith(("fusion=", "num_seeds=")):
                    continue
                for way in advised(message, options):
                    advice += 1
                    choose_plan(graph, rollmill.RunOptions(**complete(way)))
    assert refused and (advice or asynchronous)


def test_places_that_the_policy_rules_out_are_not_advised():
    graph = ALGORITHMS["ppo"]()
    with pytest.raises(UsageError) as refused:
        choose_plan(graph, rollmill.RunOptions(distribution="multi-learner", learners=2, fusion="rollout"))
    assert "place=program" not in str(refused.value)
    assert "use distribution=gpu-only without --learners, or leave fusion out" in str(refused.value)

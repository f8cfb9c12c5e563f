"""The drawing of a plan, by value."""

import rollmill
from rollmill.dataflow import Group, Partition
from rollmill.planning.distribution import find_distribution
from rollmill.planning.picture import draw
from rollmill.planning.placement import Counts
from rollmill.planning.plan import Plan

# 40 steps an iteration, 3 x 2 = 6 updates; torsos of 4 x 2 + 2 weights, heads of 2 x 2 + 2 and 2 + 1.
GRAPH = rollmill.ppo(
    rollmill.make("CartPole-v1"),
    num_envs=8,
    num_steps=5,
    update_epochs=3,
    num_minibatches=2,
    network=rollmill.NetworkConfig(hidden_sizes=(2,)),
)
PARAMETERS = 4 * (2 * 10 + 6 + 3)
WEIGHTS = PARAMETERS + 4 * 3  # and the statistics of values
# An environment's answer: two observations of 16, reward 4, flags 2, return and length 8;
# asked by key 8, action 4.
# A step of the trajectory: those observations, reward, flags, return and length, action 4 and log-probability 4.
# Beside the steps, where the next rollout goes on.
TIMESTEP, ACTION, TRAJECTORY = 5 * 8 * 46, 5 * 8 * 12, 5 * 8 * 54 + 8 * 16


def plan(*groups, place="processes"):
    return Plan(Partition("mine", groups), place)


def rates(text):
    """Way, edge, rate and amount of each line that something passes along."""
    lines = text.partition("iterations/s:\n")[2].splitlines()
    return [(way.strip(), *rest) for way, *rest in map(_columns, lines)]


def _columns(line):
    way, edge, rate, amount = line[:28], line[28:40], line[40:56], line[56:]
    return way, edge.strip(), rate.strip(), amount.strip()


def test_everything_apart_at_a_thousand_iterations_a_second():
    apart = plan(
        Group("environment", ("environment",), 4, device="cpu"),
        Group("policy", ("policy",), 2),
        Group("learner", ("gradients",), 2),
        Group("update", ("update",)),
    )
    text = draw(apart, GRAPH, steps_per_second=40_000.0)
    assert text.startswith("mine (processes), 8 environments\n")
    assert "at 40,000 steps/s, 1,000.00 iterations/s:" in text
    assert (TIMESTEP, ACTION, TRAJECTORY, PARAMETERS, WEIGHTS) == (1840, 480, 2288, 116, 128)
    assert rates(text) == [
        ("environment -> policy", "timestep", "1.8 MB/s", "(1.8 kB an iteration)"),
        ("policy -> environment", "action", "480.0 kB/s", "(480 B an iteration)"),
        ("policy -> learner", "trajectory", "2.3 MB/s", "(2.3 kB an iteration)"),
        # Once a minibatch: gradients from one of the learners, which are equal, and parameters to each of them.
        ("learner -> update", "gradients", "696.0 kB/s", "(696 B an iteration)"),
        ("update -> learner", "parameters", "1.5 MB/s", "(1.5 kB an iteration)"),
        # Once an iteration, to each of the policies.
        ("learner -> policy", "weights", "256.0 kB/s", "(256 B an iteration)"),
        # And gradients of each learner in every mean.
        ("learner = learner", "reduction", "1.4 MB/s", "(1.4 kB an iteration)"),
    ]


def test_boxes():
    text = draw(Plan(find_distribution("central")(Counts(actors=4, asynchronous=True)), "processes"), GRAPH,
                steps_per_second=40.0)  # fmt: skip
    assert text.splitlines()[2:17] == [
        "  +- actor x 4 ------------------------------------+",
        "  | environment + policy + gradients               |",
        "  | 2 environments each, device: any, asynchronous |",
        "  | stages:   fetch parameters, collect, learn     |",
        "  | snapshot: nothing                              |",
        "  | if lost:  replaced alone                       |",
        "  +------------------------------------------------+",
        "",
        "  +- update x 1 -------------------------------------+",
        "  | update                                           |",
        "  | device: any                                      |",
        "  | stages:   apply gradients, report metrics        |",
        "  | snapshot: parameters                             |",
        "  | if lost:  all begin again from the last snapshot |",
        "  +--------------------------------------------------+",
    ]


def test_asynchronous_workers_each_send_their_gradients():
    text = draw(Plan(find_distribution("central")(Counts(actors=4, asynchronous=True)), "processes"), GRAPH,
                steps_per_second=40.0)  # fmt: skip
    assert rates(text) == [
        ("actor -> update", "gradients", "2.8 kB/s", "(2.8 kB an iteration)"),
        ("update -> actor", "parameters", "3.0 kB/s", "(3.0 kB an iteration)"),
    ]


def test_one_program_sends_nothing():
    text = draw(Plan(find_distribution("gpu-only")(Counts())), GRAPH, steps_per_second=40.0)
    assert text.startswith("gpu-only (program), 8 environments\n")
    assert text.endswith("at 40 steps/s, 1.00 iterations/s:\n  nothing leaves the program")
    two = draw(Plan(find_distribution("gpu-only")(Counts(learners=2))), GRAPH, steps_per_second=40.0)
    assert rates(two) == [("all = all", "reduction", "1.4 kB/s", "(1.4 kB an iteration)")]

"""Directories of runs, made of files alone."""

import json

from rollmill.record.run_directory import RunDirectory

ENDED = {"env_steps": 300, "total_env_steps": 600, "steps_per_second": 50.0, "final_return": 12.5}


def of_opponents(line):
    """Metrics of a zero-sum game, in which no episode has ended before the second line."""
    guard = None if line == 1 else 0.25 * line
    ended = 0.0 if line == 1 else 5.0
    thief = None if guard is None else -guard
    return {
        "episode/return": guard and 0.0,
        "episode/ended": ended,
        "returns/guard": guard,
        "returns/thief": thief,
    }


def recorded(
    root,
    *,
    lines=3,
    summary=None,
    rate=0.001,
    num_seeds=2,
    algorithm="ppo",
    environment="CartPole-v1",
    more=lambda line: {},
):
    """A run of `num_seeds` seeds with a line of metrics for every 100 of its 400 steps.

    `more` adds metrics to a line.
    """
    config = {"learning_rate": rate, "total_timesteps": 400, "network": {"hidden_sizes": [64, 64]}}
    graph = {"algorithm": algorithm, "environment": environment, "environment_options": {}, "config": config}
    options = {"seed": 7, "num_seeds": num_seeds}
    run = RunDirectory.create(root, config={"graph": graph, "options": options}, versions={})
    rows = [
        {
            "iteration": i,
            "env_steps": 100 * i,
            "seconds": i,
            "steps_per_second": 10.0 * i,
            "episode/return": 1.0 * i,
            **more(i),
        }
        for i in range(1, lines + 1)
    ]
    run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"iteration": 9, "env')
    if summary is not None:
        run.write_summary({**ENDED, **summary})
    return run

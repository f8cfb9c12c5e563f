"""Writes the tables of the documentation, from the configurations and from benchmarks/results; measures nothing.

    python benchmarks/tables.py

A table stands on a page between the markers `<!-- table: benchmarks/tables.py, NAME -->` and
`<!-- end of table -->`, and NAME is one of `TABLES`.
"""

import dataclasses
import json
import math
import re
import statistics
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import fmean, median, pstdev, stdev
from typing import Any

import numpy as np
from measure import HERE, RESULTS, interquartile_mean, options, read_result, stratified_interval

from rollmill.core.bounds import Range, bounds_of
from rollmill.core.options import field_docs
from rollmill.networks import NetworkConfig
from rollmill.recipes import RECIPES
from rollmill.runs.algorithms import BUILTIN

DOCS = HERE.parent / "docs"
MARKED = re.compile(r"(<!-- table: benchmarks/tables\.py, (.+?) -->\n).*?(<!-- end of table -->)", re.S)
Rows = Iterable[Sequence[str]]


def table_of(head: Sequence[str], rows: Rows, *, numbers: Iterable[int] | None = None) -> str:
    """Returns a table in Markdown; aligns columns of numbers, by default all but the first, to the right."""
    right = range(1, len(head)) if numbers is None else tuple(numbers)
    rule = ["---:" if column in right else "---" for column in range(len(head))]
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, rule, *escaped])


def titled(parts: Mapping[str, str]) -> str:
    return "\n\n".join(f"### {title}\n\n{table}" for title, table in parts.items())


def stored(name: str) -> dict[str, Any] | None:
    """Returns a whole result, with where it was measured."""
    file = RESULTS / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else None


def machine_of(found: Mapping[str, Any]) -> str:
    """Returns the cores or GPUs on which a result was measured."""
    kinds = [device["kind"] for device in found["hardware"]["devices"]]
    return f"{found['hardware']['cores']} cores" if kinds[0] == "cpu" else f"{len(kinds)} x {kinds[0]}"


def gpu_of(found: Mapping[str, Any]) -> str:
    return (found["hardware"]["gpu"] or "CPU").split(",")[0].removeprefix("NVIDIA ").split()[0]


def medians(figures: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    return {name: figure["median"] for name, figure in figures.items()}


# --- hyperparameters ---------------------------------------------------------------------------------------


def fields_of(config: type) -> str:
    """Returns the fields of a configuration: name, default, valid values, and the meaning from its docstrings."""
    meanings, ranges = docstrings_of(config), bounds_of(config)
    hints, values = typing.get_type_hints(config), config()
    rows = [
        [f"`{name}`", _default(getattr(values, name)), _allowed(hints[name], ranges.get(name)), meanings[name]]
        for name in (field.name for field in dataclasses.fields(config))
    ]
    return table_of(["Field", "Default", "Allowed", "Meaning"], rows, numbers=())


def docstrings_of(config: type) -> dict[str, str]:
    """Returns the docstring under each field of a dataclass, on one line."""
    found = {name: " ".join(text.split()) for name, text in field_docs(config).items()}
    return {field.name: found[field.name] for field in dataclasses.fields(config) if field.name in found}


def _default(value: Any) -> str:
    if isinstance(value, NetworkConfig):
        changed = {name: each for name, each in vars(value).items() if each != getattr(NetworkConfig(), name)}
        return ", ".join(f"`{name}={each!r}`" for name, each in changed.items()) or "`NetworkConfig()`"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"`{value!r}`" if isinstance(value, str | tuple | dict) else str(value)


def _allowed(hint: Any, bounds: Range | None) -> str:
    """Returns the valid values of a field in words."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        some = next(part for part in parts if part is not types.NoneType)
        scheduled = str in parts and float in parts
        others = ["a schedule"] * scheduled + ["None"] * (types.NoneType in parts)
        return ", or ".join([_allowed(float if scheduled else some, bounds), *others])
    if origin is typing.Literal:
        return ", ".join(f"`{choice!r}`" for choice in parts)
    if origin is tuple:
        nested = typing.get_origin(parts[0]) is tuple
        kind = typing.get_args(parts[0])[0] if nested else parts[0]
        return f"tuple of {'triples of ' * nested}{_kind(kind)}s{_limits(bounds, whole=True)}"
    if origin is dict:
        return f"dictionary of {_kind(parts[1])}" + "s" * (parts[1] in (float, str))
    return f"{_kind(hint)}{_limits(bounds, whole=hint is int)}"


def _kind(hint: Any) -> str:
    names = {int: "integer", float: "number", bool: "True, False", str: "string"}
    return names.get(hint) or f"`{hint.__name__}`"


def _limits(bounds: Range | None, *, whole: bool) -> str:
    if bounds is None:
        return ""
    if math.isfinite(bounds.high):
        return f" from {bounds.low} to {bounds.high}"
    if not math.isfinite(bounds.low):
        return ""
    least = f" greater than {bounds.low}" if bounds.exclusive else f" of at least {bounds.low}"
    return least + ("" if bounds.finite or whole else ", or infinite")


# --- learning ----------------------------------------------------------------------------------------------


REPLAY_RESULTS = ("replay-learning", "replay-learning-breakout", "replay-learning-sac", "replay-learning-td3")
REPLAY_HEAD = ("Environment", "Steps", "Final return of each seed", "Mean", "Greedy policy, mean", "Published")
BESIDE_REJAX = ("0.5 % random actions", "Rejax, 0.5 % random actions")


def replay_studies(algorithm: str) -> str:
    """Returns what an algorithm with a replay memory learned, beside published returns."""
    every = [study for name in REPLAY_RESULTS for study in read_result(name).values()]
    rows = [
        [*REPLAY_HEAD, *BESIDE_REJAX],
        *(_replay_row(each) for each in every if each["algorithm"] == algorithm),
    ]
    used = [column for column in range(len(rows[0])) if any(row[column] for row in rows[1:])]
    head, *body = ([row[column] for column in used] for row in rows)
    return table_of(head, body, numbers=[n for n, column in enumerate(used) if column not in (0, 2)])


def _replay_row(study: dict[str, Any]) -> list[str]:
    mean = lambda values: f"{fmean(values):,.1f} ± {pstdev(values):,.1f}"
    greedy, published, rejax = study.get("greedy_returns"), study["published"], study.get("rejax")
    planned = study["config"]["total_timesteps"]
    made = study.get("env_steps", [planned])  # trainings may have been stopped before their end
    return [
        study["environment"],
        f"{max(made):,}" if min(made) >= planned else f"{min(made):,} to {max(made):,}",
        ", ".join(f"{each:,.0f}" if abs(each) >= 100 else f"{each:.1f}" for each in study["final_returns"]),
        mean(study["final_returns"]),
        "" if greedy is None else mean(greedy),
        "" if published is None else "{:,.1f} ± {:,.1f}".format(*published),
        *(["", ""] if rejax is None else map(mean, (study["returns_beside_rejax"], rejax["final_returns"]))),
    ]


def placed_study(*names: str) -> str:
    """Returns what recipes, or the defaults of an algorithm, learned under a distribution policy."""
    studies = read_result("distributed-learning")
    rows = [
        [
            RECIPES[study["recipe"]]().environment if study["recipe"] else study["command"].split()[3],
            f"`{study['recipe']}`" if study["recipe"] else "none (defaults)",
            f"`{' '.join(study['placement'])}`",
            str(run["seed"]),
            f"{run['final_return']:,.1f}",
        ]
        + ["" if run["greedy"] is None else f"{run['greedy']:,.1f}"]
        + [f"{run['policy_lag_mean']:.1f}", f"{run['seconds']:.0f}"]
        for study in (studies[name] for name in names if name in studies)
        for run in study["runs"]
    ]
    numbers = ["Seed", "Final return", "Greedy policy", "Mean policy lag", "Seconds"]
    return table_of(["Environment", "Recipe", "Placement", *numbers], rows, numbers=(3, 4, 5, 6, 7))


def learning() -> str:
    rounded = lambda value: f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"
    lines = [
        "| Environment | | Final return of seeds 0 to 4 | Mean | Target | Met |",
        "|---|---|---|---:|---|---|",
    ]
    for row in read_result("learning")["rows"]:
        said = row["environment"], f"≥ {row['target']:g}, {row['target_is_for']}", "yes" if row["met"] else "no"
        for name, curves in row["sides"].items():
            each, (place, target, met) = ", ".join(map(rounded, curves["final"])), said
            lines.append(f"| {place} | {name} | {each} | {rounded(fmean(curves['final']))} | {target} | {met} |")
            said = "", "", ""
    return "\n".join(lines)


def defaults() -> str:
    """Returns what algorithms learned at their defaults."""
    number = lambda value: "" if value is None else f"{value:,.0f}"
    rows = [
        [
            f"`{row['command']}`",
            f"{row['steps']:,}",
            str(row["seeds"]),
            f"{row['mean']:,.1f} ± {row['half_interval']:,.1f}",
            f"{row['threshold']:g}",
            "yes" if row["met"] else "no",
            number(row.get("steps_to_threshold")),
            number(row.get("cpu_seconds")),
            row["gpu"].split(",")[0].split()[-1] if row.get("gpu") else "a core",
        ]
        for row in read_result("defaults")["rows"]
    ]
    head = ["Command", "Steps", "Seeds", "Return", "Threshold", "Met", "After steps", "CPU seconds", "On"]
    return table_of(head, rows, numbers=(1, 2, 3, 4, 6, 7))


VARIED = {
    **{
        word: word
        for word in ("c51", "quantiles", "rainbow", "lunar-lander", "mountain-car", "shared-torso", "gru")
    },
    "--no-normalize-observations": "raw observations",
    "--rnd-coef": "rnd",
    "--gamma 0.97": "gamma 0.97",
    "--transform keep:0,2": "hidden velocities",
    "--transform keep:0,1": "hidden velocities",
}
"""Names of rows by words of their options."""


def defaults_by_environment() -> str:
    """Returns the returns that each algorithm reaches in each environment, in bold where it is learned."""
    cells: dict[str, dict[str, str]] = {}
    environments: dict[str, float] = {}
    for row in read_result("defaults")["rows"]:
        environments[row["environment"]] = row["threshold"]
        options = row["command"].partition(row["environment"])[2]
        varied = [name for word, name in VARIED.items() if word in options]
        said = f"{row['mean']:,.1f} ± {row['half_interval']:,.1f}"
        name = " ".join([row["algorithm"], *varied])
        cells.setdefault(name, {})[row["environment"]] = f"**{said}**" if row["met"] else said
    head = ["Algorithm", *(f"{name}, {threshold:g}" for name, threshold in environments.items())]
    return table_of(head, [[name, *(of.get(env, "") for env in environments)] for name, of in cells.items()])


RANDOM_RETURNS = {"CartPole-v1": 22.4, "Acrobot-v1": -492.7, "Pendulum-v1": -1_207.6}
"""Mean returns of random actions in Gymnasium's environments, over 300, 40 and 100 episodes."""


def defaults_over_environments() -> str:
    """Returns the interquartile mean of each algorithm's scores over its classic environments."""
    scores: dict[str, dict[str, list[float]]] = {}
    for row in read_result("defaults")["rows"]:
        lowest = RANDOM_RETURNS.get(row["environment"])
        if lowest is not None and not any(word in row["command"] for word in ("--network", "--transform")):
            of = [(each - lowest) / (row["threshold"] - lowest) for each in row["returns"]]
            scores.setdefault(row["algorithm"], {})[row["environment"]] = of
    rows = []
    for algorithm, of in scores.items():
        if len(of) > 1:
            low, high = stratified_interval(list(of.values()))
            mean = interquartile_mean(np.concatenate(list(of.values())))
            seeds = ", ".join(str(len(each)) for each in of.values())
            rows.append([algorithm, ", ".join(of), seeds, f"{mean:.3f}", f"{low:.3f} to {high:.3f}"])
    head = ["Algorithm", "Environments", "Seeds", "Interquartile mean", "Interval of 95 %"]
    return table_of(head, rows, numbers=(3, 4))


SIDES_TO_RETURN = ("Rollmill, cold", "Rollmill, warm", "Stable-Baselines3", "Rejax, cold", "Rejax, warm")
STARTS = {
    "start-cpu": ("PPO, CartPole-v1", "two CPU cores"),
    "start-fused-gpu": ("the same, 4,096 × 128, `--fusion full`", "one H200, 16 CPU cores"),
}
"""Results of starts, with what was started on which machine."""


def starts() -> str:
    """Returns the seconds and CPU seconds from the shell to the end of the first iteration."""
    rows = []
    for result, names in STARTS.items():
        found = read_result(result)["now"]
        cells = [f"{found[kind]['seconds']:.1f} s ({found[kind]['processor']:.1f} s)" for kind in ("cold", "warm")]
        rows.append([*names, *cells])
    return table_of(["Run", "Machine", "Cold (CPU time)", "Warm (CPU time)"], rows)


def seconds_to_return() -> str:
    """Returns the CPU seconds, and the steps, after which each side has reached a return."""
    rows = []
    for environment, found in read_result("seconds-to-return")["environments"].items():
        sides = [found["sides"][name] for name in SIDES_TO_RETURN]
        cells = [_until_return(side, found["threshold"]) for side in sides]
        rows.append([f"{environment} to {found['threshold']:g}", str(max(map(len, sides))), *cells])
    return table_of(["CPU seconds (steps)", "Seeds", *SIDES_TO_RETURN], rows)


def _until_return(runs: list[dict[str, Any]], threshold: float) -> str:
    """Returns the medians over seeds, and how many of them reached the threshold if not all did."""
    solved = [run for run in runs if run["cpu"] is not None and run["return"] >= threshold]
    if not solved:
        return f"none of {len(runs)}"
    of = lambda name: median(run[name] for run in solved)
    few = "" if len(solved) == len(runs) else f", {len(solved)} of {len(runs)}"
    return f"{of('cpu'):,.1f} ({of('steps') / 1000:,.0f} k{few})"


ROBOTS = {
    "cartpole": "`robots:Cartpole`",
    "ballbalance": "`robots:BallBalance`",
    "quadcopter": "`robots:Quadcopter`",
    "ingenuity": "`robots:Ingenuity`",
    "ant": "`robots:Ant`",
    "ant-rollout": "`robots:Ant`, rollout kernel",
    "ant-warp": "`robots:Ant`, MuJoCo Warp",
    "anymal": "`robots:Anymal`",
    "frankacabinet": "`robots:FrankaCabinet`",
    "humanoid": "`robots:Humanoid`",
    "shadowhand": "`robots:ShadowHand`",
    "shadowhand-warp": "`robots:ShadowHand`, MuJoCo Warp",
}


def robots_learning() -> str:
    """Returns what PPO learned on robots by their recipes, beside published returns."""
    rows = []
    for name, title in ROBOTS.items():
        if not (found := stored(f"robots-learning-{name}-gpu")):
            continue
        result = found["result"]
        (mean, deviation), trainings = next(iter(result["published"].values())), result["trainings"]
        times = [time for one in trainings for time in one["reached"][f"{mean:g}"]["seconds"]]
        rows.append(
            [
                title,
                ", ".join(f"{value:,.0f}" for one in trainings for value in one["returns"]),
                f"{mean:,.0f} ± {deviation:,.0f}",
                ", ".join("-" if time is None else f"{time:.1f}" for time in times),
                f"{max(one['seconds'] for one in trainings):.0f}",
                f"{max(one['steps'] for one in trainings) / 1e6:.1f} of {result['steps_of_the_recipe'] / 1e6:.1f}",
                f"{fmean(one['steps_per_second'] for one in trainings) / 1e6:.1f} M",
                f"{result['compile_seconds']:.0f}",
            ]
        )
    head = ["Task", "Return of each seed", "Published", "Seconds to it", "Seconds", "Million steps", "Steps/s"]
    return table_of([*head, "Compiled in, s"], rows)


BACK_ENDS = {"xla": "XLA", "kernel": "Kernel", "warp": "MuJoCo Warp"}


def robots_backends() -> str:
    """Returns steps a second of each robot's rollouts and training by each back end, and what a back end costs."""
    found = read_result("robots-backends-gpu") | read_result("robots-backends-others-gpu")
    rows = []
    for name in sorted(found):
        sides = [found[name][side] for side in BACK_ENDS]
        memory = [row.get("bytes_a_copy", 0) + row.get("bytes_a_copy_in_warp", 0) for row in sides]
        rows.append(
            [
                f"`robots:{name}`",
                *map(_rollouts_and_training, sides),
                ", ".join(f"{row['compile_seconds']:.0f}" if "compile_seconds" in row else "-" for row in sides),
                ", ".join(f"{each / 1e3:.0f}" if each else "-" for each in memory),
            ]
        )
    return table_of(["Task", *BACK_ENDS.values(), "Compiled in, s", "kB per copy"], rows)


def _rollouts_and_training(row: Mapping[str, Any]) -> str:
    if "steps_per_second" not in row:
        return "refused" if "refused" in row else "-"
    both = (row[f"steps_per_second{part}"] for part in ("", "_of_training"))
    return ", ".join(f"{rate / 1e6:.3g} M" for rate in both)


def robots_physics() -> str:
    """Returns how far steps of robots' models are from those of C MuJoCo."""
    share = lambda found, limit: f"{100 * found[f'within_{limit}']:.1f} %"
    rows = []
    for name, row in read_result("robots-physics").items():
        if name == "mujoco" or not {"float32", "float64"} <= row.keys():
            continue
        single, double = row["float32"], row["float64"]
        free = double["unconstrained"]["greatest"], share(single["unconstrained"], "1e-05")
        sides = ("both_stopped", "mujoco_converged", "mujoco_stopped_and_converged")
        shares = [share(single["constrained"][side], "0.001") for side in sides]
        both = double["constrained"]["both_stopped"]
        drift = double["drift"]
        momentum = f"{drift['momentum']:.0e}" if "momentum" in drift else ""
        steps = [*shares, share(both, "0.001"), f"{both['median']:.0e}"]
        rows.append([f"`robots:{name}`", f"{free[0]:.0e}", free[1], *steps, f"{drift['energy']:.0e}", momentum])
    head = ["Robot", "Free, double", "Free, float32", "4 and 4", "4 and converged", "MuJoCo's 4 and converged"]
    return table_of([*head, "8 and 8, double", "Median of it", "Energy", "Momentum"], rows)


def tag_learning() -> str:
    head = "| Environment | Taggers | Runners | Taggers' return, seeds 0 to 2 | Mean | Target | Met |"
    lines = [head, "|---|---|---|---|---:|---|---|"]
    for row in read_result("tag_learning")["rows"]:
        place = row["environment"]
        for taggers, found in row["taggers_return"].items():
            for runners, returns in found.items():
                judged = taggers == runners == "trained"
                target = f"≥ {row['target']:g}, every seed" if judged else ""
                met = ("yes" if row["met"] else "no") if judged else ""
                each = ", ".join(f"{value:.2f}" for value in returns)
                cells = f"{taggers} | {runners} | {each} | {fmean(returns):.2f}"
                lines.append(f"| {place} | {cells} | {target} | {met} |")
                place = ""
    return "\n".join(lines)


# --- games -------------------------------------------------------------------------------------------------


SELF_PLAY_NETWORKS = {
    "mlp": "two layers of 64",
    "small-resnet": "2 residual blocks, 32 channels",
    "resnet": "6 residual blocks, 128 channels",
}


def strength() -> str:
    """Returns the shares of contested positions in which policies keep the value, and their games."""
    judged, rows = read_result("connect-four-judge"), []
    for row in [*judged["baselines"], *judged["checkpoints"]]:
        games = [row["games"][side] for side in ("first", "second_off_centre")]
        decisions = [game["decisions"] for game in games]
        kept = sum(each["number"] * (each["share"] or 0.0) for each in decisions)
        shares = [row["positions"][kind] for kind in ("all", "quiet")]
        rows.append(
            [player_of(row), *(f"{100 * of['share']:.1f} ± {100 * of['standard_error']:.1f} %" for of in shares)]
            + [f"{game['won']} / {game['drawn']} / {game['lost']}" for game in games]
            + [f"{kept / sum(each['number'] for each in decisions):.1%}"]
        )
    head = ["policy", "all positions", "quiet ones", "moving first", "moving second", "decisions in games"]
    return table_of(head, rows)


def player_of(row: Mapping[str, Any]) -> str:
    if "simulations" not in row:
        return {"random": "random moves", "perfect": "perfect player"}.get(row["policy"], row["policy"])
    return f"AlphaZero, {row['simulations']} simulations" if row["simulations"] else "AlphaZero, the network alone"


def self_play() -> str:
    """Returns the moves of self-play a second beside Pgx and mctx, and the parts of their time."""
    rows = []
    for machine, name in {"one H200": "self-play-gpu", "two cores": "self-play-cpu"}.items():
        for case in read_result(name)["self_play"]:
            rates = [case[side]["moves_per_second"]["median"] for side in ("pgx", "rollmill")]
            parts, others = (case[side]["seconds_of_a_move_of_all_games"] for side in ("rollmill", "pgx"))
            times = [parts["network"], parts["environment"], parts["rest"], others["rest"]]
            rows.append(
                [machine, SELF_PLAY_NETWORKS[case["network"]], f"{case['games']:,}", str(case["simulations"])]
                + [*(f"{rate:,.0f}" for rate in rates), f"{case['over_pgx']['median']:.2f} x"]
                + [f"{1e3 * seconds:.2f}" for seconds in times]
            )
    head = ["machine", "network", "games", "simulations", "Pgx and mctx", "Rollmill", "ratio"]
    head += ["network, ms", "environment, ms", "rest, ms", "Pgx and mctx, rest"]
    return table_of(head, rows, numbers=range(2, len(head)))


def random_play() -> str:
    """Returns the moves a second of random play by XLA and in one kernel."""
    rows = [
        [name, *(f"{case[way]['median'] / 1e6:,.0f} M" for way in ("xla", "kernel")), f"{case['over_xla']:.1f} x"]
        for name, case in read_result("random-play-gpu")["play"].items()
    ]
    return table_of(["game, games side by side, stored", "XLA", "kernel", "ratio"], rows)


# --- distribution and GPUs ---------------------------------------------------------------------------------


def distribution() -> str:
    return titled(
        {
            "Every policy at the same work": policies(read_result("distribution-policies")["rows"]),
            "Kernels in groups": group_kernels(read_result("distribution-kernels")["rows"]),
            "Beside RLlib 2.60, steps a second": rllib(read_result("distribution-rllib")["rows"]),
            "Packages between two processes": channels(read_result("channels-cpu")["rows"]),
            "Tag with random actions": tag(read_result("tag-cpu")["rows"]),
            "PPO on two H200, million steps a second": scaling(read_result("scaling-gpu")["weak_scaling"]),
        }
    )


def policies(rows: list[dict[str, Any]]) -> str:
    columns = [{name: each["steps_per_second"]["median"] for name, each in row["figures"].items()} for row in rows]

    def cell(rates: dict[str, float], name: str) -> str:
        text = f"{rates[name] / 1e3:,.1f}" if name in rates else ""
        return f"**{text}**" if text and rates[name] == max(rates.values()) else text

    head = ["Thousand steps/s", *(f"{row['work']['algorithm']}, {row['environment']}" for row in rows)]
    names = dict.fromkeys(name for column in columns for name in column)
    return table_of(head, [[name, *(cell(column, name) for column in columns)] for name in names])


def group_kernels(rows: list[dict[str, Any]]) -> str:
    cell = lambda row, fusion: f"{row['figures'][fusion]['steps_per_second']['median'] / 1e3:,.0f}"
    found = [
        [row["policy"], cell(row, "off"), cell(row, "full"), f"{row['ratio']['median']:.2f} x"] for row in rows
    ]
    work = rows[0]["work"]
    size = f"{work['num_envs']:,} x {work['num_steps']}"
    head = f"Thousand steps/s, {work['algorithm']} on {work['environment']}, {size}"
    return table_of([head, "XLA", "kernels", "ratio of pairs"], found)


def rllib(rows: list[dict[str, Any]]) -> str:
    found = []
    for row in rows:
        rates = {name: figure["steps_per_second"]["median"] for name, figure in row["figures"].items()}
        for name in (each for each in rates if each != "rllib"):
            where = f"{row['work']['algorithm']}, {name.removeprefix('rollmill ')}"
            speeds = [f"{rates[side]:,.0f}" for side in (name, "rllib")]
            found.append([where, row["chosen"][name], *speeds, f"{row['ratios'][name]:.1f} x"])
    return table_of(["Algorithm, environment", "Rollmill's layout", "Rollmill", "RLlib", "Ratio"], found)


def channels(rows: list[dict[str, Any]]) -> str:
    sizes = [f"{row['bytes'] / 1024:,.0f} KiB" for row in rows]
    kinds = {
        "GB/s": ("gigabytes_per_second", "{:.2f}"),
        "Round trip, microseconds": ("round_trip_microseconds", "{:,.0f}"),
    }
    return "\n\n".join(
        table_of(
            [head, *sizes],
            [[side, *(form.format(row[key][side]["median"]) for row in rows)] for side in rows[0][key]],
        )
        for head, (key, form) in kinds.items()
    )


def tag(rows: list[dict[str, Any]]) -> str:
    found = []
    for row in rows:
        rates = medians(row["steps_per_second"])
        peer = next(rate for name, rate in rates.items() if name.startswith("WarpDrive"))
        best = max(rate for name, rate in rates.items() if not name.startswith("WarpDrive"))
        where = f"{row['environment']}, {row['taggers']} taggers, {row['runners']} runners"
        found.append([where, f"{best:,.0f}", f"{peer:,.1f}", f"{best / peer:,.0f} x"])
    return table_of(["Environment steps/s", "Rollmill", "WarpDrive, NumPy", "Ratio"], found)


def scaling(rows: list[dict[str, Any]]) -> str:
    over = lambda row, name, rate: f"{rate / 1e6:.1f} ({row['over_one_gpu'][name]:.2f} x)"
    found = [
        [f"{row['envs_per_gpu']:,}", *(over(row, *each) for each in medians(row["steps_per_second"]).items())]
        for row in rows
    ]
    return table_of(["Environments a GPU", *rows[0]["steps_per_second"]], found)


WAYS = {"turns": "in turns", "mps": "under MPS"}


def instances_ppo() -> str:
    """Returns the steps a second of several processes on one GPU, and of one process with as much work."""
    result = read_result("instances-ppo")
    one, *counts = result["mps"][next(iter(result["programs"]))]
    head = ["training", f"{one} process", *(f"{count} {words}" for count in counts for words in WAYS.values())]
    head += [f"one of {counts[-1]} times the environments", f"`vmap` of {counts[-1]} runs"]
    rows = []
    for name in result["programs"]:
        shared = [result[way][name][count] for count in counts for way in WAYS]
        alone = [result["one process"].get(f"{name}, {kind}, {counts[-1]}") for kind in ("wide", "vmap")]
        rows.append([name, *map(_rate, [result["turns"][name][one], *shared, *alone])])
    return table_of(head, rows)


def studied_robots() -> list[tuple[str, Mapping[str, Any]]]:
    """Returns the rows of each task of which all were measured. While others still compile, none is alone."""
    tasks = read_result("robots-study-gpu")["tasks"].items()
    return [(task, sides) for task, sides in tasks if all("failed" not in row for row in sides.values())]


def robots_serving() -> str:
    """Returns decisions a second of processes under MPS that act on robots, and of one process for all robots."""
    rows = []
    for task, sides in studied_robots():
        served = {name.removeprefix("serving "): row for name, row in sides.items() if name.startswith("serving ")}
        for count, row in served.items():
            side = "1 process, all robots" if count == "wide" else f"{count} process{'es' * (count != '1')}"
            rate = row["steps_per_second"]
            over = f"{rate / served['1']['steps_per_second']:.2f}"
            rows.append(
                [f"`robots:{task}`, {side}", f"{rate / 1e6:.2f} M", over, f"{100 * row['sm_activity']:.0f} %"]
            )
    return table_of(["", "decisions/s", "over one process", "SM activity (GPM)"], rows)


TRAININGS = {
    "synchronous": "PPO, {} learner{}",
    "mesh": "PPO, {} learner{} in a mesh",
    "asynchronous": "IMPALA, 1 learner and {} actor{}",
    "planner": "PPO, the planner's choice",
}


def robots_training() -> str:
    """Returns the steps a second of trainings whose processes share a GPU under MPS, beside one process."""
    rows = []
    for task, sides in studied_robots():
        for name, row in sides.items():
            kind, _, count = name.partition(" ")
            if kind == "serving":
                continue
            alone = "asynchronous" if kind == "asynchronous" else "synchronous"
            rate, one = row["steps_per_second"], sides[f"{alone} 1"]["steps_per_second"]
            side = TRAININGS[kind].format(count, "s" * (count != "1"))
            side = "PPO, 1 process, all robots" if count == "wide" else side
            activity = f"{100 * row['sm_activity']:.0f} %"
            rows.append([f"`robots:{task}`, {side}", f"{rate / 1e6:.2f} M", f"{rate / one:.2f}", activity])
    return table_of(["", "steps/s", "over one", "SM activity (GPM)"], rows)


def _rate(figures: Mapping[str, Any] | None) -> str:
    if figures is None:
        return "–"
    steps = figures["steps_per_second"]["median"]
    return f"{steps / 1e6:.3g} M" if steps >= 1e6 else f"{steps / 1e3:.3g} k"


def instances_alphazero() -> str:
    """Returns the moves a second of several processes on one GPU, beside the activity of the GPU."""
    result = read_result("instances-alphazero")
    (name,) = result["programs"]
    one, most = result["turns"][name]["1"]["steps_per_second"]["median"], list(result["mps"][name])[-1]
    found = {"1 process": result["turns"][name]["1"]}
    found |= {
        f"{count} processes, {words}": figures
        for way, words in WAYS.items()
        for count, figures in result[way][name].items()
        if count != "1"
    }
    found[f"one process, {most} times the games"] = result["one process"][f"{name}, wide, {most}"]
    found[f"one process, `vmap` of {most} runs"] = result["one process"][f"{name}, vmap, {most}"]
    rows = []
    for words, figures in found.items():
        steps = figures["steps_per_second"]["median"]
        shares = [f"{100 * figures[key]:.1f} %" for key in ("utilisation", "sm_activity", "sm_occupancy")]
        rows.append(
            [words, f"{steps:,.0f}", f"{steps / one:.2f}", *shares, f"{figures['memory_bytes'] / 2**30:.1f} GiB"]
        )
    head = ["", "moves/s", "over one process", "utilisation (NVML)", "SM activity (GPM)", "SM occupancy", "memory"]
    return table_of(head, rows)


WAYS_OF_SWEEPS = {
    "side-by-side": "processes under MPS",
    "shared": "one program",
}


def sweeps() -> str:
    """Returns the seconds of whole sweeps on a GPU: of the first one, and of one like it afterwards."""
    rows = []
    for name in ("sweeps-gpu", "sweeps-short-gpu"):
        found = read_result(name)
        for way, text in WAYS_OF_SWEEPS.items():
            if each := [round_[way] for round_ in found["rounds"] if way in round_]:
                sizes = f"{each[0]['trials']} trials of {found['steps_of_a_trial'] / 1e6:g} M steps"
                first, *later = (one["seconds"] for one in each)
                rows.append([sizes, text, f"{first:.1f} s", f"{median(later):.1f} s"])
    return table_of(["sweep", "trials as", "first", "again"], rows)


def populations() -> str:
    """Returns the returns of population-based training and of random search, medians over seeds."""
    found = read_result("populations-cpu")
    rows = []
    for environment, steps in found["steps_of_a_trial"].items():
        each = found[environment]
        seeds = len(each["seeds"])
        for of in ("best", "mean"):
            random, population = (f"{each[of][way]['median']:.0f}" for way in ("random", "population"))
            better = f"{each[f'seeds_with_a_better_{of}']} of {seeds}"
            rows.append(
                [
                    f"{environment}, {steps:,} steps a trial",
                    f"{of} trial" if of == "best" else "mean of the trials",
                    random,
                    population,
                    better,
                ]
            )
    return table_of(
        ["environment", "return of the", "random search", "population-based", "seeds with a higher return"], rows
    )


def seeds() -> str:
    """Returns the speed of several seeds in one program on a GPU, by kernels and by XLA."""
    found = read_result("seeds-gpu")
    ours = found["steps_per_second"]["all seeds, kernels"]["median"]
    rows = [
        [
            name,
            f"{each['median'] / 1e6:.1f} M",
            f"{ours / each['median']:.1f}",
            f"{found['return_at_the_end'][name]:.0f} after {found['steps_of_each_seed'][name] / 1e6:.0f} M",
        ]
        for name, each in found["steps_per_second"].items()
    ]
    head = ["program", "steps/s of all seeds", "kernels of all seeds are faster by", "return, steps of each seed"]
    return table_of(head, rows)


def placements() -> str:
    """Returns how far the weights of one training, placed in several ways, are from those of one process."""
    found = read_result("instance-training-weights-gpu")["rows"]
    rows = [[name, f"{row['largest_difference']:.1e}"] for name, row in found.items()]
    return table_of(["where", "largest difference of a weight"], rows)


def reductions() -> str:
    """Returns the times of means by the number of parameters, and the way that a training chooses."""
    ways = ("flat", "one-shot", "hierarchical", "host")
    names = ("reductions-one-shot", "reductions-gpu", "reductions-four-gpu")
    rows = [
        [f"{row['gpus']} x {row['instances']}", f"{row['parameters']:,}"]
        + [f"{1e6 * row['seconds'][way]:,.0f} us" if way in row["seconds"] else "" for way in ways]
        + [row["chosen"]]
        for name in names
        for row in read_result(name)["rows"]
    ]
    return table_of(["GPUs x processes on each", "parameters", *ways, "chosen"], rows)


# --- kernels -----------------------------------------------------------------------------------------------


def fusion() -> str:
    read = lambda *names: [found for name in names if (found := stored(f"fusion-{name}"))]
    classic = read("rollouts-classic", "rollouts-cartpole", "rollouts", "rollouts-tag", "rollouts-tag-4096")
    rollouts = {
        f"{case}, {gpu_of(each)}": own for each in classic for case, own in each["result"]["rollouts"].items()
    }
    trainings = {
        f"{case}, {gpu_of(each)}": own
        for each in read("training-4096", "training-65536", "training-256-256", "training-256-128-64")
        for case, own in each["result"].items()
    }
    errors = [
        [case, side, f"{figure['error']:.1e}"]
        for case, found in read_result("fusion-gradients").items()
        for side, figure in found.items()
        if side != "xla, exact products"
    ]
    sides = {"rollout": "rollouts fused", "full, tf32": "both, tf32", "full, bfloat16": "both, bfloat16"}
    numerics = {"tf32": "tf32", "bfloat16": "bfloat16"}
    return titled(
        {
            "Rollouts of 128 steps, trajectory stored, billion steps a second": beside_xla(
                "Environment, copies", rollouts, numerics, "over_xla", unit=1e9
            ),
            "PPO on CartPole-v1, 4 epochs of 4 minibatches, million steps a second": beside_xla(
                "Environments x steps, torso", trainings, sides, "times_xla", unit=1e6
            ),
            "Gradients beside those with exact products, by the greatest number of each leaf": table_of(
                ["Samples, torso", "Products", "Greatest error"], errors
            ),
        }
    )


def beside_xla(head: str, cases: dict[str, Any], sides: dict[str, str], ratio: str, *, unit: float) -> str:
    """Returns a row for each case: XLA's rate, then those of the others and how many times as fast they are."""
    cell = lambda rate: "" if rate is None else f"{rate['median'] / unit:,.2f} ({rate[ratio]:.1f} x)"
    rows = [
        [case, f"{rates['xla']['median'] / unit:,.2f}", *(cell(rates.get(side)) for side in sides)]
        for case, rates in cases.items()
    ]
    return table_of([head, "XLA", *sides.values()], rows)


STUDY_SIDES = {
    "Gymnasium": "Gymnasium, one core",
    "PyTorch": "PyTorch",
    "PyTorch, CUDA graph": "PyTorch in CUDA graphs",
    "torch.compile": "torch.compile",
    "torch.compile, CUDA graph": "torch.compile in CUDA graphs",
    "XLA": "XLA",
    "kernel": "kernel",
}


def fusion_study() -> str:
    """Returns the rates of the study by number of environments, and the gains of vectorisation and fusion."""
    found = stored("fusion-study")
    assert found is not None
    cases = [case for case in found["result"]["cases"] if case["sweep"] == "environments"]
    parts = {
        f"{name}, million steps a second, {gpu_of(found)}": by_environments(cases, name)
        for name in dict.fromkeys(case["simulator"] for case in cases)
    }
    gains = ("vectorised", "fused", "product", "both")
    rows = [
        [f"{row['simulator']}, {row['num_envs']:,}, {row['sides']}", *(f"{row[part]:,.1f}" for part in gains)]
        for row in found["result"]["multiplication"]
        if row["num_envs"] > 1
    ]
    head = ["Simulator, environments, sides", "vectorised alone", "fused alone", "their product", "both"]
    parts[f"Times one environment unfused, {gpu_of(found)}"] = table_of(head, rows)
    picture = "![Rates over environments, steps of a launch, and complexity](figures/fusion-study.png)"
    return f"{picture}\n\n{titled(parts)}"


def by_environments(cases: list[dict[str, Any]], simulator: str) -> str:
    """Returns a row for each side, of its fastest variant."""
    best: dict[tuple[str, int], float] = {}
    for case in cases:
        if case["simulator"] == simulator:
            key = case["side"], case["num_envs"]
            best[key] = max(best.get(key, 0.0), case["median"])
    sizes = sorted({size for _, size in best})
    millions = lambda rate: "" if rate is None else f"{rate / 1e6:,.0f}" if rate >= 1e8 else f"{rate / 1e6:.3g}"
    rows = [[name, *(millions(best.get((side, size))) for size in sizes)] for side, name in STUDY_SIDES.items()]
    return table_of(["Environments", *(f"{size:,}" for size in sizes)], [row for row in rows if any(row[1:])])


# --- profiler and plan search ------------------------------------------------------------------------------


def rows_of(part: str) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yields machine, name and figures of each row of a part of profiler.py, on each platform by name."""
    for name in (f"profiler-{part}-cpu", f"profiler-{part}-gpu"):
        if (found := stored(name)) is not None:
            for row in sorted(found["result"]["rows"].items()):
                yield machine_of(found), *row


def profiler_errors() -> str:
    """Returns how far the corrected duration of an iteration is from the unprofiled one, in each profile.

    `windows` is the smallest number of windows of a profile. `with it` has the standard deviation among windows.
    `device waits` has the range of the windows with the profiler, as shares of an iteration without it. `by
    calibration` is the median error of a correction that knows nothing of the training without the profiler.
    """
    rows = []
    for machine, name, row in rows_of("errors"):
        profiles = row["profiles"]
        # Profiles of one row may have had fewer or more cores than those of another.
        machine = (
            machine if any(each["devices"] for each in profiles) else f"{min(p['cores'] for p in profiles)} cores"
        )
        slowdowns = [[float(each) for each in one["slowdowns"].split()] for one in profiles]
        waits = [float(each) for one in profiles for each in one.get("waiting", "").split()]
        calibrated = [each for one in profiles if (each := one.get("error_by_calibration")) is not None]
        rows.append(
            [
                name,
                machine,
                str(min(map(len, slowdowns))),
                duration(median(p["iteration_seconds"] for p in profiles)),
            ]
            + [f"{median(each['slowdown'] for each in profiles):.2f} ± {median(map(stdev, slowdowns)):.2f} x"]
            + [f"{min(waits):.0%} to {max(waits):.0%}" if waits else ""]
            + [", ".join(f"{each['error']:+.1%}" for each in profiles)]
            + [f"{median(calibrated):+.0%}" if calibrated else ""]
        )
    head = ["training", "on", "windows", "without the profiler", "with it", "device waits"]
    return table_of([*head, "error of each profile", "by calibration"], rows, numbers=(2, 3, 4, 5, 6, 7))


def profiler_devices() -> str:
    """Returns the utilisation by the driver beside the time that kernels ran and the activity of the SMs."""
    rows = []
    for machine, name, row in rows_of("errors"):
        if first := [each["devices"][0] for each in row["profiles"] if each["devices"]]:
            named = 1.0 - median(each["unnamed_share_of_device"] for each in row["profiles"])
            kinds = ("utilisation", "occupied", "sm_activity")
            shares = [f"{median(each[kind] or 0.0 for each in first):.0%}" for kind in kinds]
            rows.append([name, machine, *shares, f"{named:.1%}"])
    head = ["training", "on", "utilisation (NVML)", "a kernel ran", "SMs active", "kernels of a named operation"]
    return table_of(head, rows, numbers=(2, 3, 4, 5))


def profiler_planted() -> str:
    """Returns how much of the work that was added to an operation is found there, and how much in another one."""
    rows = [
        [f"`{name}`", machine, duration(row["added_seconds"]), duration(row["attributed_seconds"])]
        + [f"{row['error']:+.1%}", f"{row['largest_other']:+.1%} of the iteration (`{row['other']}`)"]
        for machine, name, row in rows_of("planted")
    ]
    head = ["work added to", "on", "an iteration takes longer by", "the operation", "difference"]
    return table_of([*head, "largest change of another operation"], rows, numbers=(2, 3, 4, 5))


def profiler_survey() -> str:
    """Returns the shares of the working time by kinds of operations, the idle share of all time, and the error."""
    kinds = ("simulation", "inference", "search", "backpropagation", "replay", "preparation", "host", "rest")
    share = lambda each: f"{each:.0%}" if each >= 0.005 else ""
    rows = [
        [name, *(share(row["shares"][kind]) for kind in kinds), f"{row['idle']:.0%}", f"{row['error']:+.0%}"]
        for _, name, row in rows_of("survey")
    ]
    return table_of(["training", *kinds, "idle", "error"], rows)


def advice() -> str:
    """Returns what following a piece of advice saved of an iteration's time, beside what was predicted."""
    rows = []
    for name in ("advice-cpu", "advice-gpu"):
        found = stored(name) or {"result": {"rows": {}}}
        for training, row in sorted(found["result"]["rows"].items()):
            machine = machine_of(found) if name.endswith("gpu") else f"{found['result']['cores']} cores"
            if "skipped" not in row and not row["followed"]:
                rows.append([training, machine, "nothing is predicted", "", "", ""])
            for one in row.get("followed", ()):
                before, after = map(median, one["steps_per_second"])
                shares = [f"{100 * one[key]:.0f}%" for key in ("predicted", "saved")]
                rows.append([training, machine, f"`{one['options']}`", *shares, f"{after / before:.2f} x"])
    head = ["training", "on", "advice", "predicted to save", "saved", "steps a second"]
    return table_of(head, rows, numbers=(3, 4, 5))


def duration(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def planner() -> str:
    """Returns the choices of the plan search beside the best of all candidates."""
    rows = []
    for file in sorted(RESULTS.glob("planner-*.json")):
        found = json.loads(file.read_text())
        for result in (each for each in found["result"].values() if "chosen" in each):
            memory = result["predicted_over_measured_memory"].values()
            reasons = [each.get("reason", "") for each in result["sweep"].values()]
            judged = sum(not reason.startswith(("not measured", "did not start")) for reason in reasons)
            rows.append(
                [
                    f"`{result['command']}`",
                    machine_of(found),
                    result["chosen"],
                    f"{result['chosen_over_best']:.2f}",
                ]
                + [f"{judged} of {len(reasons)}", f"{result['measured_by_search']} of {result['candidates']}"]
                + [f"{result['search_seconds']:.0f}", f"{min(memory):.2f} to {max(memory):.2f}" if memory else "-"]
            )
    head = ["Training", "On", "Choice of the search", "Share of the best", "All", "Search", "Seconds"]
    return table_of([*head, "Memory, predicted / measured"], rows, numbers=(3, 4, 5, 6, 7))


# --- serving -----------------------------------------------------------------------------------------------


def serving(name: str, *, workers_alone: bool = False) -> str:
    result = read_result(f"serving-{name}")

    def row(load: str, setting: str, figures: dict[str, Any]) -> list[str]:
        times = [f"{figures[key]:.1f} ms" for key in ("median_ms", "p99_ms")]
        return [load, f"`--max-batch {setting}`", f"{figures['decisions_per_second']:,.0f}", *times]

    clients = lambda one: "1 client" if one["clients"] == 1 else f"{one['clients']} clients"
    rows = (
        []
        if workers_alone
        else [
            *(
                row(
                    f"{clients(one)}, closed loop", f"{one['max_batch']} --max-wait-ms {one['max_wait_ms']:g}", one
                )
                for one in sorted(result["batching"], key=lambda one: one["clients"])
            ),
            *(
                row(f"{clients(one)}, {one['observations']} observations a request", "64", one)
                for one in result["lists"]
            ),
            *(row(f"{one['rate']:,.0f} requests a second, open loop", "64", one) for one in result["rates"]),
        ]
    )
    rows += [row("64 clients, closed loop", f"64 --workers {one['workers']}", one) for one in result["workers"]]
    head = ("load", "setting", "decisions a second", "median", "99th percentile")
    return table_of(head, rows, numbers=(2, 3, 4))


# --- pages -------------------------------------------------------------------------------------------------


ON_GPU = ", one GPU"


def fusion_product(end: str = "") -> str:
    """Returns the outcome of both depths of fusion for each algorithm and placement, and the refusals.

    With an `end`, the columns are the placements with this end, and otherwise those on CPUs.
    """
    found = read_result("fusion-product")
    every = dict.fromkeys(place for row in found.values() for place in row)
    places = [place for place in every if place.endswith(ON_GPU) == bool(end)]
    sentences: list[str] = []

    def word(cell: dict[str, Any]) -> str:
        if cell["outcome"] != "refused":
            return cell["outcome"]
        sentence = " ".join(cell["sentence"].split())
        if sentence not in sentences:
            sentences.append(sentence)
        return f"refused [{sentences.index(sentence) + 1}]"

    def cell(row: dict[str, Any]) -> str:
        words = {depth: word(row[depth]) for depth in ("rollout", "full") if depth in row}
        if len(words) == 2 and len({*words.values()}) == 1:
            return words["full"]
        return ", ".join(f"{depth}: {text}" for depth, text in words.items())

    rows = [[name, *(cell(row.get(place, {})) for place in places)] for name, row in found.items()]
    notes = [f"{n}. {sentence}" for n, sentence in enumerate(sentences, start=1)]
    heads = [place.removesuffix(end) for place in places]
    return "\n".join([table_of(["", *heads], rows), "", *notes]).rstrip()


OFFERED_SIDES = {
    "cartpole": {
        "gymnasium": "Gymnasium CartPole-v1",
        "single": '`rollmill.to_gymnasium("CartPole-v1")`, a copy at a time',
        "vector": '`rollmill.to_gymnasium("CartPole-v1", 8)`, as one vector',
    },
    "own": {
        "gymnasium": "an environment of one's own, in NumPy for Gymnasium",
        "single": "the same in JAX, by `rollmill.to_gymnasium`, a copy at a time",
        "vector": "the same, as one vector of 8",
    },
}


def offered() -> str:
    """Returns how fast Stable-Baselines3's PPO trains on Gymnasium's environments and ours, and what it learns."""
    rows = [
        [
            OFFERED_SIDES[environment][side],
            *(f"{each[what]['steps_per_second_cpu']:,.0f}" for what in ("training", "stepping")),
            *(
                f"{each[what][f'ratio_{clock}']:.2f}"
                for what in ("training", "stepping")
                for clock in ("cpu", "wall")
            ),
            ", ".join(f"{value:.0f}" for value in each["greedy"]),
        ]
        for environment in OFFERED_SIDES
        if (found := read_result("offered").get(environment))
        for side, each in found["sides"].items()
    ]
    headings = ["trained on", "steps a CPU second", "without learning", "steps / Gymnasium, CPU", "wall",
                "without learning / Gymnasium, CPU", "wall", "greedy policy of each seed"]  # fmt: skip
    return table_of(headings, rows)


def fusion_large() -> str:
    """Returns rates of environments with large arrays in their state, by the fastest kernel and by XLA."""
    rows = []
    for name, each in read_result("fusion-large").items():
        medians = {side: figure["median"] / 1e6 for side, figure in each["steps per second"].items()}
        fastest = max(rate for side, rate in medians.items() if side != "XLA")
        auto = f"{each['auto']['ratio']:.2f} x" if "auto" in each else ""
        rows.append([name, f"{medians['XLA']:.0f}", f"{fastest:.0f}", f"{each['ratio']:.2f} x", auto])
    return table_of(["Environment", "XLA", "kernel", "ratio", "`auto` / `off`"], rows)


def fusion_users() -> str:
    """Returns what becomes of environments as users write them: equal, refused, and how fast."""

    def row(name: str, each: dict[str, Any]) -> list[str]:
        if "refused" in each:
            return [name, "refused"]
        different = each["different"]
        steps = "equal" if not different else f"{different} of {each['steps']} differ"
        return [name, f"{steps}, {each['ratio']:.1f} x XLA" if "ratio" in each else steps]

    found = read_result("fusion-users")
    rows = [row(name.replace("_", " "), each) for name, each in found.items()]
    ratios = [each["ratio"] for each in found.values() if "ratio" in each]
    rows += [["median", f"{statistics.median(ratios):.1f} x XLA"]] if ratios else []
    return table_of(["Environment", "Steps"], rows)


TABLES: dict[str, Callable[[], str]] = {
    **{f"fields of {name}": lambda config=each.config: fields_of(config) for name, each in BUILTIN.items()},
    "fields of a network": lambda: fields_of(NetworkConfig),
    "results of ppo": lambda: placed_study("half-cheetah"),
    "results of a3c": lambda: placed_study("a3c-cartpole", "a3c-defaults"),
    "results of impala": lambda: placed_study("impala-cartpole", "impala-defaults"),
    **{f"results of {name}": lambda name=name: replay_studies(name) for name in ("dqn", "sac", "td3")},
    "learning": learning,
    "defaults": defaults,
    "defaults by environment": defaults_by_environment,
    "defaults over environments": defaults_over_environments,
    "starts": starts,
    "seconds to return": seconds_to_return,
    "robots learning": robots_learning,
    "robots back ends": robots_backends,
    "robots physics": robots_physics,
    "tag learning": tag_learning,
    "strength": strength,
    "self-play": self_play,
    "random play": random_play,
    "distribution": distribution,
    "instances ppo": instances_ppo,
    "instances alphazero": instances_alphazero,
    "robots serving": robots_serving,
    "robots training": robots_training,
    "seeds": seeds,
    "sweeps": sweeps,
    "populations": populations,
    "placements": placements,
    "reductions": reductions,
    "fusion": fusion,
    "fusion study": fusion_study,
    "fusion product": fusion_product,
    "fusion product gpu": lambda: fusion_product(ON_GPU),
    "fusion users": fusion_users,
    "fusion large": fusion_large,
    "profiler errors": profiler_errors,
    "profiler devices": profiler_devices,
    "profiler planted": profiler_planted,
    "profiler survey": profiler_survey,
    "advice": advice,
    "planner": planner,
    "offered": offered,
    "serving cpu": lambda: serving("cpu"),
    "serving gpu": lambda: serving("gpu"),
    "serving workers": lambda: serving("workers-gpu", workers_alone=True),
}


def with_tables(text: str) -> str:
    """Returns the text of a page with all its tables written anew."""
    return MARKED.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n\n{found[3]}", text)


def main() -> None:
    for page in sorted(options(__doc__, docs=DOCS).docs.rglob("*.md")):
        if MARKED.search(text := page.read_text()):
            page.write_text(with_tables(text))
            print(f"wrote the tables in {page}")


if __name__ == "__main__":
    main()

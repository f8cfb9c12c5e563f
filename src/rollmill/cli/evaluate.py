"""The command `rollmill evaluate RUN`, which plays episodes, or a match of a game for two players."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from gymnasium import spaces

from rollmill.cli.parsing import parse
from rollmill.cli.shared_options import PolicyOptions
from rollmill.core.errors import UsageError
from rollmill.core.options import Arg
from rollmill.core.stored_paths import RunPath
from rollmill.core.text import format_count
from rollmill.policies.cross_play import cross_play, environment_with_roles, load_partner, roles_in_turn
from rollmill.policies.environments import environment_of
from rollmill.policies.evaluation import evaluate_rule, evaluate_run
from rollmill.policies.loading import load_weights
from rollmill.policies.matches import load_opponent, match_runs
from rollmill.policies.policy import LoadedRun
from rollmill.policies.rules import names_rule, refuse_for_rule
from rollmill.policies.watching import watch
from rollmill.programs.evaluation.episodes import EvaluationEpisodes
from rollmill.record.run_directory import RunDirectory
from rollmill.runs.saved_run import read_options

FOR_RULES = ("run", "env", "env_options", "transforms", "seed", "imports", "episodes", "record", "json")
"""Options that apply to policies that are functions rather than runs."""


@dataclass(frozen=True)
class Evaluate(PolicyOptions):
    """Play whole episodes with the policy of a run, or a match against another policy."""

    run: Annotated[RunPath, Arg(metavar="RUN", positional=True)]
    """Directory of the run; random, which draws from the legal actions; or FILE.py:FUNCTION, a JAX function
    (key, observation, legal actions) -> action. The latter two play in the environment given by --env."""
    episodes: int = 100
    """Number of episodes to play. A match needs an even number."""
    against: str | None = None
    """Another policy to play against: the directory of a run, or random. In two-player games, it may also be
    lookahead-N, which plays optimally over the next N plies, and with several kinds of agents, MODULE:FUNCTION.
    Of several kinds, the run plays each in turn, and the other policy plays all others."""
    roles: Annotated[tuple[str, ...], Arg(metavar="KIND [KIND ...]")] = ()
    """Kinds of agents that the run plays with --against, instead of each in turn."""
    against_checkpoint: str = "last"
    """Checkpoint of the opponent, if the opponent is a run."""
    opening_plies: int = 0
    """Number of random moves at the beginning of each game of a match. Without them, deterministic policies would
    repeat the same two games."""
    record: Path | None = None
    """Write all transitions of the episodes to this new file, which ends in .npz. `rollmill train --clone FILE`
    imitates them."""
    all_seeds: Annotated[bool, Arg(only_on=True)] = False
    """Evaluate the policy of each training seed of the run, and their mean."""
    watch: bool = False
    """Evaluate every checkpoint of a run as it appears, until the process that trains the run ends."""
    json: bool = False
    """Print the result as JSON."""


def run(arguments: list[str]) -> int:
    """Plays episodes and prints the mean return, or plays a match and prints the score. Returns the exit code."""
    options = parse(Evaluate, arguments, prog="rollmill evaluate")
    if names_rule(options.run):
        result = _rule_episodes(options)
        print(json.dumps(result) if options.json else _sentence(result))
        return 0
    if options.all_seeds:
        _check_all_seeds(options)
        result = _all_seeds(options)
        print(json.dumps(result) if options.json else _seeds_sentences(result))
        return 0
    if options.watch:
        return _watch(options)
    if options.against is not None and options.record is not None:
        raise UsageError("--record writes episodes, but --against plays a match. hint: leave one of them out.")
    if options.against is None and (options.roles or options.against_checkpoint != "last"):
        name = "roles" if options.roles else "against-checkpoint"
        raise UsageError(f"--{name} has no effect without --against. hint: add --against RUN, or leave it out.")
    loaded = options.load()
    if options.against is None:
        result, sentence = _episodes(options, loaded), _sentence
    elif isinstance(loaded.graph.observation_space, spaces.Dict) and _has_roles(options, loaded):
        result, sentence = _cross_play(options, loaded), _cross_play_sentences
    else:
        result, sentence = _match(options, loaded), _match_sentence
    print(json.dumps(result) if options.json else sentence(result))
    return 0


def _episodes(options: Evaluate, loaded: LoadedRun) -> dict[str, Any]:
    episodes = evaluate_run(loaded, episodes=options.episodes, record=options.record, **options.play)
    environment = options.env or loaded.graph.settings["environment"]
    of_seed = {} if loaded.seed is None else {"train_seed": loaded.seed}
    return _result(environment, {"iteration": loaded.iteration, **of_seed}, episodes)


def _check_all_seeds(options: Evaluate) -> None:
    """Rejects options that apply to the policy of one seed."""
    others = {
        "--train-seed": options.train_seed is not None,
        "--against": options.against is not None,
        "--watch": options.watch,
        "--record": options.record is not None,
    }
    if other := next((name for name, is_given in others.items() if is_given), None):
        raise UsageError(
            f"--all-seeds evaluates the policies of all training seeds, but {other} needs a single one. hint: "
            "leave one of them out."
        )


def _all_seeds(options: Evaluate) -> dict[str, Any]:
    """Returns the result of each training seed, with the mean and the standard deviation over seeds."""
    loaded, results = options.load(), []
    for seed in read_options(RunDirectory.open(options.run)).seeds:
        source = {**options.source, "seed": seed, "algorithm": loaded.graph}
        of_seed = load_weights(options.run, checkpoint=options.checkpoint, **source)
        results.append({**_episodes(options, of_seed), "train_seed": seed})
    means = [result["mean_return"] for result in results]
    return {
        "environment": results[0]["environment"],
        "iteration": loaded.iteration,
        "mean_return": float(np.mean(means)),
        "std_over_seeds": float(np.std(means)),
        "seeds": results,
    }


def _seeds_sentences(result: dict[str, Any]) -> str:
    """Returns a line for each seed, and a line with their mean."""
    count = format_count(len(result["seeds"]), "training seed")
    mean = f"{result['mean_return']:.5g} (std over seeds {result['std_over_seeds']:.4g})"
    return "\n".join([*map(_sentence, result["seeds"]), f"{count}: mean return {mean}"])


def _rule_episodes(options: Evaluate) -> dict[str, Any]:
    """Returns the result of a policy that does not come from a run."""
    defaults = {field.name: field.default for field in fields(Evaluate) if field.name not in FOR_RULES}
    about_runs = [name for name, default in defaults.items() if getattr(options, name) != default]
    refuse_for_rule(options.run, [f"--{name.replace('_', '-')}" for name in about_runs])
    episodes = evaluate_rule(
        options.run,
        episodes=options.episodes,
        seed=options.seed,
        imports=options.imports,
        record=options.record,
        **options.environment,
    )
    assert options.env is not None
    return _result(options.env, {"policy": str(options.run)}, episodes)


def _watch(options: Evaluate) -> int:
    """Prints a line for each checkpoint, and appends it to the evaluations of the run."""
    _check_watch(options)
    run = RunDirectory.open(options.run)
    environment = options.env or run.read_config()["graph"]["environment"]
    settings = {"seed": options.seed, "train_seed": options.train_seed, "stochastic": options.stochastic}
    checkpoints = watch(
        options.run,
        episodes=options.episodes,
        imports=options.imports,
        trust=options.trust,
        **options.environment,
        **settings,
    )
    for iteration, episodes in checkpoints:
        result = _result(environment, {"iteration": iteration}, episodes)
        print(json.dumps(result) if options.json else _sentence(result), flush=True)
        run.append_evaluation({**result, **settings})
    return 0


def _check_watch(options: Evaluate) -> None:
    """Rejects options that have no effect on an evaluation of every checkpoint."""
    if options.checkpoint != "last":
        raise UsageError(
            "--watch evaluates every checkpoint, so it cannot be combined with --checkpoint "
            f"{options.checkpoint}. hint: leave out one of them."
        )
    if options.against is not None:
        raise UsageError(
            "--watch cannot be combined with --against. hint: run --against once per --checkpoint, without "
            "--watch."
        )
    if options.record is not None:
        raise UsageError(
            "--record writes the episodes of one policy, but --watch evaluates several. hint: leave one of them "
            "out."
        )
    if options.env is None and (options.env_options or options.transforms):
        raise UsageError(
            "--env-option and --transform have no effect without --env, because evaluations in the run's own "
            "environment keep the options of the training. hint: add --env ID."
        )


def _result(environment: str, policy: dict[str, Any], episodes: EvaluationEpisodes) -> dict[str, Any]:
    returns, lengths = episodes.returns, episodes.lengths
    of_kinds = {kind: float(np.mean(own, dtype=np.float64)) for kind, own in episodes.agent_returns.items()}
    return {
        "environment": environment,
        **policy,
        "episodes": returns.size,
        "mean_return": float(np.mean(returns, dtype=np.float64)),
        "std_return": float(np.std(returns, dtype=np.float64)),
        "min_return": float(np.min(returns)),
        "max_return": float(np.max(returns)),
        "mean_length": float(np.mean(lengths)),
        **({"mean_returns": of_kinds, "std_returns": _deviations(episodes.agent_returns)} if of_kinds else {}),
    }


def _deviations(agent_returns: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Returns the standard deviation over episodes of the mean return of each agent kind."""
    return {kind: float(np.std(own, dtype=np.float64)) for kind, own in agent_returns.items()}


def _has_roles(options: Evaluate, loaded: LoadedRun) -> bool:
    """Returns whether two policies may share the environment as different kinds of agents."""
    return bool(environment_of(loaded, *options.environment.values()).agents)


def _cross_play(options: Evaluate, loaded: LoadedRun) -> dict[str, Any]:
    assert options.against is not None
    if options.opening_plies:
        raise UsageError(
            f"--opening-plies {options.opening_plies} applies only to two-player games. hint: leave it out."
        )
    env = environment_with_roles(loaded, *options.environment.values())
    rounds = roles_in_turn(env, options.roles)
    partner = load_partner(options.against, checkpoint=options.against_checkpoint, **options.source)
    play = {"episodes": options.episodes, "seed": options.seed, "stochastic": options.stochastic}
    kinds = [kind.name for kind in env.agents]
    played = []
    for roles in rounds:
        found = cross_play(loaded, partner, roles=roles, env=env, **play)
        others = [name for name in kinds if name not in roles]
        returns = {name: found.agent_returns[name] for name in kinds}
        played.append(
            {
                "roles": list(roles),
                "roles_of_other": others,
                "mean_returns": {name: float(np.mean(own, dtype=np.float64)) for name, own in returns.items()},
                "std_returns": _deviations(returns),
                "mean_length": float(np.mean(found.lengths)),
            }
        )
    return {
        "environment": env.name,
        "run": str(options.run),
        "iteration": loaded.iteration,
        "against": options.against,
        "against_iteration": partner.iteration if isinstance(partner, LoadedRun) else None,
        "episodes": options.episodes,
        "cross_play": played,
    }


def _cross_play_sentences(result: dict[str, Any]) -> str:
    """Returns a heading, and a line for each round."""
    own = f"{result['run']} (iteration {result['iteration']})"
    other = result["against"]
    if result["against_iteration"] is not None:
        other += f" (iteration {result['against_iteration']})"
    lines = [f"{result['environment']}, {format_count(result['episodes'], 'episode')} each: {own} and {other}"]
    for played in result["cross_play"]:
        sides = {result["run"]: played["roles"], result["against"]: played["roles_of_other"]}
        if len(sides) == 1:
            sides = {
                f"iteration {result['iteration']}": played["roles"],
                f"iteration {result['against_iteration']}": played["roles_of_other"],
            }
        whose = ", ".join(f"{' and '.join(kinds)} by {name}" for name, kinds in sides.items())
        lines.append(f"  {whose}: mean return {_of_kinds(played)}; mean length {played['mean_length']:.5g}")
    return "\n".join(lines)


def _match(options: Evaluate, loaded: LoadedRun) -> dict[str, Any]:
    assert options.against is not None
    if options.roles:
        raise UsageError(
            f"--roles {' '.join(options.roles)} applies only to environments with several kinds of agents. "
            "hint: leave it out."
        )
    opponent = load_opponent(options.against, checkpoint=options.against_checkpoint, **options.source)
    found = match_runs(
        loaded, opponent, games=options.episodes, opening_plies=options.opening_plies, **options.play
    )
    return {
        "environment": options.env or loaded.graph.settings["environment"],
        "iteration": loaded.iteration,
        "against": options.against,
        "against_iteration": None if isinstance(opponent, str) else opponent.iteration,
        "games": options.episodes,
        "moving_first": _counts(found.moving_first),
        "moving_second": _counts(found.moving_second),
        "score": found.score,
        "standard_error": found.standard_error,
        "elo": found.elo if math.isfinite(found.elo) else None,
    }


def _counts(results: np.ndarray) -> dict[str, int]:
    return {name: int(np.sum(results == sign)) for name, sign in (("won", 1), ("drawn", 0), ("lost", -1))}


def _match_sentence(result: dict[str, Any]) -> str:
    sides = [
        f"{side.removeprefix('moving_')} {counts['won']} won, {counts['drawn']} drawn, {counts['lost']} lost"
        for side, counts in result.items()
        if side.startswith("moving_")
    ]
    against = result["against"]
    if result["against_iteration"] is not None:
        against += f" (iteration {result['against_iteration']})"
    elo = "" if result["elo"] is None else f", Elo {result['elo']:+.0f}"
    return (
        f"{result['environment']}, {format_count(result['games'], 'game')}, iteration {result['iteration']} "
        f"against {against}: score {result['score']:.3f} (standard error {result['standard_error']:.2g}){elo}; "
        f"moving {'; '.join(sides)}"
    )


def _sentence(result: dict) -> str:
    policy = result["policy"] if "policy" in result else f"iteration {result['iteration']}"
    policy += f", training seed {result['train_seed']}" if "train_seed" in result else ""
    kinds = len(result.get("mean_returns", {}))
    if kinds > 1:  # the returns of opponents cancel out, so the spread of their mean says little
        returns = f"{_of_kinds(result)}, all agents {result['mean_return']:.5g}"
    else:
        returns = (
            f"{result['mean_return']:.5g}{' over all agents' if kinds else ''} (std {result['std_return']:.4g}, "
            f"min {result['min_return']:.5g}, max {result['max_return']:.5g})"
        )
    return (
        f"{result['environment']}, {format_count(result['episodes'], 'episode')}, {policy}: "
        f"mean return {returns}, mean length {result['mean_length']:.5g}"
    )


def _of_kinds(result: Mapping[str, Any]) -> str:
    """Formats the mean return of each agent kind with its standard deviation."""
    deviations = result["std_returns"]
    return ", ".join(
        f"{kind} {mean:.5g} (std {deviations[kind]:.4g})" for kind, mean in result["mean_returns"].items()
    )

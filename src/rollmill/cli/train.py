"""The command `rollmill train ALGORITHM ENVIRONMENT`, which trains a policy."""

from collections.abc import Mapping

from rollmill.cli.help import two_columns
from rollmill.cli.parsing import HELP
from rollmill.cli.plan_search_options import request_with_plan, with_physics
from rollmill.cli.requests import parse_training
from rollmill.core.membership import HOSTS, Membership, read_membership
from rollmill.core.plugins import plugins
from rollmill.gpus.activity import Activity
from rollmill.record.display import Lines
from rollmill.record.run_directory import RunDirectory
from rollmill.runs.algorithms import ALGORITHMS
from rollmill.training.request import train_request
from rollmill.training.training import Run


def run(arguments: list[str]) -> int:
    """Trains a policy, and prints the run directory. Returns the exit code."""
    if not arguments or arguments[0] in HELP:
        print(usage("train"))
        return 0 if arguments else 2
    parsed = parse_training(arguments)
    if parsed.request.settings.get("cluster") == HOSTS and (member := read_membership()).rank:
        return serve(member)
    with request_with_plan(with_physics(parsed.request, parsed.searching), parsed.searching) as request:
        return report(train_request(request))


def serve(member: Membership) -> int:
    """Serves as a worker host for a run that another process of the same job started, until that run ends."""
    from rollmill.processes.hosts.agent import serve_host  # imported here, because other runs do not need it

    return serve_host(member, Lines().note)


def report(run: Run) -> int:
    """Prints the directory of a run and how to use it, and returns the exit code."""
    summary = run.summary
    if summary["status"] == "finished" or "stop_reason" in summary:
        final = summary["final_return"]
        print(
            f"{summary['total_env_steps']:,} steps in {summary['seconds']:.1f} s "
            f"({summary['steps_per_second']:,.0f} steps/s), compiled in {summary['compile_seconds']:.1f} s, "
            f"{'no episode ended' if final is None else _final(final, summary.get('final_returns', {}))}"
        )
        for gpu in summary.get("gpus", ()):
            activity = Activity(**{name: value for name, value in gpu.items() if name != "gpu"})
            print(f"GPU {gpu['gpu']}, all of its processes: {activity}")
        if (evaluated := summary.get("evaluation_return")) is not None:
            of_kind = f" of {summary['return_of']}" if "return_of" in summary else ""
            print(f"last evaluation{of_kind} {evaluated:.4g}, best {summary['best_evaluation_return']:.4g}")
        print(f"run: {run.directory}")
        print(f"evaluate it: {RunDirectory(run.directory).command('evaluate')}")
    return run.exit_code


def _final(mean: float, returns: Mapping[str, float]) -> str:
    """Formats the final return, or the final returns of all agent kinds."""
    each = ", ".join(f"{name} {value:.4g}" for name, value in returns.items())
    return f"final returns {each} ({mean:.4g} over all agents)" if each else f"final return {mean:.4g}"


def usage(command: str) -> str:
    """Returns the usage text of a command that accepts the options of `rollmill train`."""
    offered = [(plugin.name, f"of the package {plugin.package}") for plugin in plugins("algorithm")]
    rows = [*((name, algorithm.summary) for name, algorithm in ALGORITHMS.items()), *offered]
    head = [f"usage: rollmill {command} ALGORITHM ENVIRONMENT [OPTIONS]", "", "algorithms:"]
    more = [f"`rollmill {command} ALGORITHM --help` describes its options,", "`rollmill list` the environments."]
    return "\n".join([*head, *two_columns(rows), "", *more])

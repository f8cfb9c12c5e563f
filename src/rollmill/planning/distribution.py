"""Distribution policies: functions from counts to a partition.

The policy `single-learner-coarse` is the function `single_learner_coarse`, and `my_module:my_policy` a function of
your own with the same signature. `rollmill plan` describes a policy by the first line of its docstring.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from rollmill.core.errors import UsageError, unknown_name
from rollmill.core.imports import ImportRefused, import_named
from rollmill.core.user_frame import failed_import, user_frame
from rollmill.dataflow import FRAGMENTS, Group, Partition
from rollmill.planning.placement import Counts, only_synchronous

DistributionPolicy: TypeAlias = Callable[[Counts], Partition]


def central(counts: Counts) -> Partition:
    """Lets actors compute the gradients of their own rollouts, and one process apply them (A3C, if asynchronous).

    `{environment, policy, gradients} x actors, {update} x 1`.
    """
    return Partition(
        "central",
        (
            Group(
                "actor",
                ("environment", "policy", "gradients"),
                counts.actors,
                synchronous=not counts.asynchronous,
            ),
            Group("update", ("update",)),
        ),
    )


def environments(counts: Counts) -> Partition:
    """Places environments, policies and learners in separate groups, each with its own number of replicas.

    `{environment} x workers, {policy} x actors, {gradients, update} x learners`.
    """
    return Partition(
        "environments",
        (
            Group("environment", ("environment",), counts.workers, device="cpu"),
            Group("policy", ("policy",), counts.actors, synchronous=not counts.asynchronous),
            Group("learner", ("gradients", "update"), counts.learners),
        ),
    )


def gpu_only(counts: Counts) -> Partition:
    """Places all four fragments together, on one device or process per learner.

    `{environment, policy, gradients, update} x learners`.
    """
    only_synchronous(counts, "gpu-only")
    return Partition("gpu-only", (Group("all", FRAGMENTS, counts.learners),))


def multi_learner(counts: Counts) -> Partition:
    """Places environments on CPU workers, and everything else in several learners that average their gradients.

    `{environment} x workers, {policy, gradients, update} x learners`, gradients reduced.
    """
    only_synchronous(counts, "multi-learner")
    return Partition(
        "multi-learner",
        (
            Group("environment", ("environment",), counts.workers, device="cpu"),
            Group("learner", ("policy", "gradients", "update"), counts.learners),
        ),
    )


def single_learner_coarse(counts: Counts) -> Partition:
    """Lets actors collect whole rollouts, from which one learner learns (IMPALA, if asynchronous).

    `{environment, policy} x actors, {gradients, update} x 1`.
    """
    return Partition(
        "single-learner-coarse",
        (
            Group(
                "actor",
                ("environment", "policy"),
                counts.actors,
                device=counts.actors_on,
                synchronous=not counts.asynchronous,
            ),
            Group("learner", ("gradients", "update")),
        ),
    )


def single_learner_fine(counts: Counts) -> Partition:
    """Places environments on CPU workers, and one learner that acts and learns from their experience.

    `{environment} x workers, {policy, gradients, update} x 1`.
    """
    only_synchronous(counts, "single-learner-fine")
    return Partition(
        "single-learner-fine",
        (
            Group("environment", ("environment",), counts.workers, device="cpu"),
            Group("learner", ("policy", "gradients", "update")),
        ),
    )


_POLICIES: dict[str, DistributionPolicy] = {
    "central": central,
    "environments": environments,
    "gpu-only": gpu_only,
    "multi-learner": multi_learner,
    "single-learner-coarse": single_learner_coarse,
    "single-learner-fine": single_learner_fine,
}


def list_distributions() -> dict[str, str]:
    """Returns the names of the built-in distribution policies, with their descriptions."""
    return {name: (policy.__doc__ or "").partition("\n")[0] for name, policy in _POLICIES.items()}


def distributions_with(count: str) -> list[str]:
    """Returns the built-in distribution policies that read a field of `Counts`, such as `workers`."""
    names = []
    for name, policy in _POLICIES.items():
        counts = Counts()
        policy(counts)
        if count in counts.used:
            names.append(name)
    return names


def find_distribution(name: str) -> DistributionPolicy:
    """Returns the distribution policy `name`. Raises a `UsageError` if there is no such policy."""
    if ":" in name:
        return _load_function(name)
    if name not in _POLICIES:
        raise unknown_name(
            "distribution policy",
            name,
            list_distributions(),
            hint="For a function of your own, use module:function.",
        )
    return _POLICIES[name]


def _load_function(name: str) -> DistributionPolicy:
    module, _, function = name.partition(":")
    try:
        found: Any = getattr(import_named(module), function, None)
    except ImportRefused:
        raise
    except Exception as error:  # the user's module can raise anything
        raise UsageError(f"distribution {name!r}: {failed_import(module, error)}") from error
    if not callable(found):
        raise UsageError(f"distribution {name!r}: {module} has no function {function!r}.")
    return partial(_call_policy, name, found)


def _call_policy(name: str, policy: Callable[[Counts], Any], counts: Counts) -> Partition:
    try:
        found = policy(counts)
    except ImportRefused:
        raise
    except Exception as error:  # the user's function can raise anything
        raise UsageError(
            f"distribution {name!r} raised {type(error).__name__}: {error}, at {user_frame(error)}. It is called "
            "with the requested counts and must return a Partition."
        ) from error
    if not isinstance(found, Partition):
        raise UsageError(f"distribution {name!r} must return a Partition, got {type(found).__name__}.")
    if not _has_groups(found):
        raise UsageError(
            f"distribution {name!r} returned a Partition with groups={found.groups!r}, expected a tuple of Groups."
        )
    return found


def _has_groups(partition: Partition) -> bool:
    groups: Any = partition.groups
    return isinstance(groups, tuple) and bool(groups) and all(isinstance(group, Group) for group in groups)

"""Policies that are functions instead of trained runs: heuristics for comparison, and random play."""

import re
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from rollmill.algorithms import environment_functions
from rollmill.algorithms.environment_fragments import host_functions
from rollmill.core.contracts import Call, check_signature
from rollmill.core.errors import ContractError, UsageError
from rollmill.core.imports import ImportRefused, function_of_file, import_named
from rollmill.core.spaces import struct
from rollmill.core.types import Action, Environment, HostEnvironment, Key, Memory, Observation
from rollmill.core.user_frame import attribute_to_user_code, failed_import
from rollmill.dataflow import ActionMask, Decision, Graph, Loops
from rollmill.envs import random_action

Rule: TypeAlias = Callable[[Key, Observation, ActionMask], Action]
"""A JAX function `(key, observation, legal actions) -> action` of ONE environment. The legal actions are `()` if
all actions are legal."""

_CALL = Call(("key", "observation", "legal_actions"))
RANDOM = "random"
_FUNCTION = re.compile(r"(?:[^\W\d][\w.]*|.*\.py):[^\W\d]\w*")


def names_rule(policy: str | PathLike[str]) -> bool:
    """Returns whether a string specifies a function policy, as `random`, `MODULE:FUNCTION` or `FILE.py:FUNCTION`.

    A string that is also the path of an existing file or directory does not.
    """
    text = str(policy)
    return (text == RANDOM or _FUNCTION.fullmatch(text) is not None) and not Path(policy).exists()


def shown_rule(policy: str | PathLike[str] | Rule) -> str:
    """Formats a function policy for messages: the name of the function, or the string that specifies it."""
    return getattr(policy, "__name__", str(policy))


def refuse_for_rule(policy: str | PathLike[str] | Rule, names: Sequence[str]) -> None:
    """Raises a `UsageError` if arguments that only apply to runs were given for a function policy.

    `names` are the given arguments, as the user writes them.
    """
    for name in names:
        raise UsageError(
            f"{name} applies only to the policy of a run, not to {shown_rule(policy)}. hint: leave it out."
        )


def find_rule(policy: str | PathLike[str] | Rule, env: Environment | HostEnvironment) -> Rule:
    """Finds the function of a policy, given as a function, as `MODULE:FUNCTION`, as `FILE.py:FUNCTION`, or as
    `random`, which samples legal actions.

    Raises a `UsageError` if the module cannot be imported, or has no such function, and a `ContractError` if the
    function takes other arguments.
    """
    if callable(policy):
        check_signature(f"the policy {shown_rule(policy)}", policy, _CALL)
        return policy
    if str(policy) == RANDOM:
        return lambda key, observation, mask: random_action(key, env, mask)
    module, _, name = function_of_file(str(policy)).partition(":")
    try:
        found = getattr(import_named(module), name, None)
    except ImportRefused:
        raise
    except Exception as error:  # the user's module can raise anything
        raise UsageError(failed_import(module, error)) from error
    if not callable(found):
        raise UsageError(f"{module} has no function {name!r}.")
    check_signature(f"the policy {policy}", found, _CALL)
    return found


def graph_of_rule(rule: Rule, env: Environment | HostEnvironment) -> Graph:
    """Returns a graph whose policy is a function. The graph can play the environment, but cannot learn."""
    functions = host_functions(env) if isinstance(env, HostEnvironment) else environment_functions(env, num_envs=1)

    def decide(
        weights: PyTree, key: Key, memory: Memory, observation: Observation, action_mask: ActionMask
    ) -> Decision:
        with attribute_to_user_code("the policy"):
            action = rule(key, observation, action_mask)
        return Decision(_fit(action, env), memory, ())

    return Graph(
        settings={"environment": env.name},
        observation_space=env.observation_space,
        action_space=env.action_space,
        loops=Loops(
            1, num_envs=1, num_steps=1, epochs=1, num_minibatches=1, num_shards=1, minibatch_items="samples"
        ),
        environment=functions.step,
        policy=decide,
        gradients=_cannot_learn,
        update=_cannot_learn,
        start_environment=functions.start,
        start_memory=lambda: (),
        start_learner=lambda key: (),
        action_mask=functions.action_mask,
        weights=lambda learner: (),
        prepare=_cannot_learn,
        condition=_cannot_learn,
        greedy=decide,
        host=env.start if isinstance(env, HostEnvironment) else None,
    )


def _cannot_learn(*arguments: Any, **named: Any) -> Any:
    raise UsageError("this policy is a function, which cannot learn.")


def _fit(action: Any, env: Environment | HostEnvironment) -> Action:
    """Returns the action with the types of the action space."""
    expected = struct(env.action_space)
    found = jax.tree.map(jnp.asarray, action)
    if jax.tree.structure(found) != jax.tree.structure(expected) or not all(
        jax.tree.leaves(jax.tree.map(_fits, found, expected))
    ):
        raise ContractError(
            f"the policy returned {_describe(found)}, expected an action of {env.name}, {_describe(expected)}."
        )
    return jax.tree.map(lambda leaf, kind: leaf.astype(kind.dtype), found, expected)


def _fits(found: Array, expected: jax.ShapeDtypeStruct) -> bool:
    same_kind = jnp.issubdtype(found.dtype, jnp.inexact) <= jnp.issubdtype(expected.dtype, jnp.inexact)
    return found.shape == expected.shape and same_kind


def _describe(tree: PyTree) -> str:
    return str(jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", tree)).replace("'", "")

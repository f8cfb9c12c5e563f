"""Manages the copies of a host environment in one process: creates them when needed, and drops them on exceptions.

The seed of a copy depends on its global index, not on its process.

Shape letter: `n` environments.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np

from rollmill.core.errors import ContractError, EnvironmentFailed
from rollmill.core.types import HostFailure
from rollmill.core.user_frame import user_frame
from rollmill.envs.host.numbers import CastError

NUM_SEEDS = 2**31
"""Upper bound of seeds: environments in C++ take signed 32-bit integers."""

EVALUATION = 2**32
"""Value of `generation` for environments in which a policy is evaluated. No start in training has this value."""


def environment_seed(root: int, index: int, *, generation: int = 0, attempt: int = 0) -> int:
    """Returns the seed of one copy of a host environment.

    Copies with different indices have different seeds, even if all other arguments are equal.

    Args:
        root: seed of the run, at least 0.
        index: global index of the environment.
        generation: how many times its process was started before, or `EVALUATION`.
        attempt: how many times the environment was replaced in that process.
    """
    base = np.random.SeedSequence((root, generation, attempt)).generate_state(1)
    return (int(base[0]) + index) % NUM_SEEDS


MAX_FAILURES = 5
"""Number of failures in a row, without a complete step in between, that raise a `ContractError`."""


@runtime_checkable
class CopiedObject(Protocol):
    """Protocol of one copy of a host environment, which can be closed."""

    def close(self) -> object:
        """Frees all resources of the object."""
        ...


Single = TypeVar("Single", bound=CopiedObject)


class Copies(Generic[Single]):
    """Copies of a host environment, with seeds that depend on their global indices.

    `make` returns a new object at each call. A copy that raises an exception is replaced, with another seed.
    """

    def __init__(
        self, name: str, make: Callable[[], Single], indices: Sequence[int], *, seed: int, generation: int
    ) -> None:
        self._name, self._make, self._indices = name, make, tuple(indices)
        self._root, self._generation = seed, generation
        self._attempts = [0] * len(self._indices)
        self._failures: list[HostFailure] = []
        self._clock = 0
        self._strikes = [(0, 0)] * len(self._indices)
        """For each environment, the step of its last failure, and the number of failures in a row."""
        self.objects: list[Single | None] = [None] * len(self._indices)
        """The copies. An entry is None if no copy has been created yet, or if the last copy raised an
        exception."""

    def index(self, i: int) -> int:
        """Returns the global index of environment `i` of this process."""
        return self._indices[i]

    def seed(self, i: int) -> int:
        """Returns the seed of environment `i` of this process."""
        return environment_seed(
            self._root, self._indices[i], generation=self._generation, attempt=self._attempts[i]
        )

    def tick(self) -> None:
        """Counts one step of all environments, so that failures can be related to steps."""
        self._clock += 1

    def begin_episode(self, i: int, reset: Callable[[Single, int | None], None]) -> None:
        """Resets environment `i`, after creating it if necessary, and retries until a reset succeeds.

        `reset` resets one object, with a seed if the object is new, and stores its first observation. Raises a
        `ContractError` after too many failures in a row, and `EnvironmentFailed` if the object tried to exit the
        program.
        """
        while True:
            doing = "reset"
            try:
                single, seed = self.objects[i], None
                if single is None:
                    doing, seed = "make", self.seed(i)
                    single = self.objects[i] = self._make()
                doing = "reset"
                return reset(single, seed)
            except (Exception, SystemExit) as error:
                self.fail(i, doing, error)

    def fail(self, i: int, doing: str, error: Exception | SystemExit) -> None:
        """Records that environment `i` raised an exception, and drops it.

        Raises a `ContractError` after too many failures in a row, or if the environment returned a number that its
        space cannot hold, and `EnvironmentFailed` if the environment tried to exit the program.
        """
        who = f"{self._name}: environment {self._indices[i]}, whose seed is {self.seed(i)},"
        if isinstance(error, CastError):
            raise CastError(f"{who} in its {doing}: {error}") from error
        if isinstance(error, SystemExit):
            raise _error_of_exit(f"{who} exited in its {doing}", error) from error
        text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        failure = HostFailure(self._indices[i], doing, text, user_frame(error), self.seed(i))
        self._failures.append(failure)
        self._close(i)
        self._attempts[i] += 1
        last_step, count = self._strikes[i]
        count = count + 1 if last_step >= self._clock - 1 else 1
        self._strikes[i] = (self._clock, count)
        if count >= MAX_FAILURES:
            raise ContractError(
                f"{self._name}: environment {failure.index} failed {count} times in a row, most recently in its "
                f"{failure.doing}: {failure.error}\n  at {failure.line}"
            ) from error

    def drain_failures(self) -> list[HostFailure]:
        """Returns the failures of environments since the last call, in order."""
        drained, self._failures = self._failures, []
        return drained

    def close(self) -> None:
        """Closes all copies of the environment."""
        for i in range(len(self.objects)):
            self._close(i)

    def _close(self, i: int) -> None:
        single, self.objects[i] = self.objects[i], None
        if single is not None:
            close_quietly(single)


def close_quietly(single: Any) -> None:
    """Closes an environment, and ignores exceptions that it raises."""
    with contextlib.suppress(Exception, SystemExit):
        single.close()


def _error_of_exit(what: str, error: SystemExit) -> EnvironmentFailed:
    return EnvironmentFailed(
        f"{what}, by sys.exit({'' if error.code is None else repr(error.code)})\n  at {user_frame(error)}\nhint: "
        "an environment must not end the program. Let it end its episode (terminated), or raise another "
        "exception, after which another copy replaces it."
    )

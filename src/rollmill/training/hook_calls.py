"""Calls the hooks of a run with its events, and collects their requests."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rollmill.core.errors import RollmillError, UsageError
from rollmill.core.user_frame import user_frame
from rollmill.hooks import Checkpoint, Hook, Stop, TrainingEvent, hook_name


class HookFailed(RollmillError):
    """Raised if a hook raised an error or returned an invalid result. Training has then stopped with a
    checkpoint.
    """

    exit_code = 1


class StopByHook(NamedTuple):
    """A hook's request to stop the run, with the hook's name."""

    hook: str
    """Name of the hook."""
    reason: str


class HookCalls:
    """Calls the hooks of a run in order. `note` prints a line to the user."""

    def __init__(self, hooks: Sequence[Hook], note: Callable[[str], None]) -> None:
        self._hooks, self._note = list(hooks), note
        self.stop: StopByHook | None = None
        """The first request to stop."""
        self.failure: HookFailed | None = None
        """The error of the first hook that failed."""
        self.exit: SystemExit | None = None
        """First exit of the program requested by a hook. It is carried out after the state is saved."""
        self.wants_checkpoint = False
        """Whether a checkpoint was requested. Cleared when one is saved."""

    @property
    def stopping(self) -> bool:
        """True if training must stop, because a hook requested it or failed."""
        return not (self.stop is None and self.failure is None and self.exit is None)

    def emit(self, event: TrainingEvent) -> None:
        """Calls each hook with an event. A hook that fails is not called again."""
        for hook in tuple(self._hooks):
            try:
                self._apply_answer(hook, hook(event))
            except SystemExit as ended:
                self._hooks.remove(hook)
                self.exit = self.exit or ended
            except Exception as error:  # a hook may raise anything, and the training state must survive
                self._hooks.remove(hook)
                self._fail(hook, event, error)

    def _apply_answer(self, hook: Hook, answer: Any) -> None:
        match answer:
            case None:
                return
            case Stop(reason):
                self.stop = self.stop or StopByHook(hook_name(hook), reason)
            case Checkpoint():
                self.wants_checkpoint = True
            case _:
                hint = (
                    (f"hint: pass the result of calling it, hooks=[{hook_name(hook)}(...)]. ")
                    if callable(answer)
                    else ""
                )
                raise UsageError(
                    f"the hook returned {answer!r:.60} of type {type(answer).__name__}. {hint}A hook must "
                    'return None, rollmill.Stop("reason") or rollmill.Checkpoint().'
                )

    def _fail(self, hook: Hook, event: TrainingEvent, error: Exception) -> None:
        kind = type(event).__name__
        what = str(error) if isinstance(error, RollmillError) else f"{type(error).__name__}: {error}"
        where = "" if isinstance(error, RollmillError) else f"\n  at {user_frame(error)}"
        failure = HookFailed(f"the hook {hook_name(hook)} failed at {kind}: {what}{where}")
        failure.__cause__ = error
        if self.failure is None:
            self.failure = failure
        else:
            self._note(str(failure))


def check_hooks(hooks: Any) -> tuple[Hook, ...]:
    """Returns the hooks if all of them are callable. Raises a `UsageError` otherwise."""
    if isinstance(hooks, str) or not isinstance(hooks, Sequence):
        raise UsageError(
            f"hooks={hooks!r:.60} must be a list of functions that take an event. hint: pass hooks=[my_hook]."
        )
    for hook in hooks:
        if isinstance(hook, type) or not callable(hook):
            raise UsageError(
                f"hooks contains {hook!r:.60}, which is not a function that takes an event. hint: pass "
                "hooks=[my_hook]."
            )
    return tuple(hooks)

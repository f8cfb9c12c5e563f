"""Reads requests for actions: checks JSON bodies against the policy's spaces, and converts them to arrays.

Shape letter: `N` observations of one request.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import msgspec
import numpy as np
from gymnasium import spaces
from jaxtyping import PyTree

from rollmill.core.spaces import possible_choices, struct, unsupported_space
from rollmill.serving.responses import Refusal

UNSET: Any = msgspec.UNSET


class ActRequest(NamedTuple):
    """A request for actions, for one or several observations."""

    observation: PyTree[np.ndarray]
    """Observations, with leaves `[N, ...]`."""
    mask: PyTree[np.ndarray]
    """Action masks with leaves `[N, ...]`, or `()` if the environment has no masks."""
    sessions: Sequence[str | None]
    """Session names of the `N` observations, for a recurrent policy. None begins a new session."""
    restart: bool
    """True if the observations begin new episodes in their sessions."""
    single: bool
    """True if the request asks for one action, and not for a list."""

    @property
    def rows(self) -> int:
        """Number of observations in the request."""
        return len(self.sessions)


class RequestSchema(NamedTuple):
    """The form of the requests that a served policy can answer."""

    observation_space: spaces.Space
    action_space: spaces.Space
    mask_struct: PyTree[jax.ShapeDtypeStruct]
    """Shape of the action mask of one observation, or `()` without masks."""
    recurrent: bool
    """True if the policy is recurrent, so that requests belong to sessions."""
    max_batch: int
    """Maximum number of observations in a request."""


class ActRequestReader:
    """Reads the bodies of `POST /act` according to the policy's schema."""

    def __init__(self, schema: RequestSchema) -> None:
        self._schema = schema
        observation, mask = _json_type(schema.observation_space), _mask_type(schema.mask_struct)
        fields: list[tuple[str, Any, Any]] = [
            ("observation", observation | msgspec.UnsetType, UNSET),
            ("observations", list[observation] | msgspec.UnsetType, UNSET),
        ]
        if mask is not None:
            fields += [
                ("action_mask", mask | msgspec.UnsetType, UNSET),
                ("action_masks", list[mask] | msgspec.UnsetType, UNSET),
            ]
        if schema.recurrent:
            fields += [("session", str | None, None), ("sessions", list[str | None] | None, None)]
            fields += [("restart", bool, False)]
        self._body = msgspec.json.Decoder(msgspec.defstruct("ActBody", fields, forbid_unknown_fields=True))

    def __call__(self, body: bytes) -> ActRequest:
        """Returns the request in a body.

        Refuses other JSON, fields and shapes, and values that the policy cannot take.
        """
        document = self._parse(body)
        single = document.observations is UNSET
        if single == (document.observation is UNSET):
            raise Refusal(
                400, "the body must contain either `observation`, for one action, or `observations`, a list."
            )
        given = [document.observation] if single else document.observations
        name = "observation" if single else "observations"
        if not 1 <= len(given) <= self._schema.max_batch:
            raise Refusal(
                413 if given else 400,
                f"`observations` has {len(given)} entries, expected between 1 and {self._schema.max_batch}.",
            )
        observation = _array(self._schema.observation_space, given, name)
        sessions = _sessions(document, single, len(given)) if self._schema.recurrent else [None] * len(given)
        restart = document.restart if self._schema.recurrent else False
        return ActRequest(observation, self._mask(document, single, len(given)), sessions, restart, single)

    def _parse(self, body: bytes) -> Any:
        try:
            return self._body.decode(body)
        except msgspec.ValidationError as error:
            raise Refusal(400, f"the body does not match the policy: {_uncapitalise(error)}.") from None
        except (msgspec.DecodeError, RecursionError, ValueError) as error:
            reason = _uncapitalise(str(error).removeprefix("JSON is malformed: "))
            raise Refusal(400, f"the body is not valid JSON: {reason}.") from None

    def _mask(self, document: Any, single: bool, count: int) -> PyTree[np.ndarray]:
        """Returns the legal actions, or all actions if none are given."""
        expected = self._schema.mask_struct
        if isinstance(expected, tuple):
            return ()
        name, other = ("action_mask", "action_masks") if single else ("action_masks", "action_mask")
        given = getattr(document, name)
        if getattr(document, other) is not UNSET:
            raise Refusal(
                400, f"`{other}` cannot be combined with `{'observation' if single else 'observations'}`."
            )
        if given is UNSET:
            return _over(expected, lambda leaf, _, __: np.ones((count, *leaf.shape), bool), (), name)
        given = [given] if single else given
        if len(given) != count:
            raise Refusal(
                400, f"`{name}` has {len(given)} entries, expected one for each of {count} observations."
            )
        mask = _over(expected, lambda leaf, value, path: _bools(leaf.shape, value, path), given, name)
        choices = possible_choices(self._schema.action_space)
        if choices is not None and not np.any(mask & choices, axis=-1).all():
            raise Refusal(400, f"`{name}` leaves no legal action.")
        return mask


def _sessions(document: Any, single: bool, count: int) -> Sequence[str | None]:
    names = [document.session] if single else document.sessions or [None] * count
    if (document.sessions if single else document.session) is not None:
        raise Refusal(400, "use `session` with `observation`, and `sessions` with `observations`.")
    if len(names) != count:
        raise Refusal(400, f"`sessions` has {len(names)} entries, expected one for each of {count} observations.")
    known = [name for name in names if name is not None]
    if len(set(known)) < len(known):
        raise Refusal(400, "`sessions` names a session twice. Its observations must be sent one after another.")
    return names


def _json_type(space: spaces.Space) -> Any:
    """Returns the JSON type of one element, as msgspec checks it. For example, an array is a nested list of
    floats.
    """
    match space:
        case spaces.Dict():
            return _object_type({name: _json_type(part) for name, part in space.spaces.items()})
        case spaces.Tuple():
            return tuple[*(_json_type(part) for part in space.spaces)]
        case spaces.Box() | spaces.Discrete() | spaces.MultiDiscrete() | spaces.MultiBinary():
            number = float if np.issubdtype(struct(space).dtype, np.floating) else int
            return _nest(number, len(space.shape or ()))
    raise unsupported_space(space)


def _mask_type(mask: PyTree) -> Any:
    """Returns the type of a mask in JSON, or None without masks."""
    if isinstance(mask, tuple):
        return None
    if isinstance(mask, dict):
        return _object_type({name: _mask_type(part) for name, part in mask.items()})
    return _nest(bool, len(mask.shape))


def _nest(kind: Any, depth: int) -> Any:
    return list[_nest(kind, depth - 1)] if depth else kind


def _object_type(parts: dict[str, Any]) -> Any:
    names = {f"part{index}": name for index, name in enumerate(parts)}
    fields = [(field, parts[name]) for field, name in names.items()]
    return msgspec.defstruct("Parts", fields, rename=names, forbid_unknown_fields=True)


def _array(space: spaces.Space, values: Sequence[Any], path: str) -> PyTree[np.ndarray]:
    """Elements of a space as arrays `[N, ...]`. `path` names them in messages."""
    match space:
        case spaces.Dict():
            return {
                name: _array(part, [getattr(value, f"part{index}") for value in values], f"{path}.{name}")
                for index, (name, part) in enumerate(space.spaces.items())
            }
        case spaces.Tuple():
            return tuple(
                _array(part, [value[index] for value in values], f"{path}[{index}]")
                for index, part in enumerate(space.spaces)
            )
    array = _numbers(struct(space), values, path)
    low, high = _bounds(space)
    if low is not None and not np.all(inside := (array >= low) & (array < high)):
        place = tuple(np.argwhere(~inside)[0])
        least, most = (np.broadcast_to(bound, array.shape)[place] for bound in (low, high))
        raise Refusal(400, f"`{path}` contains {array[place]}, which must lie between {least} and {most - 1}.")
    return array


def _numbers(expected: Any, values: Sequence[Any], path: str) -> np.ndarray:
    try:
        with np.errstate(over="ignore"):
            array = np.array(values, expected.dtype)
    except OverflowError as error:
        raise Refusal(400, f"`{path}` does not fit into {expected.dtype}: {_uncapitalise(error)}.") from None
    except ValueError:
        raise Refusal(
            400, f"`{path}` has rows of different lengths, expected shape {list(expected.shape)}."
        ) from None
    _check_shape(array, (len(values), *expected.shape), path)
    if array.dtype.kind not in "iu" and not np.isfinite(array).all():
        raise Refusal(400, f"`{path}` contains a number that is not finite in {expected.dtype}.")
    return array


def _bools(shape: tuple[int, ...], values: Sequence[Any], path: str) -> np.ndarray:
    try:
        array = np.array(values, bool)
    except ValueError:
        raise Refusal(400, f"`{path}` has rows of different lengths, expected shape {list(shape)}.") from None
    _check_shape(array, (len(values), *shape), path)
    return array


def _check_shape(array: np.ndarray, expected: tuple[int, ...], path: str) -> None:
    if array.shape != expected:
        raise Refusal(400, f"`{path}` has shape {list(array.shape[1:])}, expected {list(expected[1:])}.")


def _bounds(space: spaces.Space) -> tuple[Any, Any]:
    """Returns the least element of a discrete space, and one beyond the largest, or None for a `Box`."""
    match space:
        case spaces.Discrete():
            return int(space.start), int(space.start + space.n)
        case spaces.MultiDiscrete():
            return space.start, space.start + space.nvec
        case spaces.MultiBinary():
            return 0, 2
    return None, None


def _over(mask: PyTree, leaf: Callable, values: Sequence[Any], path: str) -> PyTree[np.ndarray]:
    """Returns the results of `leaf`, called with each leaf of a mask, the values given for it, and its path."""
    if not isinstance(mask, dict):
        return leaf(mask, values, path)
    return {
        name: _over(part, leaf, [getattr(value, f"part{index}") for value in values], f"{path}.{name}")
        for index, (name, part) in enumerate(mask.items())
    }


def _uncapitalise(error: Exception | str) -> str:
    text = str(error).rstrip(".") or "it ends too early"
    return text[:1].lower() + text[1:]

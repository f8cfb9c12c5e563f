"""Answers the requests of a server by their path."""

import hmac
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from rollmill.core.spaces import struct
from rollmill.serving.act_requests import ActRequest, ActRequestReader, RequestSchema
from rollmill.serving.batching import Batcher, BatchingRule
from rollmill.serving.context import Request
from rollmill.serving.decisions import BatchedPolicy, PolicyRows
from rollmill.serving.engine import Answer, Engine, QueuedRequest
from rollmill.serving.limits import ServerLimits
from rollmill.serving.responses import Refusal, Response, error_response, json_response
from rollmill.serving.sessions import Session, Sessions
from rollmill.serving.statistics import ServerStatistics

METHODS = {"/": "GET", "/health": "GET", "/metrics": "GET", "/act": "POST"}
SESSION_PATH = "/sessions/"


class PolicyApplication:
    """Answers HTTP requests with a compiled policy, in batches gathered according to `rule`.

    Clients have to send `token`, unless it is None. `clock` returns the time in seconds.
    """

    def __init__(
        self,
        policy: BatchedPolicy,
        rule: BatchingRule,
        limits: ServerLimits,
        statistics: ServerStatistics,
        *,
        token: bytes | None,
        clock: Callable[[], float],
    ) -> None:
        self._policy, self._limits, self._statistics, self._clock = policy, limits, statistics, clock
        self._authorization = None if token is None else b"bearer " + token
        self._read = ActRequestReader(schema_of(policy))
        self._sessions = Sessions(limits)
        self._batcher: Batcher[QueuedRequest] = Batcher(rule)
        self._engine = Engine(policy, self._batcher, statistics, lost_memories=self._sessions.clear)
        self._description = json_response(describe(policy, rule, limits))
        self.stopping = False
        """True if new requests for actions are rejected, because the server is stopping."""

    @property
    def unanswered(self) -> int:
        """Number of action requests that are queued or in progress."""
        return self._engine.unanswered

    @property
    def failures(self) -> int:
        """Number of batches that have failed since the last successful batch."""
        return self._engine.failures

    def close(self) -> None:
        """Ends the thread that computes batches."""
        self._engine.close()

    def count(self) -> None:
        """Updates the statistics that describe the present state, such as the length of the queue."""
        self._statistics.set("queued", self._batcher.rows)
        self._statistics.set("sessions", len(self._sessions))

    def admit(self, method: str, path: str, authorization: bytes) -> None:
        """Rejects a request that has no valid token, an unknown path, or a method that the path does not
        support.
        """
        if self._authorization is not None and not hmac.compare_digest(
            _scheme_in_lower_case(authorization), self._authorization
        ):
            raise Refusal(401, "this server requires its token: `Authorization: Bearer TOKEN`.")
        expected = "DELETE" if path.startswith(SESSION_PATH) else METHODS.get(path)
        if expected is None:
            raise Refusal(404, f"unknown path {path[:60]!r}. Known: {', '.join(METHODS)} and /sessions/ID.")
        if method != expected:
            raise Refusal(405, f"{path[:60]} takes {expected}, not {method}.", allow=expected)

    def answer(self, request: Request, respond: Callable[[Response], None]) -> None:
        """Answers an admitted request."""
        match request.path:
            case "/act":
                self._act(request.body, respond)
            case "/":
                respond(self._description)
            case "/health":
                self._refuse_when_stopping()
                respond(json_response({"status": "ready"}))
            case "/metrics":
                self.count()
                respond(json_response(self._statistics.report()))
            case _ if not self._policy.recurrent:
                raise Refusal(404, "this policy has no memory, so it has no sessions.")
            case path:
                self._sessions.end(path.removeprefix(SESSION_PATH), self._clock())
                respond(json_response({}))

    def _act(self, body: bytes, respond: Callable[[Response], None]) -> None:
        began = self._clock()
        self._refuse_when_stopping()
        wanted = self._read(body)
        if self._batcher.rows + wanted.rows > self._limits.queued:
            raise Refusal(
                503,
                f"{self._batcher.rows} observations are already waiting, and the limit is {self._limits.queued}.",
                retry_after=1,
            )
        sessions = self._sessions_of(wanted, began)
        rows = self._rows(wanted, sessions)

        def done(answer: Answer) -> None:
            for session in sessions:
                session.in_flight -= 1
            if isinstance(answer, Refusal):
                respond(error_response(answer))
                return
            self._statistics.record_latency(self._clock() - began)
            respond(_build_answer(wanted, answer, sessions))

        self._engine.submit(QueuedRequest(rows, done))

    def _refuse_when_stopping(self) -> None:
        if self.stopping:
            raise Refusal(503, "the server is stopping.", retry_after=1)

    def _sessions_of(self, wanted: ActRequest, now: float) -> Sequence[Session]:
        """Returns the sessions of a request. New ones are ended again if not all can be had."""
        if not self._policy.recurrent:
            return ()
        found = [None if name is None else self._sessions.find(name, now) for name in wanted.sessions]
        sessions = self._open_sessions(found, now)
        for session in sessions:
            session.in_flight += 1
        return sessions

    def _open_sessions(self, found: Sequence[Session | None], now: float) -> list[Session]:
        new: list[Session] = []
        try:
            for session in found:
                if session is None:
                    new.append(self._sessions.open(now))
        except Refusal:
            for session in new:
                self._sessions.end(session.name, now)
            raise
        fresh = iter(new)
        return [next(fresh) if session is None else session for session in found]

    def _rows(self, wanted: ActRequest, sessions: Sequence[Session]) -> PolicyRows:
        slot = np.full(wanted.rows, self._policy.sessions, np.int32)
        fresh = np.ones(wanted.rows, bool)
        for index, session in enumerate(sessions):
            slot[index], fresh[index] = session.slot, session.fresh or wanted.restart
            session.fresh = False
        return PolicyRows(wanted.observation, wanted.mask, slot, fresh)


def _build_answer(wanted: ActRequest, actions: list[Any], sessions: Sequence[Session]) -> Response:
    if wanted.single:
        return json_response({"action": actions[0]} | ({"session": sessions[0].name} if sessions else {}))
    names = {"sessions": [session.name for session in sessions]} if sessions else {}
    return json_response({"actions": actions} | names)


def _scheme_in_lower_case(authorization: bytes) -> bytes:
    scheme, space, token = authorization.partition(b" ")
    return scheme.lower() + space + token.strip()


def schema_of(policy: BatchedPolicy) -> RequestSchema:
    """Returns the form of the requests that a policy can answer."""
    return RequestSchema(
        policy.observation_space, policy.action_space, policy.mask_struct, policy.recurrent, policy.max_batch
    )


def describe(policy: BatchedPolicy, rule: BatchingRule, limits: ServerLimits) -> dict[str, Any]:
    """Describes a server for its clients as JSON: spaces, shapes and limits."""
    settings = policy.graph.settings
    return {
        "algorithm": settings.get("algorithm"),
        "environment": settings.get("environment"),
        "iteration": policy.iteration,
        "stochastic": policy.stochastic,
        "observation": _shapes(struct(policy.observation_space)),
        "observation_space": _plain(policy.observation_space),
        "action": _shapes(struct(policy.action_space)),
        "action_space": _plain(policy.action_space),
        "action_mask": _shapes(policy.mask_struct) if jax.tree.leaves(policy.mask_struct) else None,
        "recurrent": policy.recurrent,
        "max_batch": rule.max_batch,
        "max_wait_ms": rule.max_wait * 1e3,
        "max_body_bytes": limits.body_bytes,
        "max_queued": limits.queued,
        "max_sessions": limits.sessions if policy.recurrent else 0,
        "session_seconds": limits.session_seconds if policy.recurrent else 0,
    }


def _plain(space: Any) -> str:
    return " ".join(str(space).split())


def _shapes(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _shapes(part) for name, part in tree.items()}
    if isinstance(tree, tuple):
        return [_shapes(part) for part in tree]
    return {"shape": list(tree.shape), "dtype": str(tree.dtype)}

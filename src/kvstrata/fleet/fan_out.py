"""Requests that go to all replicas: listings, changes to every cache, and lookups that only one replica can answer.

Most responses are the sum, in the shape of a single server's response, with the response of each replica under
`replicas`. The dashboard page, `top` and `kvstrata cache` therefore read a fleet as they read a server.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

from starlette.responses import JSONResponse, Response
from starlette.types import Scope, Send

from kvstrata.errors import RequestError, Unavailable
from kvstrata.fleet.replicas import ReplicaLost, Replicas, nothing, plain_scope
from kvstrata.server.http.errors import error_response

METRICS, HEALTH, PROPS, SESSIONS = "/metrics", "/health", "/props", "/cache/sessions"
HISTORY, CONVERSATIONS = "/cache/history", "/cache/conversations"
# Paths whose object exists on one replica only; the others respond with an error.
ONE_KNOWS = re.compile(r"/cache/sessions/[^/]+|/cache/conversations/[^/]+(?:/pin|/unpin)?")
SUMMED = {
    ("GET", "/cache/usage"),
    ("POST", "/cache/clear"),
    ("GET", "/cache/requantize"),
    ("POST", "/cache/requantize"),
    ("DELETE", "/cache/requantize"),
}

DEFAULT_SESSIONS = 100
# Timeout for the response of one replica, so that a slow one does not hold back the others' responses.
ANSWER_S = 30.0
# Fields merged by their maximum: concurrent times, and estimates.
LARGEST = frozenset({
    "latency_s", "seconds", "expected_error", "next_before", "p50", "p95", "p99", "first_token_p50_s",
    "first_token_p95_s", "time", "slot_s",
})  # fmt: skip
MIXED = "mixed"


@dataclass(frozen=True)
class ReplicaAnswer:
    """The response of one replica. Status 0 means that the replica was lost."""

    status: int
    headers: Mapping[bytes, bytes]
    body: bytes

    @property
    def is_good(self) -> bool:
        return 200 <= self.status < 300

    @property
    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except ValueError:
            return {"error": {"message": self.body.decode("utf-8", "replace")[:500]}}


class FanOut:
    """Answers requests that go to every replica."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    def answers(self, method: str, path: str) -> bool:
        asks = method == "GET" and path in (METRICS, HEALTH, PROPS, SESSIONS, HISTORY, CONVERSATIONS)
        return asks or (method, path) in SUMMED or ONE_KNOWS.fullmatch(path) is not None

    async def __call__(self, scope: Scope, body: bytes, send: Send) -> None:
        await self._response(scope, await self._ask_all(scope, body))(scope, nothing, send)

    async def holder_of(self, session: str, scope: Scope) -> str | None:
        """Return the replica that has a session. The id is not URL-quoted, because the path of a scope is decoded
        text."""
        found = await self._ask_all({**scope, "method": "GET", "path": f"{SESSIONS}/{session}"}, b"")
        return next((name for name, answer in found.items() if answer.is_good), None)

    async def _ask_all(self, scope: Scope, body: bytes) -> dict[str, ReplicaAnswer]:
        names = self._replicas.names()
        return dict(zip(names, await asyncio.gather(*(self._ask(name, scope, body) for name in names)), strict=True))

    async def _ask(self, name: str, scope: Scope, body: bytes) -> ReplicaAnswer:
        status, headers, pieces = 0, {}, []
        try:
            async with asyncio.timeout(ANSWER_S):
                async for message in self._replicas.ask(name, plain_scope(scope), body, only=True):
                    if message["type"] == "http.response.start":
                        status = message["status"]
                        headers = {key.lower(): value for key, value in message["headers"]}
                    else:
                        pieces.append(message.get("body", b""))
        except ReplicaLost as error:
            return _lost(str(error))
        except TimeoutError:
            return _lost(f"no answer within {ANSWER_S:.0f} s")
        return ReplicaAnswer(status, headers, b"".join(pieces))

    def _response(self, scope: Scope, found: Mapping[str, ReplicaAnswer]) -> Response:
        path = scope["path"]
        if not found:
            return error_response(Unavailable("There is no replica yet. Send the request again in a moment."))
        good = {name: answer for name, answer in found.items() if answer.is_good}
        if ONE_KNOWS.fullmatch(path) or (path == HEALTH and good):
            return _pass_on(next(iter((good or found).values())))
        if path == METRICS and good:
            texts = {name: answer.body.decode() for name, answer in good.items()}
            kind = next(iter(good.values())).headers.get(b"content-type", b"text/plain")
            return Response(label_metrics(texts), headers={"content-type": kind.decode()})
        if len(good) < len(found):
            return _partly(found, good)
        answers = {name: answer.json for name, answer in found.items()}
        if path == SESSIONS:
            return JSONResponse(_sessions(scope, answers))
        if path == HISTORY:
            return JSONResponse(merge_histories(answers))
        if path == CONVERSATIONS:
            return JSONResponse(_conversations(answers))
        if path == PROPS:
            states = sum_answers([answer["state"] for answer in answers.values()])
            return JSONResponse({**next(iter(answers.values())), "state": states, "replicas": answers})
        return JSONResponse({**sum_answers(list(answers.values())), "replicas": answers})


def _lost(why: str) -> ReplicaAnswer:
    return ReplicaAnswer(0, {}, json.dumps({"error": {"message": f"The replica was lost: {why}."}}).encode())


def _partly(found: Mapping[str, ReplicaAnswer], good: Mapping[str, ReplicaAnswer]) -> Response:
    """Return the replicas' own error if all failed with the same status, otherwise a 502 with the response of each."""
    statuses = {answer.status for answer in found.values()}
    if not good and len(statuses) == 1 and statuses != {0}:
        return _pass_on(next(iter(found.values())))
    error = RequestError(
        f"{len(good)} of {len(found)} replicas did it; `replicas` has what each of them says.", code="not_everywhere"
    )
    body = {
        "error": {"message": error.message, "type": "server_error", "param": None, "code": error.code},
        "replicas": {name: {**_object(answer.json), "status": answer.status} for name, answer in found.items()},
    }
    return JSONResponse(body, status_code=502)


def _object(answer: Any) -> dict[str, Any]:
    return answer if isinstance(answer, dict) else {"answer": answer}


def _pass_on(answer: ReplicaAnswer) -> Response:
    headers = {name.decode(): value.decode("latin-1") for name, value in answer.headers.items()}
    headers.pop("content-length", None)
    return Response(answer.body, status_code=answer.status or 503, headers=headers)


def _sessions(scope: Scope, answers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the session listings, newest first, up to the requested limit."""
    asked = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("limit", [str(DEFAULT_SESSIONS)])[0]
    limit = int(asked) if asked.isdigit() else DEFAULT_SESSIONS
    found: Sequence[dict[str, Any]] = [
        {**session, "replica": name} for name, answer in answers.items() for session in answer["sessions"]
    ]
    shown = sorted(found, key=lambda session: -session["last_use"])[:limit]
    first = next(iter(answers.values()))
    total = sum(answer["total"] for answer in answers.values())
    has_more = len(found) > len(shown) or any(answer["next_before"] for answer in answers.values())
    next_before = shown[-1]["last_use"] if shown and has_more else None
    return {"under": first["under"], "total": total, "next_before": next_before, "sessions": shown}


def _conversations(answers: Mapping[str, Any]) -> dict[str, Any]:
    """Concatenate the conversation listings. Conversations share KV only within a replica, so each replica's stay
    together."""
    first = next(iter(answers.values()))
    shown = [{**each, "replica": name} for name, answer in answers.items() for each in answer["conversations"]]
    has_more = any(answer["has_more"] for answer in answers.values())
    return {"under": first["under"], "has_more": has_more, "conversations": shown}


def sum_answers(answers: Sequence[Any], name: str = "") -> Any:
    """Add numbers, concatenate lists and merge objects; strings that differ become `mixed`."""
    given = [answer for answer in answers if answer is not None]
    if not given:
        return None
    first = given[0]
    if isinstance(first, Mapping):
        keys = dict.fromkeys(key for answer in given for key in answer)
        return {key: sum_answers([answer.get(key) for answer in given], key) for key in keys}
    if isinstance(first, list):
        return [item for answer in given for item in answer]
    if isinstance(first, bool):
        return any(given)
    if isinstance(first, int | float):
        return max(given) if name in LARGEST else sum(given)
    return first if all(answer == first for answer in given) else MIXED


def merge_histories(answers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge histories: slots of the same time are summed, requests and events name their replica.

    `now` is the earliest of all, so that the next request for newer entries misses none.
    """
    slots: dict[float, list[Any]] = {}
    for answer in answers.values():
        for slot in answer["slots"]:
            slots.setdefault(slot["time"], []).append(slot)
    requests, events = (
        sorted(
            ({**each, "replica": name} for name, answer in answers.items() for each in answer[what]),
            key=lambda each: each["time"],
        )
        for what in ("requests", "events")
    )
    first = next(iter(answers.values()))
    return {
        "under": first["under"],
        "now": min(answer["now"] for answer in answers.values()),
        "slot_s": first["slot_s"],
        "slots": [sum_answers(same) for _, same in sorted(slots.items())],
        "requests": requests,
        "events": events,
    }


def label_metrics(texts: Mapping[str, str]) -> str:
    """Merge the metrics of all replicas and label each sample with its replica. The format requires each family once,
    with all its samples."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, text in texts.items():
        family = ""
        for line in text.splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                known = heads.setdefault(family, [])
                if line not in known:
                    known.append(line)
            elif line:
                samples.setdefault(family, []).append(_with_label(line, replica))
    lines = [line for family, head in heads.items() for line in (*head, *samples.get(family, ()))]
    return "\n".join([*lines, ""])


def _with_label(line: str, replica: str) -> str:
    label = f'replica="{replica}"'
    name, brace, rest = line.partition("{")
    if brace and " " not in name:
        return f"{name}{{{label},{rest}" if not rest.startswith("}") else f"{name}{{{label}{rest}"
    name, _, value = line.partition(" ")
    return f"{name}{{{label}}} {value}"

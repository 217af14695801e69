"""Chats as data: pure, and the same for the same seed. Nothing is sent here.

lane    requests that one client sends one after the other; lanes run concurrently
chat    a history that grows by each request and each answer of the server

Each word of a text is one token in the vocabularies that were tried (SmolLM2, Qwen2.5, Gemma 3), so a text has as many
tokens as words. The number of tokens that a server really counted is in its answer's usage.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from kvstrata.bench.trace import ReplayTrace

_LINES = (
    "the of and to in is that for it was on are as with his they at be this have from or had by but what some we can "
    "out other were all there when up use your how said an each she which do their time if will way about many then "
    "them write would like so these her long make thing see him two has look more day could go come did my no most "
    "people over know water than call first who may down side been now find any new work part take get place made "
    "live where after back little only round man year came show every good me give our under name very through just "
    "form great think say help low line before turn cause much mean right old too same tell set three want air well "
    "also play small end put home read hand port large even land here must big high such follow act why ask men "
    "change went light kind off need house picture try again animal point mother world near build self earth father "
    "head stand own page should country found answer school grow study still learn plant cover food sun four between"
)

WORDS = tuple(_LINES.split())


def text(key: str, num_tokens: int) -> str:
    """Return a random text. Texts of different keys diverge within the first few words."""
    rng = random.Random(key)
    return " ".join(rng.choice(WORDS) for _ in range(num_tokens))


def count(words: str) -> int:
    """Estimate the number of tokens, for servers that do not report it."""
    return len(words.split())


Message = Mapping[str, Any]


@dataclass(frozen=True)
class LoadRequest:
    """A request: `messages` are added to the chat's history, and the whole history is sent."""

    chat: str
    messages: tuple[Message, ...]
    reply_tokens: int
    at_s: float = 0.0  # earliest time, relative to the start of the lane


Lane = tuple[LoadRequest, ...]


@dataclass(frozen=True)
class LoadShape:
    """Size of a load, in tokens."""

    chats: int = 4
    turns: int = 6
    system: int = 400
    turn: int = 120
    reply: int = 32
    seed: int = 0


def user(words: str) -> Message:
    return {"role": "user", "content": words}


def system(words: str) -> Message:
    return {"role": "system", "content": words}


def chat_asks(key: str, system_text: str, turns: Sequence[str], reply_tokens: int) -> Lane:
    """Return the requests of a chat in order; the first one carries the system prompt."""
    opening = (system(system_text),) if system_text else ()
    return tuple(
        LoadRequest(key, (*(opening if number == 0 else ()), user(turn)), reply_tokens)
        for number, turn in enumerate(turns)
    )


def multi_turn(shape: LoadShape) -> list[Lane]:
    """Return chats with a system prompt each."""
    return [_chat(shape, number, text(f"{shape.seed} system {number}", shape.system)) for number in range(shape.chats)]


def shared_system(shape: LoadShape) -> list[Lane]:
    """Return chats with a common system prompt."""
    common = text(f"{shape.seed} system", shape.system)
    return [_chat(shape, number, common) for number in range(shape.chats)]


def alternating(shape: LoadShape) -> list[Lane]:
    """Return one lane that switches chats after each turn, with a common system prompt."""
    return [tuple(chain.from_iterable(zip(*shared_system(shape), strict=True)))]


def agents(shape: LoadShape) -> list[Lane]:
    """Return agents with tools, whose contexts grow by tool results."""
    return [agent(f"{shape.seed} agent {number}", shape) for number in range(shape.chats)]


def agent(key: str, shape: LoadShape) -> Lane:
    """Return an agent's requests: a task, then a tool result in each turn. The client sends back the server's own
    replies.

    Tool results are user messages: not every server's template supports the role 'tool', and prompts must be the same.
    """
    opening = (system(_with_tools(text(f"{key} system", shape.system))), user(text(f"{key} task", shape.turn // 2)))
    first = LoadRequest(key, opening, shape.reply)
    return (
        first,
        *(LoadRequest(key, (_tool_result(key, turn, shape.turn),), shape.reply) for turn in range(1, shape.turns)),
    )


def _tool_result(key: str, turn: int, num_tokens: int) -> Message:
    return user(f"Result of read_file for part {turn}:\n{text(f'{key} result {turn}', num_tokens)}\nGo on.")


TOOLS: tuple[Message, ...] = (
    {"name": "read_file", "parameters": {"path": "string", "part": "integer"}},
    {"name": "run_command", "parameters": {"command": "string"}},
    {"name": "write_file", "parameters": {"path": "string", "content": "string"}},
)


def _with_tools(instructions: str) -> str:
    listed = "\n".join(json.dumps(tool) for tool in TOOLS)
    return f"You have these tools:\n{listed}\n{instructions}"


def _chat(shape: LoadShape, number: int, system_text: str) -> Lane:
    turns = [text(f"{shape.seed} chat {number} turn {turn}", shape.turn) for turn in range(shape.turns)]
    return chat_asks(f"chat {number}", system_text, turns, shape.reply)


LOADS: Mapping[str, Callable[[LoadShape], list[Lane]]] = {
    "multi-turn": multi_turn,
    "shared-system": shared_system,
    "alternating": alternating,
    "agents": agents,
}


def from_trace(
    trace: ReplayTrace, *, block_tokens: int, speed: float, max_requests: int, reply_tokens: int
) -> list[Lane]:
    """Return each request of a trace as a chat of one turn at its time. A block's id determines its text."""
    return list(_timed(trace, block_tokens, speed, max_requests, reply_tokens))


def _timed(trace: ReplayTrace, block_tokens: int, speed: float, max_requests: int, reply_tokens: int) -> Iterator[Lane]:
    began_s = trace.requests[0].time_s
    for number, request in enumerate(trace.requests[:max_requests]):
        blocks = " ".join(text(f"block {block}", block_tokens) for block in request.blocks.tolist())
        reply = min(request.num_reply_tokens or reply_tokens, reply_tokens)
        at_s = (request.time_s - began_s) / speed
        yield (LoadRequest(f"request {number}", (user(blocks),), max(reply, 1), at_s),)


def prompt_tokens(messages: Sequence[Message]) -> int:
    """Estimate the prompt tokens, for servers that do not report them."""
    return sum(count(str(message["content"])) for message in messages)

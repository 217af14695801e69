"""An errand of several turns and two messages, from a model that writes as real ones do: its tokens are not those that
a tokenizer would make of the same text, and its calls are not spaced as the template spaces them.

And what of each prompt was shared with the one before it, and cached. Knows no client.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstrata.text.tokenizer import token_bytes
from tests.agents.errand import CONTENT, FILE, LAST, TASK, WORD, Think, whole_file
from tests.agents.forced import Prompt, Said, Script

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

AGAIN = "Do it once more, and tell me the word that the command says now."
SAYS = "echo word-$((6 * 7000))"
COMMANDS = (f"printf 'made by an agent\\n' > {FILE}", f"cat {FILE}", SAYS, SAYS)
AGAIN_LAST = f"Once more: {WORD}."
OTHER = "What is a walrus?"  # in a session of its own
OTHER_LAST = "An animal with tusks."
_TAGS = r"</?(?:think|tool_call)>"
_PIECE_CHARS = 5
# What a prompt shares is seen without white space, which templates and models put in their own ways, and without
# what means nothing to a model.
_IGNORED = re.compile(rb"x-anthropic-billing-header:[^\n]*|\s+")

Arguments = Callable[[str], dict[str, Any]]  # of the agent's own tool, for a command


def thinks_long(about: str) -> str:
    return f"<think>\nOkay,  so now {about}.\n\n- One thing, \n- and another: a walrus in the pantry.\n</think>\n\n"


def odd(text: str) -> tuple[str, ...]:
    """In pieces of a few characters, each tokenized by itself; tags stay whole."""
    return tuple(re.findall(rf"{_TAGS}|(?:(?!{_TAGS}).){{1,{_PIECE_CHARS}}}", text, re.DOTALL))


def odd_call(tool: str, arguments: dict[str, Any]) -> str:
    inside = " , ".join(f"{json.dumps(name)}  :{json.dumps(value)}" for name, value in arguments.items())
    return f'<tool_call>\n{{ "name":"{tool}",  "arguments":{{{inside} }} }}\n</tool_call>'


def long_errand(tool: str, arguments: Arguments, think: Think) -> Script:
    """Two calls in turn, two at once and an answer; for the second message a call and an answer; an answer
    in another session. Requests that do not offer the tool get a title."""
    first, second, third, again = (odd_call(tool, arguments(command)) for command in COMMANDS)
    turns = iter(
        (
            think("I make the file") + "First  the file:\n\n" + first,
            think("I look at it") + second,
            think("I ask for the word") + "Now the word, naïvely, as asked.\n" + third + "\n\n" + second,
            think("I tell") + f"{LAST}  \n\n- `{FILE}` is there\n",
            think("I do it again") + "\nOnce more. \n" + again,
            think("I tell again") + AGAIN_LAST,
            think("I know that") + OTHER_LAST,
        )
    )

    def say(prompt: Prompt) -> tuple[str, ...]:
        return odd(next(turns) if tool in prompt.tool_names else think("a title") + "An errand")

    return say


def long_edits(think: Think) -> Script:
    """For agents without tools: for each of two messages a file that the check refuses, and the right one."""
    wrong, right = whole_file("made by nobody\n"), whole_file(CONTENT)
    turns = iter(
        (
            think("the file") + f"\n{wrong}I made  it. ",
            think("the word") + right + LAST,
            think("the file again") + wrong + "I made it again.\n\n",
            think("the word again") + right + AGAIN_LAST,
        )
    )
    return lambda _prompt: odd(next(turns))


@dataclass(frozen=True)
class Turn:
    """`shared`: tokens of a prompt, from its start, whose text the prompt before it and the reply to that have too."""

    prompt: int
    shared: int
    cached: int

    @property
    def again(self) -> int:
        """Shared tokens that were computed again."""
        return max(0, self.shared - self.cached)

    @property
    def rate(self) -> float:
        return 1 - self.again / self.shared


def turns_of(tokenizer: TokenizerWrapper, said: Sequence[Said]) -> list[Turn]:
    """From the second one on, of one conversation."""
    return [Turn(len(now.ids), shared_tokens(tokenizer, last, now), now.cached_tokens) for last, now in pairwise(said)]


def shared_tokens(tokenizer: TokenizerWrapper, last: Said, now: Said) -> int:
    before, _ = _letters(tokenizer, (*last.ids, *last.reply_ids))
    letters, owners = _letters(tokenizer, now.ids)
    length = min(len(before), len(letters))
    others = np.flatnonzero(before[:length] != letters[:length])
    at = int(others[0]) if len(others) else length
    return int(owners[at]) if at < len(letters) else len(now.ids)


def _letters(tokenizer: TokenizerWrapper, ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of a text, and which token each is of."""
    pieces = [token_bytes(tokenizer, id) for id in ids]
    raw = b"".join(pieces)
    counts = np.ones(len(raw), bool)
    for match in _IGNORED.finditer(raw):
        counts[match.start() : match.end()] = False
    owners = np.repeat(np.arange(len(pieces)), [len(piece) for piece in pieces])
    return np.frombuffer(raw, np.uint8)[counts], owners[counts]


def conversation(said: Sequence[Said], tool: str) -> list[Said]:
    """Without what an agent asks on the side. `tool`: its own, or empty where it has none."""
    return [each for each in said if (tool in each.prompt.tool_names if tool else TASK in _text(each.prompt))]


def _text(prompt: Prompt) -> str:
    return "\n".join(turn.text for turn in prompt.turns)

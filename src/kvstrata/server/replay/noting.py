"""Notes what a reply was made of when it has ended, so that it can be put back as it was."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvstrata.server.replay.memory import ReplyMemory
from kvstrata.text.reply_events import ReplyEvent, ToolCallEnd, ToolCallStart
from kvstrata.text.reply_parser import ReplyFormat
from kvstrata.text.sampled_reply import content_of_reply


@dataclass(frozen=True)
class Noting:
    """Of the replies to one prompt. `ending_ids` end a reply and are no part of what is put back."""

    memory: ReplyMemory
    form: ReplyFormat
    salt: str
    prompt: tuple[int, ...]
    ending_ids: frozenset[int]

    def note(self, ids: Sequence[int], events: Iterable[ReplyEvent]) -> None:
        """`ids`: what the client was shown, and `events` what that was."""
        told = list(events)
        begun, ended = (sum(isinstance(event, kind) for event in told) for kind in (ToolCallStart, ToolCallEnd))
        visible = content_of_reply(told)
        if begun != ended or not (visible.content or visible.calls):
            return  # it was cut inside a call, or there is nothing to send back
        shown = list(ids)
        while shown and shown[-1] in self.ending_ids:
            shown.pop()
        if not shown:
            return
        sampled = self.form.sampled(shown, visible, self.prompt)
        self.memory.add(self.salt, visible, sampled)
        # aider trims replies before it sends them back.
        if (trimmed := self.form.trimmed(sampled, visible)) is not None:
            self.memory.add(self.salt, replace(visible, content=visible.content.strip()), trimmed)

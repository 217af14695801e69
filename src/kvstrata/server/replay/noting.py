"""Recording of a finished reply's tokens, so that later prompts can repeat them exactly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvstrata.server.replay.memory import ReplyMemory
from kvstrata.text.reply_events import ReplyEvent, ToolCallEnd, ToolCallStart
from kvstrata.text.reply_parser import ReplyFormat
from kvstrata.text.sampled_reply import content_of_reply


@dataclass(frozen=True)
class Noting:
    """Recorder of the replies to one prompt. `ending_ids` end a reply and are not recorded."""

    memory: ReplyMemory
    form: ReplyFormat
    salt: str
    prompt: tuple[int, ...]
    ending_ids: frozenset[int]

    def note(self, ids: Sequence[int], events: Iterable[ReplyEvent]) -> None:
        """Record a reply. `ids`: the tokens that the client received; `events`: the same, parsed."""
        told = list(events)
        begun, ended = (sum(isinstance(event, kind) for event in told) for kind in (ToolCallStart, ToolCallEnd))
        visible = content_of_reply(told)
        if begun != ended or not (visible.content or visible.calls):
            return  # cut off inside a call, or nothing that a client would send back
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

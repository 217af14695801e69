"""Chats to token ids, by the model's own chat template.

Knows templates and where their parts begin. Does not know what a reply looks like (reply_parser.py) or how ids are
cached. What a template cannot show is brought into a form that it can: tools and system messages in the
middle of a chat (tools_in_prompt.py).
Any number of threads may render.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from itertools import chain
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from kvstrata.common_prefix import common_prefix_len
from kvstrata.errors import InvalidRequest
from kvstrata.text.detokenizer import control_names, reply_marks, special_names
from kvstrata.text.incremental_tokenizer import IncrementalTokenizer
from kvstrata.text.messages import Message, MessageShape, normalize_messages
from kvstrata.text.replay import TurnFrame, splice_replies
from kvstrata.text.resume_points import TokenPositions, next_chats
from kvstrata.text.sampled_reply import SampledReply
from kvstrata.text.special_escapes import SpecialTokenEscapes
from kvstrata.text.template_probe import (
    SystemTurns,
    probe_call,
    reply_header,
    samples,
    shown_of_history,
    shows_tools,
    system_turns,
    wanted_shape,
)
from kvstrata.text.tokenizer import encode_rendered, hf_tokenizer, require_unicode, token_text
from kvstrata.text.tools_in_prompt import place_system_messages, tools_to_text

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

Tools = list[dict[str, Any]]
# Raises if a text has too many characters, before it is tokenized.
CheckChars = Callable[[int], None]

# Parameters of apply_chat_template itself; a client may set the template's variables only.
_RESERVED = frozenset(signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {"messages"}


@dataclass(frozen=True)
class TemplatePrompt:
    """Token ids up to the beginning of the reply, and the number of them that are sampled ids of earlier replies."""

    ids: tuple[int, ...]
    replayed_turns: int = 0
    replayed_tokens: int = 0


class ChatTemplate:
    """`exists`: the model has a template. `has_tools`: it shows the model which tools there are; otherwise they are
    described in the system text. `system_in_place`: system messages in the middle of a chat stay there whatever the
    template does with them. `allow_special_tokens`: what a client writes like a special token becomes that token.
    """

    def __init__(
        self, tokenizer: TokenizerWrapper, *, system_in_place: bool = True, allow_special_tokens: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        # A tokenizer saved with truncation or padding drops these settings at its first use, which must not happen in
        # two threads.
        encode_rendered(tokenizer, "")
        self.exists: bool = bool(tokenizer.has_chat_template)
        written = samples(self._with_generation_prompt) if self.exists else []
        names = () if allow_special_tokens else control_names(tokenizer, written)
        self._escapes = SpecialTokenEscapes(names, reply_marks(tokenizer))
        self._encoder = IncrementalTokenizer(tokenizer, written, self._escapes)
        self._encode: Callable[[str], tuple[int, ...]] = self._encoder
        self._positions = TokenPositions(self._encode, special_names(tokenizer))
        self.has_tools = self.exists and shows_tools(self._with_generation_prompt)
        self._shape = wanted_shape(self._with_generation_prompt) if self.has_tools else MessageShape()
        self._shown = shown_of_history(self._with_generation_prompt, self._shape)
        everywhere = SystemTurns(first=True, second=True, later=True)
        takes = system_turns(self._with_generation_prompt) if self.exists else everywhere
        self._system_turns = takes if system_in_place else replace(takes, later=True)
        self._header = reply_header(partial(self._text, tools=None, template_kwargs=None)) if self.exists else ""
        self._added = tuple(token.content for token in hf_tokenizer(tokenizer).added_tokens_decoder.values())

    def for_salt(self, salt: str) -> ChatTemplate:
        """Return the same template with a token cache of its own."""
        salted = copy(self)
        salted._encode = partial(self._encoder, salt=salt)
        salted._positions = self._positions.with_encode(salted._encode)
        return salted

    def render(
        self,
        messages: list[Message],
        *,
        tools: Tools | None = None,
        template_kwargs: dict[str, Any] | None = None,
        check_chars: CheckChars | None = None,
    ) -> tuple[int, ...]:
        """Return the token ids up to the beginning of the reply. Raises InvalidRequest."""
        self._refuse(template_kwargs)
        text = self._escaped_text(self._chat(messages, tools), self._shown_tools(tools), template_kwargs, reply=True)
        if check_chars is not None:
            check_chars(len(text))
        return self._encode(text)

    def render_with_replies(
        self,
        messages: list[Message],
        replies: Sequence[SampledReply | None],
        *,
        ending_ids: Iterable[int],
        tools: Tools | None = None,
        template_kwargs: dict[str, Any] | None = None,
        check_chars: CheckChars | None = None,
    ) -> TemplatePrompt:
        """Render as `render` does, but with the sampled ids of earlier replies.

        `replies`: for each message the sampled reply that it repeats, or None. `ending_ids`: tokens that end a reply.
        """
        self._refuse(template_kwargs)

        def text_of(chat: list[Message]) -> str:
            return self._escaped_text(self._chat(chat, tools), self._shown_tools(tools), template_kwargs, reply=True)

        endings = tuple(text for id in ending_ids if (text := token_text(self._tokenizer, id)))
        frame = TurnFrame(self._header, endings, self._added, self._escapes.unescape)
        pieces = splice_replies(messages, replies, text_of, frame, self._tokenizer)
        if check_chars is not None:
            check_chars(sum(len(piece) for piece in pieces if isinstance(piece, str)))
        sampled = [piece for piece in pieces if not isinstance(piece, str)]
        ids = [self._encode(piece) if isinstance(piece, str) else piece for piece in pieces]
        return TemplatePrompt(tuple(chain.from_iterable(ids)), len(sampled), sum(map(len, sampled)))

    def shown_with(self, template_kwargs: dict[str, Any]) -> str:
        """Return a short chat rendered with these variables; empty: the template refuses them."""
        try:
            return self._text([{"role": "user", "content": "U"}], None, template_kwargs, reply=True)
        except InvalidRequest:
            return ""

    def probe_call(self) -> tuple[str, str]:
        """Return a prompt, and the same chat with a call after it (template_probe.py)."""
        return probe_call(self._with_generation_prompt, self._shape)

    def resume_points(
        self,
        messages: list[Message],
        tools: Tools | None = None,
        *,
        template_kwargs: dict[str, Any] | None = None,
        prompt: tuple[int, ...] | None = None,
    ) -> tuple[int, ...]:
        """Positions in the rendered ids where other requests are likely to part from this one, in order: the end of the
        system and tools block, the first turn that the template will write in another way when the chat goes on, and
        the start of the generation prompt. One that no token starts at is left out.

        `prompt`: what `render` gave, to save tokenizing it again.
        """
        self._refuse(template_kwargs)
        chat = self._chat(messages, tools)
        text_of = partial(self._escaped_text, tools=self._shown_tools(tools), template_kwargs=template_kwargs)
        text = text_of(chat, reply=True)
        ids = self._encode(text) if prompt is None else prompt
        before = self._before_reply(chat, text, text_of)
        found = {
            self._system_end(self._openings(messages, tools), text, ids, text_of),
            self._reply_start(before, text, ids),
            *(self._rewritten(others, before, text, ids, text_of) for others in self._next_chats(messages, tools)),
        }
        return tuple(sorted(position for position in found if 0 < position < len(ids)))

    def system_end(
        self,
        messages: list[Message],
        tools: Tools | None,
        *,
        template_kwargs: dict[str, Any] | None,
        prompt: tuple[int, ...],
    ) -> int:
        """Return the end of the system and tools block in a rendered prompt; 0: it is not known."""
        text_of = partial(self._escaped_text, tools=self._shown_tools(tools), template_kwargs=template_kwargs)
        text = text_of(self._chat(messages, tools), reply=True)
        return self._system_end(self._openings(messages, tools), text, prompt, text_of)

    def _refuse(self, template_kwargs: dict[str, Any] | None) -> None:
        if not self.exists:
            raise InvalidRequest("This model has no chat template: use /v1/completions with a plain prompt.")
        if reserved := _RESERVED & (template_kwargs or {}).keys():
            message = f"chat_template_kwargs cannot set {', '.join(sorted(reserved))}: remove it."
            raise InvalidRequest(message, param="chat_template_kwargs")

    def _shown_tools(self, tools: Tools | None) -> Tools | None:
        return tools if self.has_tools else None

    def _chat(self, messages: list[Message], tools: Tools | None) -> list[Message]:
        chat = normalize_messages(messages, self._shape)
        if self.has_tools:
            self._refuse_hidden(chat)
        else:
            chat = tools_to_text(chat, tools)
        return place_system_messages(chat, self._system_turns)

    def _refuse_hidden(self, chat: list[Message]) -> None:
        for place, message in enumerate(chat):
            calls, result = "tool_calls" in message, message["role"] == "tool"
            if (calls and not self._shown.calls) or (result and not self._shown.results):
                what = "tool_calls" if calls else "the role 'tool'"
                raise InvalidRequest(
                    f"messages[{place}] has {what}, which this model's chat template cannot show. Leave it out, or "
                    "serve a model made for tools.",
                    param="messages",
                )

    def _openings(self, messages: list[Message], tools: Tools | None) -> list[list[Message]]:
        """Return two chats that share only the system messages and tools of this chat."""
        is_system = [message.get("role") in ("system", "developer") for message in messages]
        num_system = is_system.index(False) if False in is_system else len(messages)
        users = [{"role": "user", "content": content} for content in ("A", "0")]
        return [self._chat([*messages[:num_system], user], tools) for user in users]

    def _with_generation_prompt(self, messages: list[Message], tools: Tools | None) -> str:
        return self._text(messages, tools, None, reply=True)

    def _escaped_text(
        self, messages: list[Message], tools: Tools | None, template_kwargs: dict[str, Any] | None, *, reply: bool
    ) -> str:
        """Render a client's chat, with escapes in its special tokens, where the encoder cuts."""
        try:
            escapes = self._escapes
            chat, variables = escapes.escape_messages(messages), escapes.escape(template_kwargs)
            return self._text(chat, escapes.escape(tools), variables, reply=reply)
        except RecursionError as fault:
            raise InvalidRequest("The messages or tools are nested too deeply.", param="messages") from fault
        except InvalidRequest as fault:
            raise InvalidRequest(self._escapes.unescape(fault.message), param=fault.param) from fault

    def _text(
        self, messages: list[Message], tools: Tools | None, template_kwargs: dict[str, Any] | None, *, reply: bool
    ) -> str:
        variables = dict(template_kwargs or {})
        if tools:
            variables["tools"] = tools
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=reply, **variables
            )
        except Exception as fault:  # a template is the model's own code and may raise anything
            message = f"The model's chat template refused the messages: {fault}"
            raise InvalidRequest(message, param="messages") from fault
        require_unicode(str(text), param="messages")
        return str(text)

    def _system_end(
        self, openings: list[list[Message]], text: str, ids: tuple[int, ...], text_of: Callable[..., str]
    ) -> int:
        """Return the number of ids that all chats with this system message and these tools begin with."""
        try:
            others = [text_of(opening, reply=False) for opening in openings]
        except InvalidRequest:
            return 0
        shared = text[: min(common_prefix_len(text, other) for other in others)]
        return common_prefix_len(self._encode(shared), ids)

    def _before_reply(self, chat: list[Message], text: str, text_of: Callable[..., str]) -> str:
        """Return the text before the generation prompt. Empty: the template cannot render without one."""
        try:
            before = text_of(chat, reply=False)
        except InvalidRequest:
            return ""
        return before if text.startswith(before) else ""

    def _reply_start(self, before: str, text: str, ids: tuple[int, ...]) -> int:
        if not before:
            return 0
        generation_prompt = self._encode(text[len(before) :])
        # Where the generation prompt's ids stand at the end as they are, the long rest need not be tokenized again.
        if generation_prompt and ids[-len(generation_prompt) :] == generation_prompt:
            return len(ids) - len(generation_prompt)
        shorter = self._encode(before)
        return len(shorter) if ids[: len(shorter)] == shorter else 0

    def _next_chats(self, messages: list[Message], tools: Tools | None) -> list[list[Message]]:
        """Return the likely next chats that the template can render."""
        shown = []
        for messages_then in next_chats(messages, tools):
            try:
                shown.append(self._chat(messages_then, tools))
            except InvalidRequest:
                continue
        return shown

    def _rewritten(
        self, chat: list[Message], before: str, text: str, ids: tuple[int, ...], text_of: Callable[..., str]
    ) -> int:
        """Return the number of ids that this prompt shares with the prompt of a longer chat that rewrites a turn.

        0: no turn is rewritten, so both share all ids up to the beginning of the reply.
        """
        try:
            other = text_of(chat, reply=False)
        except InvalidRequest:
            return 0
        return 0 if other.startswith(before or text) else self._positions.shared(text, ids, other)

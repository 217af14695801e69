"""How a model's replies are taken apart: made once for a model, gives a reader for each reply.

Knows the tokenizer, the template and Harmony's marks. Does not know any wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvstrata.text.events import ReplyReader

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from kvstrata.text.harmony import HarmonyMarks
    from kvstrata.text.template import ChatTemplate


class ReplyForm:
    """`calls`: how calls are written, in a word or some. `shows_tools`: the template itself shows tools; otherwise they
    are told in the system text. `think_end_ids`: the tokens that end thinking; empty: this model has none.
    """

    shows_tools: bool
    calls: str
    think_end_ids: tuple[int, ...]

    def __init__(self, tokenizer: TokenizerWrapper, template: ChatTemplate, harmony: HarmonyMarks | None) -> None: ...

    def reader(self, prompt: Sequence[int], tools: Sequence[dict[str, Any]]) -> ReplyReader:
        """`tools` in OpenAI's form. Without tools no calls are looked for; thinking still is."""
        raise NotImplementedError

    def opens_thinking(self, prompt: Sequence[int]) -> bool:
        """Whether the prompt ends inside thinking, so that the reply begins there."""
        raise NotImplementedError

    def call_text(self, name: str) -> tuple[str, str] | None:
        """The text before and after the JSON arguments of a call to `name`, as the template writes calls. None where
        the template's form is no JSON.
        """
        raise NotImplementedError

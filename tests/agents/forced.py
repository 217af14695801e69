"""A real server whose model says what a script wants: for clients that need a model which knows how to work.

Real are the wire, the template, the tokenizer, the forward passes, the batch and what takes replies apart. Forced are
the logits, where the sampler takes them over: each row's next token is the next one of its script. Knows no client.
"""

from __future__ import annotations

import functools
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper, load
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kvstrata.engine import sequence
from kvstrata.engine.request import Sampling
from kvstrata.engine.sampling import Sampler
from kvstrata.kv.layout import arrays_in
from kvstrata.models.load import LoadedModel
from kvstrata.text.tokenizer import encode_rendered
from tests.support.models import tiny_config, tiny_module
from tests.support.servers import Served, running

ROOT = Path(__file__).parents[2]
BEGIN, END = "<|im_start|>", "<|im_end|>"
NAME = "forced"
CONTEXT_TOKENS = 1 << 17
VOCAB = 4096
# Small: an agent's first prompt has tens of thousands of tokens, and a test machine two cores.
_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT_TOKENS,
}
# More than any logit of a model with random weights, and no overflow.
_CERTAIN = 1e4

# Calls as Hermes and Qwen models write them. (mlx-lm chooses its parser by the words `tool_call.name`.)
TEMPLATE = """{%- if tools %}<|im_start|>system
<tools>
{% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}</tools>
Write calls as <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}\
{% for call in message.tool_calls or [] %}{% set tool_call = call.function %}
<tool_call>
{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@dataclass(frozen=True)
class Form:
    """How a model's turns and replies are written. `end` ends a reply."""

    template: str = TEMPLATE
    end: str = END
    special: tuple[str, ...] = ()  # tokens beside those that all have


CHATML = Form()


@dataclass(frozen=True)
class Turn:
    role: str
    text: str


@dataclass(frozen=True)
class Prompt:
    """What the model was shown, as its template wrote it."""

    tools: tuple[dict[str, Any], ...]  # name, description, parameters
    turns: tuple[Turn, ...]

    @property
    def tool_names(self) -> tuple[str, ...]:
        return tuple(tool["name"] for tool in self.tools)


# From what the model sees to what it says; as several texts, each is tokenized by itself, as no tokenizer would do it.
Script = Callable[[Prompt], str | Sequence[str]]


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """A call, as the template wants it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def read_prompt(text: str) -> Prompt:
    """Of a form other than CHATML and Qwen's all is one turn."""
    if BEGIN not in text:
        return Prompt((), (Turn("", text),))
    tools: tuple[dict[str, Any], ...] = ()
    begin, end = re.escape(f"{BEGIN}system\n"), re.escape(f"{END}\n")
    if shown := re.match(rf"{begin}<tools>\n(.*?)</tools>.*?{end}", text, re.DOTALL):
        tools = tuple(json.loads(line) for line in shown[1].splitlines())
    elif shown := re.match(rf"{begin}# Tools\n(.*?){end}", text, re.DOTALL):
        tools = tuple(tool["function"] for tool in json.loads(shown[1]))
    text = text[shown.end() :] if shown else text
    *turns, _reply = text.split(BEGIN)[1:]
    pairs = (turn.removesuffix(f"{END}\n").split("\n", 1) for turn in turns)
    return Prompt(tools, tuple(Turn(role, said) for role, said in pairs))


class ForcedSampler(Sampler):
    """Replaces the logits of each step by what makes the script's next token certain."""

    def __init__(self, reply: Sequence[int], sampling: Sampling, prompt: Sequence[int], vocab_size: int) -> None:
        super().__init__(sampling, prompt, vocab_size)
        self._reply = reply
        self._num_said = 0

    @property
    def adjusts(self) -> bool:
        return True

    def adjust(self, logits: mx.array) -> mx.array:  # [vocab]
        # A step may be launched before the end is read: what it says is dropped.
        token = self._reply[min(self._num_said, len(self._reply) - 1)]
        self._num_said += 1
        return mx.where(mx.arange(logits.size) == token, _CERTAIN, logits)


@dataclass(frozen=True)
class Said:
    """One request that the model answered."""

    ids: tuple[int, ...]
    prompt: Prompt
    reply: str
    reply_ids: tuple[int, ...]  # without what ends it
    cached_tokens: int  # of the prompt


@dataclass(frozen=True)
class Forced:
    served: Served
    said: list[Said]  # in the order in which replies began


@contextmanager
def serving(script: Script, form: Form = CHATML, loaded: LoadedModel | None = None, **flags: Any) -> Iterator[Forced]:
    """A server that answers each request as `script` says, on a port of its own. `loaded`: another model than the
    usual one, with a tokenizer of this form."""
    loaded = loaded or forced_model(form)
    said: list[Said] = []
    cached_tokens = 0  # of the sequence whose sampler is asked for: the engine's thread does one after the other
    its_sampler = sequence.Sequence.sampler

    def sampler_of(asking: sequence.Sequence, vocab_size: int) -> Sampler:
        nonlocal cached_tokens
        cached_tokens = asking.cached_tokens or 0
        return its_sampler(asking, vocab_size)

    def sampler(sampling: Sampling, ids: Sequence[int], vocab_size: int) -> Sampler:
        prompt = read_prompt(loaded.tokenizer.decode(list(ids), skip_special_tokens=False))
        reply = script(prompt)
        pieces = [reply] if isinstance(reply, str) else reply
        reply_ids = tuple(id for piece in pieces for id in encode_rendered(loaded.tokenizer, piece))
        said.append(Said(tuple(ids), prompt, "".join(pieces), reply_ids, cached_tokens))
        end = encode_rendered(loaded.tokenizer, form.end)
        return ForcedSampler((*reply_ids, *end), sampling, ids, vocab_size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequence, "Sampler", sampler)
        patch.setattr(sequence.Sequence, "sampler", sampler_of)
        with running(loaded, **flags) as served:
            yield Forced(served, said)


@functools.cache
def forced_model(form: Form = CHATML) -> LoadedModel:
    return model_with(forced_tokenizer(form), "llama", form, **_SIZES)


def model_with(tokenizer: TokenizerWrapper, architecture: str, form: Form = CHATML, **sizes: int) -> LoadedModel:
    sizes = {**sizes, "vocab_size": len(tokenizer.get_vocab())}
    module = tiny_module(architecture, **sizes)
    return LoadedModel(
        name=NAME,
        path=Path("nowhere"),
        module=module,
        tokenizer=tokenizer,
        config={**tiny_config(architecture), **sizes},
        context_tokens=CONTEXT_TOKENS,
        vocab_size=sizes["vocab_size"],
        eos_ids=frozenset(encode_rendered(tokenizer, form.end)),
        weight_bytes=sum(array.nbytes for array in arrays_in(module.parameters())),
        dtype="float32",
        fingerprint=f"{NAME}-{architecture}",
    )


def forced_tokenizer(form: Form = CHATML) -> TokenizerWrapper:
    """A byte-level BPE that has learnt the English of this repository: about three characters a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator((path.read_text("utf-8") for path in sorted(ROOT.glob("*.md"))), trainer)
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in (BEGIN, END, *form.special)])
    marks = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in marks])
    hf = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=form.end)
    hf.chat_template = form.template
    return from_files(hf)


def from_files(hf: PreTrainedTokenizerFast) -> TokenizerWrapper:
    """Load a tokenizer from files, as those of models are: so mlx-lm finds its parser for calls."""
    with tempfile.TemporaryDirectory() as folder:
        hf.save_pretrained(folder)
        return load(Path(folder))

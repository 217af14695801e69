"""Compiles constraints for one model, and remembers the last few. Called on worker threads: it may take seconds."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from kvstrata.errors import InvalidRequest, QueueFull
from kvstrata.grammar.apart import CompilePool, NoPlace
from kvstrata.grammar.constraint import Constraint
from kvstrata.grammar.matcher import Matcher, reason_of, shortened
from kvstrata.grammar.source import source_of
from kvstrata.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

MAX_REMEMBERED = 16
# Schemas of 800 tools, 340 KB, took 0.5 s.
COMPILE_LIMIT_S = 10.0
# A state takes up to 2 KiB, and every running reply has its own.
MAX_LEXER_STATES = 50_000

# Where in a grammar it is, before and after what llguidance says of a schema.
_PLACE = re.compile(r"^(at )?(\d+\(\d+\): )?(failed to \w+ (JSON schema|\"%json\"): )?|\n +\d+ \| .*", re.DOTALL)

_WORDS = {
    "json_schema": "The JSON schema",
    "json_object": "A JSON object",
    "regex": "The regular expression",
    "lark": "The grammar",
    "choice": "The list of choices",
}


class Grammar:
    """A constraint, compiled. Shared by all replies that are held to it; safe to hand to another thread."""

    def __init__(self, native: LLMatcher, vocab_size: int, num_tokens: int) -> None:
        self._native = native  # at the start, and never moved
        self._lock = threading.Lock()  # llguidance raises when two threads use one matcher
        self._num_tokens = num_tokens
        self.vocab_size = vocab_size
        # What a schema that is not strict asks for and does not get.
        self.ignored: tuple[str, ...] = tuple(native.get_grammar_warnings())

    def matcher(self, after: tuple[int, ...] = ()) -> Matcher:
        """For one reply. `after`: ids that come in a row before the grammar begins."""
        with self._lock:
            return Matcher(self._native.deep_copy(), self._num_tokens, after)


Key = tuple[str, Constraint]  # with the salt


class Grammars:
    def __init__(
        self, tokenizer: TokenizerWrapper, vocab_size: int, eos_ids: Iterable[int], pool: CompilePool | None = None
    ) -> None:
        """`vocab_size`: number of logits. All `eos_ids` are allowed where a grammar may end."""
        self._pool = pool or CompilePool()
        self._vocabulary = Vocabulary(tokenizer, vocab_size, eos_ids)
        self._lock = threading.Lock()  # guards the next one
        self._remembered: OrderedDict[Key, Grammar] = OrderedDict()

    def compile(self, constraint: Constraint, *, salt: str = "", param: str | None = None) -> Grammar:
        """Raises InvalidRequest, with the reason, for what cannot be compiled, is too large or takes too long, and
        QueueFull where too many are being compiled. `salt`: of the request. Grammars are remembered for each salt
        alone, so that a fast answer tells no one what others ask for."""
        if (found := self._find((salt, constraint))) is not None:
            return found
        try:
            return self._compile(salt, constraint)
        except InvalidRequest as error:
            raise InvalidRequest(error.message, param=param) from error
        except ValueError as error:
            raise InvalidRequest(_refusal(constraint, str(error)), param=param) from error
        except NoPlace as error:
            raise QueueFull(
                f"{self._pool.max_running} schemas and grammars are being compiled, and no place is free. Send the "
                "request again in a while; one that was compiled lately needs no place.",
                param=param,
                code="grammars_busy",
            ) from error
        except TimeoutError as error:
            reason = f"that takes longer than {COMPILE_LIMIT_S:.0f} s"
            raise InvalidRequest(_refusal(constraint, reason), param=param) from error

    def pieces(self, text: str) -> list[str | int]:
        """A text taken apart into plain text and the ids of added tokens, for `calls_grammar`."""
        return self._vocabulary.pieces(text)

    def _compile(self, salt: str, constraint: Constraint) -> Grammar:
        source = source_of(constraint)
        tokens = self._vocabulary.native()

        def make() -> Grammar:
            # Of many requests that come with a new schema at once, the first has it compiled.
            if (found := self._find((salt, constraint))) is not None:
                return found
            native = _native(tokens, source)
            if reason := reason_of(native):
                raise ValueError(reason)
            grammar = Grammar(native, self._vocabulary.vocab_size, tokens.vocab_size)
            return self._remember((salt, constraint), grammar)

        return self._pool.run(make, COMPILE_LIMIT_S)

    def _find(self, key: Key) -> Grammar | None:
        with self._lock:
            if key not in self._remembered:
                return None
            self._remembered.move_to_end(key)
            return self._remembered[key]

    def _remember(self, key: Key, grammar: Grammar) -> Grammar:
        with self._lock:
            self._remembered[key] = grammar
            if len(self._remembered) > MAX_REMEMBERED:
                self._remembered.popitem(last=False)
        return grammar


def _native(tokens: LLTokenizer, source: str) -> LLMatcher:
    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    native = LLMatcher(tokens, source, log_level=0, limits=limits)
    # Some that can never be met, or ask for too much at once, show only here.
    native.compute_bitmask()
    return native


def _refusal(constraint: Constraint, reason: str) -> str:
    if constraint.kind != "lark":
        # Of the grammar that it was put into, its sender knows nothing.
        reason = _PLACE.sub("", reason)
    if constraint.kind == "regex":
        # The rest repeats the pattern, maybe all 256 KiB of it.
        reason = reason.rpartition("error: ")[2]
    return f"{_WORDS[constraint.kind]} cannot be used: {shortened(reason)}"

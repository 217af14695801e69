"""Compiles constraints for one model on threads with large stacks, within a time limit, and caches the last few.

llguidance cannot be interrupted, and follows a chain of references by recursion: 3,000 of them end a process whose
threads have the usual 8 MiB of stack. A chain that fills 256 KiB of text took up to 320 MiB. Only used pages of a
stack become memory.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from kvstrata.errors import InvalidRequest, QueueFull
from kvstrata.grammar.constraint import Constraint, grammar_source
from kvstrata.grammar.matcher import Matcher, reason_of, shortened
from kvstrata.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

MAX_REMEMBERED = 16
# Schemas of 800 tools, 340 KB, took 0.5 s.
COMPILE_LIMIT_S = 10.0
# A state takes up to 2 KiB, and every running reply has its own.
MAX_LEXER_STATES = 50_000
STACK_BYTES = 1 << 30
MAX_RUNNING = 4  # compilations after their time limit included
# Callers that wait at the same time, for a thread or for their result. Each holds one of the 40 threads on which the
# server reads bodies.
MAX_CALLERS = 24
PLACE_LIMIT_S = 2.0
# Where in a grammar it is, before and after what llguidance says of a schema.
_PLACE = re.compile(r"^(at )?(\d+\(\d+\): )?(failed to \w+ (JSON schema|\"%json\"): )?|\n +\d+ \| .*", re.DOTALL)

_WORDS = {
    "json_schema": "The JSON schema",
    "json_object": "A JSON object",
    "regex": "The regular expression",
    "lark": "The grammar",
    "choice": "The list of choices",
}

T = TypeVar("T")
Key = tuple[str, Constraint]  # with the salt

# The size of new stacks is a setting of the process.
_starting = threading.Lock()


class Grammar:
    """Compiled constraint, shared by all replies under it. Safe to hand to another thread."""

    def __init__(self, native: LLMatcher, vocab_size: int, num_tokens: int) -> None:
        self._native = native  # at the start, and never moved
        self._lock = threading.Lock()  # llguidance raises when two threads use one matcher
        self._num_tokens = num_tokens
        self.vocab_size = vocab_size
        # What a schema that is not strict asks for and does not get.
        self.ignored: tuple[str, ...] = tuple(native.get_grammar_warnings())

    def matcher(self, after: tuple[int, ...] = ()) -> Matcher:
        """Return a matcher for one reply. `after`: consecutive ids after which the grammar begins."""
        with self._lock:
            return Matcher(self._native.deep_copy(), self._num_tokens, after)


class GrammarCompiler:
    """Compiler of one model's constraints, with a cache of the last grammars. Compiling may take seconds."""

    def __init__(
        self, tokenizer: TokenizerWrapper, vocab_size: int, eos_ids: Iterable[int], pool: CompilePool | None = None
    ) -> None:
        """`vocab_size`: number of logits. All `eos_ids` are allowed where a grammar may end."""
        self._pool = pool or CompilePool()
        self._vocabulary = Vocabulary(tokenizer, vocab_size, eos_ids)
        self._lock = threading.Lock()  # guards the next one
        self._remembered: OrderedDict[Key, Grammar] = OrderedDict()

    def compile(self, constraint: Constraint, *, salt: str = "", param: str | None = None) -> Grammar:
        """Return the compiled constraint.

        Raises InvalidRequest, with the reason, for a constraint that cannot be compiled, is too large or takes too
        long, and QueueFull when too many are being compiled. Grammars are cached for each `salt` (of the request)
        alone, so that a fast response does not reveal what other clients ask for."""
        if (found := self._find((salt, constraint))) is not None:
            return found
        try:
            return self._compile(salt, constraint)
        except InvalidRequest as error:
            raise InvalidRequest(error.message, param=param) from error
        except ValueError as error:
            raise InvalidRequest(_refusal(constraint, str(error)), param=param) from error
        except CompilersBusy as error:
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
        """Split a text into plain text and the ids of added tokens, for `tool_call_grammar`."""
        return self._vocabulary.pieces(text)

    def _compile(self, salt: str, constraint: Constraint) -> Grammar:
        source = grammar_source(constraint)
        tokens = self._vocabulary.native()

        def make() -> Grammar:
            # When many requests bring a new schema at once, the first one compiles it.
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
    # Some grammars that no text meets, or that exceed a limit at once, fail only here.
    native.compute_bitmask()
    return native


def _refusal(constraint: Constraint, reason: str) -> str:
    if constraint.kind != "lark":
        # The client does not know the grammar into which its constraint was put.
        reason = _PLACE.sub("", reason)
    if constraint.kind == "regex":
        # The rest repeats the pattern, which may be long.
        reason = reason.rpartition("error: ")[2]
    return f"{_WORDS[constraint.kind]} cannot be used: {shortened(reason)}"


class CompilersBusy(Exception):
    """Raised when too many compilations run or wait already."""


class CompilePool:
    """Bounded number of threads with large stacks, and of callers that wait for them."""

    def __init__(
        self, max_running: int = MAX_RUNNING, max_callers: int = MAX_CALLERS, place_limit_s: float = PLACE_LIMIT_S
    ) -> None:
        self.max_running = max_running
        self._place_limit_s = place_limit_s
        self._places = threading.BoundedSemaphore(max_running)
        self._callers = threading.BoundedSemaphore(max_callers)

    def run(self, work: Callable[[], T], limit_s: float) -> T:
        """Return the result of `work`, run on a thread of its own.

        Raises what `work` raises, CompilersBusy, and TimeoutError after `limit_s`: `work` then runs to its end, and its
        result is dropped."""
        if not self._callers.acquire(blocking=False):
            raise CompilersBusy
        try:
            if not self._places.acquire(timeout=self._place_limit_s):
                raise CompilersBusy
            return self._start(work).result(limit_s)
        finally:
            self._callers.release()

    def _start(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` on a new thread, which keeps its place in the pool until `work` ends."""
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(work())
            except BaseException as error:  # noqa: BLE001
                # The caller gets it.
                result.set_exception(error)
            finally:
                self._places.release()

        thread = threading.Thread(target=run, name="kvstrata-grammar", daemon=True)
        with _starting:
            before = threading.stack_size(STACK_BYTES)
            try:
                thread.start()
            finally:
                threading.stack_size(before)
        return result

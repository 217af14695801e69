"""KV that can be checked: each token's K and V follow from it and all tokens before it, like a model's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache, partial

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kvstrata.attention.segments import RawSegment, SealedSegment, Segment, SegmentSlice
from kvstrata.codecs.planes import PlanesCodec
from kvstrata.codecs.raw import RawCodec
from kvstrata.codecs.registry import parse
from kvstrata.kv.checkpoints import take_checkpoint
from kvstrata.kv.layout import LayerSpec, Layout
from kvstrata.kv.precision_plan import make_plan
from kvstrata.kv.recurrent_layer import RecurrentLayer
from kvstrata.kv.sequence_cache import SequenceCache
from kvstrata.prefix_cache.config import CacheConfig, CacheLimits
from kvstrata.prefix_cache.entries import Lease
from kvstrata.prefix_cache.entry_table import CacheListener
from kvstrata.prefix_cache.insertion import Insertion
from kvstrata.prefix_cache.keys import Identity, TokenIds, as_ids
from kvstrata.prefix_cache.prefix_cache import PrefixCache

DIM = 64
NUM_LAYERS = 2
LAYOUT = Layout((LayerSpec("full", kv_heads=1, k_dim=DIM, v_dim=DIM, token_bytes=2 * DIM * 4),) * NUM_LAYERS)
TOKEN_BYTES = LAYOUT.token_bytes
STATE_SHAPE = (1, 256)
# A layer that can be cut anywhere, and a layer that can be resumed at checkpoints only.
HYBRID = Layout((LAYOUT.layers[0], LayerSpec("recurrent", num_arrays=1, state_bytes=1024)))
MODULUS = 1_000_003
SMALLEST_NORM = 1.0  # of a token whose direction is checked; most are at about 5.7
# Largest difference of direction between a token and its encoded form: 1 minus the cosine.
TOLERANCES = {8: 0.001, 4: 0.03, 2: 0.35}


@lru_cache(maxsize=256)
def _states(tokens: tuple[int, ...]) -> NDArray[np.int64]:
    states, state = [], 1
    for token in tokens:
        state = (state * 48_271 + token + 1) % MODULUS
        states.append(state)
    return np.array(states, np.int64)


def expected(tokens: Sequence[int], start: int, end: int, layer: int, side: int) -> NDArray[np.float32]:
    """K (side 0) or V (side 1) of tokens [start, end): [tokens, dim]"""
    states = _states(tuple(tokens))[start:end, None]
    steps = np.arange(1, DIM + 1) * (2 * layer + side + 1)
    return np.sin((states * steps % MODULUS).astype(np.float32))


def expected_state(tokens: Sequence[int], num_tokens: int) -> NDArray[np.float32]:
    return np.full(STATE_SHAPE, _states(tuple(tokens))[num_tokens - 1], np.float32)


def compute(cache: SequenceCache, tokens: Sequence[int], num_tokens: int) -> None:
    """Append the KV of the next `num_tokens`, as a forward pass does."""
    start = cache.num_tokens
    for i, layer in enumerate(cache.flat if num_tokens else ()):
        if isinstance(layer, RecurrentLayer):
            layer.cache = [mx.array(expected_state(tokens, start + num_tokens))]
            continue
        k, v = (mx.array(expected(tokens, start, start + num_tokens, i, side))[None, None] for side in (0, 1))
        layer.append(k, v)
    cache.end_pass(num_tokens)
    mx.eval(cache.arrays())


def check(parts: Iterable[Segment], tokens: Sequence[int], layer: int, at_least: int = 8) -> int:
    """Check that segments from the first token on hold the expected values. Returns the number of tokens.

    `at_least`: the bits that all of them once had. Lost precision does not come back with more bits.
    """
    at = 0
    for part in parts:
        for side, array in enumerate(part.dense(mx.float32)):
            held = np.asarray(array[0, 0])
            wanted = expected(tokens, at, at + part.num_tokens, layer, side)
            tolerance = _tolerance(part, side)
            if at_least < 8:
                tolerance = 2 * TOLERANCES[at_least]
            if tolerance:
                # A token whose vector is tiny beside the mean of its neighbours has no direction to keep.
                usual = np.linalg.norm(wanted, axis=-1) > SMALLEST_NORM
                held, wanted = held[usual], wanted[usual]
                products = (held * wanted).sum(-1)
                lengths = np.linalg.norm(held, axis=-1) * np.linalg.norm(wanted, axis=-1)
                assert (1 - products / lengths).max(initial=0.0) <= tolerance
            else:
                assert np.array_equal(held, wanted)
        at += part.num_tokens
    return at


def _tolerance(part: Segment, side: int) -> float:
    whole = part.whole if isinstance(part, SegmentSlice) else part
    if isinstance(whole, RawSegment):
        return 0.0
    assert isinstance(whole, SealedSegment)
    codec = (whole.k, whole.v)[side].codec
    if isinstance(codec, RawCodec):
        return 0.0
    assert isinstance(codec, PlanesCodec)
    return TOLERANCES[codec.bits]


def check_lease(lease: Lease, tokens: Sequence[int], at_least: int = 8) -> None:
    if lease.prefix is None:
        assert lease.num_tokens == 0
        return
    for layer, (sources, state) in enumerate(zip(lease.prefix.sources, lease.prefix.states, strict=True)):
        if state is not None:
            assert np.array_equal(np.asarray(state[0]), expected_state(tokens, lease.num_tokens))
            continue
        parts = [part for source in sources for part in source.segments()]
        assert check(parts, tokens, layer, at_least) == lease.num_tokens


def new_cache(
    name: str = "raw",
    *,
    layout: Layout = LAYOUT,
    hot_bytes: int = 1 << 30,
    min_quantize_tokens: int = 256,
    live: bool = False,
    fingerprint: str = "weights",
    ttl_s: float | None = None,
    clock: Clock | None = None,
    watcher: CacheListener | None = None,
) -> PrefixCache:
    codec = parse(name)
    config = CacheConfig(k=codec, v=codec, min_quantize_tokens=min_quantize_tokens, encodes_running=live, ttl_s=ttl_s)
    identity = Identity(fingerprint, "float32", tuple(spec.signature for spec in layout.flat()))
    plan_of, limits = partial(make_plan, layout), CacheLimits(hot_bytes)
    return PrefixCache(layout, identity, config, limits, plan_of, listener=watcher, clock=clock or Clock())


class Told:
    """Listener that remembers every cached prefix."""

    def __init__(self) -> None:
        self.prefixes: set[tuple[bytes, bytes]] = set()

    def stored(self, root_key: bytes, ids: TokenIds, start: int) -> None:
        self.prefixes |= _prefixes(root_key, ids, start)

    def removed(self, root_key: bytes, ids: TokenIds, start: int) -> None:
        gone = _prefixes(root_key, ids, start)
        assert gone <= self.prefixes, "a prefix was removed that had not been cached"
        self.prefixes -= gone

    def cleared(self) -> None:
        self.prefixes.clear()

    def check(self, cache: PrefixCache) -> None:
        held: set[tuple[bytes, bytes]] = set()
        for node in cache.table.tree:
            tokens = np.concatenate([above.tokens for above in node.path()])
            held |= _prefixes(node.root_key, tokens, node.start)
        assert self.prefixes == held


def _prefixes(root_key: bytes, ids: TokenIds, start: int) -> set[tuple[bytes, bytes]]:
    return {(root_key, ids[:end].tobytes()) for end in range(start + 1, len(ids) + 1)}


class Clock:
    """Clock that advances on request, and a little with every reading."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 0.001
        return self.now_s


class Run:
    """Sequence: its lease, the tokens that it computes, and their insertion."""

    def __init__(
        self,
        cache: PrefixCache,
        tokens: Sequence[int],
        salt: str = "",
        *,
        room: int = 0,
        session: str = "",
        digest: bytes = b"",
    ) -> None:
        self.tokens = tuple(tokens)
        self.salt = salt
        self.session = session
        self._digest = digest
        self._conversations = cache.conversations
        self._num_prompt = len(self.tokens)
        self._turn = self._conversations.begin_turn(salt, session, as_ids(self.tokens))
        lease = cache.lease(self.tokens[:-1], salt, session=session)
        self.cache = SequenceCache(cache.matcher.layout, None, len(self.tokens) - lease.num_tokens + room, lease.prefix)
        self._needs_marks = cache.needs_checkpoints
        self.filing: Insertion = cache.insert(lease, self.cache, salt)
        self.num_sealed = 0

    @property
    def num_computed(self) -> int:
        return self.cache.num_tokens

    @property
    def left(self) -> int:
        return len(self.tokens) - self.num_computed

    def compute(self, num_tokens: int) -> None:
        compute(self.cache, self.tokens, min(num_tokens, self.left))

    def seal(self, *, is_marked: bool = True) -> None:
        takes_mark = is_marked and self._needs_marks and self.num_computed > self.cache.start
        self.filing.commit(self.tokens[: self.num_computed], take_checkpoint(self.cache) if takes_mark else None)
        if self.num_computed > self.cache.start:
            self.num_sealed = self.num_computed

    def end(self) -> None:
        self.seal()
        self.filing.close()
        self._conversations.end_turn(
            self.salt, self.session, self._turn, self._digest, as_ids(self.tokens), self._num_prompt
        )

    def check(self, at_least: int = 8) -> None:
        for i, layer in enumerate(self.cache.flat):
            if isinstance(layer, RecurrentLayer):
                if self.num_computed:
                    assert np.array_equal(np.asarray(layer.cache[0]), expected_state(self.tokens, self.num_computed))
                continue
            assert check(layer.segments(), self.tokens, i, at_least) == self.num_computed


def store_tokens(cache: PrefixCache, tokens: Sequence[int], salt: str = "", *, session: str = "") -> int:
    """Run one request from its beginning to its end. Returns how many of its tokens were cached."""
    run = Run(cache, tokens, salt, session=session)
    cached = run.num_computed
    run.compute(run.left)
    run.end()
    return cached


def settle(cache: PrefixCache) -> None:
    while cache.has_work:
        cache.run_background(0)

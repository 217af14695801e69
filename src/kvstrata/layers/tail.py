"""Full attention, one sequence: what others computed before, what is encoded of its own, then buffers for the newest.

A sequence that is encoded while it runs has buffers for its newest tokens alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from kvstrata.attention import cpu, cuda_rows
from kvstrata.attention.attend import Keys
from kvstrata.attention.cuda_step import Slot
from kvstrata.attention.parts import Part, Parts, SealedPart, Source, cut_parts
from kvstrata.attention.runs import RunCache
from kvstrata.codecs.base import Codec, copy_rows
from kvstrata.codecs.raw import RawCodec
from kvstrata.layers.grain import Grain, grain_for, ranges
from kvstrata.layers.pieces import Pieces


class FullLayer:
    """`before` are tokens that others hold: maybe still being written by their owner, never by this layer."""

    def __init__(self, capacity: int, before: Sequence[Source] = (), raw_tokens: int | None = None) -> None:
        """Room for `capacity` tokens; buffers for no more than `raw_tokens` of them at once, if what is older is sealed
        in time."""
        self._before = tuple(before)
        self.start = sum(source.num_tokens for source in before)
        self.offset = self.start
        self._sealed: list[SealedPart] = []
        self.sealed_tokens = 0  # asked for by every plan of a step, so kept
        self.sealed_bytes = 0
        self._pieces = Pieces(capacity, raw_tokens)
        self._runs = RunCache()
        self._counters = cuda_rows.Counters()
        self._step: cuda_rows.Step | None = None

    @property
    def capacity(self) -> int:
        """Of its own buffers, in tokens, those that are only promised included."""
        return self._pieces.capacity

    @property
    def nbytes(self) -> int:
        """Its own: what comes before is counted where it is held."""
        return self._pieces.nbytes + sum(part.nbytes for part in self._sealed)

    @property
    def token_bytes(self) -> int:
        return self._pieces.token_bytes

    @property
    def sealed(self) -> tuple[SealedPart, ...]:
        """Of its own tokens, those that are encoded."""
        return tuple(self._sealed)

    def replace_sealed(self, part: SealedPart, by: SealedPart) -> None:
        """The same tokens, stored in another way."""
        if (part.k.position, part.k.end) != (by.k.position, by.k.end):
            raise ValueError(f"tokens {part.k.position} to {part.k.end} cannot become others")
        self._sealed[self._sealed.index(part)] = by
        self._count_sealed()

    def _count_sealed(self) -> None:
        self.sealed_tokens = sum(part.num_tokens for part in self._sealed)
        self.sealed_bytes = sum(part.nbytes for part in self._sealed)

    def arrays(self) -> list[mx.array]:
        return self._pieces.arrays()

    def grow(self, tokens: int) -> None:
        self._pieces.grow(tokens)

    def num_to_seal(self, first_raw: int, recent_raw: int) -> int:
        """How many tokens `seal` would encode."""
        num_raw = self.offset - self.start - self.sealed_tokens
        first = min(max(0, first_raw - (self.offset - num_raw)), num_raw)
        return max(0, num_raw - recent_raw - first)

    def buffer_tokens_after(self, num_recent: int) -> int:
        """The size of the buffer that the newest tokens move to when all others are sealed."""
        return self._pieces.size_for(num_recent)

    def seal(self, k: Codec, v: Codec, *, first_raw: int = 4, recent_raw: int = 128) -> int:
        """Encode what is raw, but for the sequence's first tokens and the newest; tells how many tokens were encoded.

        The buffers go; the newest tokens move to one of their own, with some room. The rest of it is promised.
        """
        num_tokens = self.num_to_seal(first_raw, recent_raw)
        for _ in self.sealing(k, v, first_raw=first_raw, recent_raw=recent_raw):
            pass
        return num_tokens

    def sealing(self, k: Codec, v: Codec, *, first_raw: int = 4, recent_raw: int = 128) -> Iterator[None]:
        """The same in small steps. The tokens are those that it has now, however many come meanwhile; readers see no
        change until all are encoded."""
        num_tokens = self.num_to_seal(first_raw, recent_raw)
        if not num_tokens:
            return
        sealed_before, end, grain = self.sealed_tokens, self.offset - recent_raw, self._grain
        made: list[SealedPart] = []
        for a, b in ranges(end - num_tokens, end, grain.piece_tokens):
            k_raw, v_raw = self._raw_arrays(a, b)
            made.append(SealedPart(k.encode(k_raw, a), v.encode(v_raw, a)))
            del k_raw, v_raw  # kept over a step they would make the owner's next write a copy of everything
            if b % grain.part_tokens == 0 or b == end:
                made = grain.join(made)
            yield
            if self.sealed_tokens != sealed_before:
                return  # another sealing was faster
        self._move_newest(end - num_tokens, end)
        self._sealed.append(made[0])
        self._join_sealed(grain)
        self._sealed += made[1:]
        self._count_sealed()

    def _move_newest(self, first_end: int, start: int) -> None:
        """Raw tokens from position `start` on get a buffer of their own; those before `first_end` are sealed as they
        are."""
        num_recent = self.offset - start
        size = self._pieces.size_for(num_recent)
        recent = self._raw_arrays(start, self.offset) if num_recent else ()
        raw_start = self.offset - self._pieces.num_tokens
        first = self._raw_arrays(raw_start, first_end) if raw_start < first_end else ()
        kept = [copy_rows(array, 0, array.shape[1]) for array in first]
        moved = [_with_room(array[None], size) for array in recent]
        mx.eval(moved, kept)  # at once: the host waits for it each time
        if kept:
            self._sealed.append(SealedPart(*(RawCodec().adopt(array, raw_start) for array in kept)))
        self._pieces.keep_only(moved, num_recent)

    def _raw_arrays(self, start: int, end: int) -> tuple[mx.array, mx.array]:
        """K and V, [kv_heads, tokens, dim], of positions [start, end) that are not sealed."""
        first = self.offset - self._pieces.num_tokens
        raw = tuple(cut_parts(self._pieces.parts(), start - first, end - first))
        k, v = Parts((raw,)).joined(self.arrays()[0])
        return k.squeeze(0), v.squeeze(0)  # an index would copy

    @property
    def _grain(self) -> Grain:
        return grain_for(sum(array.shape[1] * array.shape[3] for array in self.arrays()[:2]))

    def _join_sealed(self, grain: Grain) -> None:
        """Join neighbours of like size and the same codecs, up to the end of a part: parts stay few, and a token is
        copied seldom."""
        while len(self._sealed) > 1:
            a, b = self._sealed[-2:]
            is_like = a.num_tokens <= 2 * b.num_tokens or b.k.end % grain.part_tokens == 0
            if not is_like or not grain.may_join(a, b):
                return
            self._sealed[-2:] = [SealedPart(a.k.codec.join(a.k, b.k), a.v.codec.join(a.v, b.v))]

    def append(self, k: mx.array, v: mx.array) -> None:
        """Write tokens; the caller has made sure that there is room."""
        self._count(k.shape[2], self._pieces.append(k, v))

    def runs_with_next(self, k: mx.array, v: mx.array) -> list[cpu.Run]:
        """Make room for one more token, which the caller writes where the runs say. Only if `has_runs`."""
        runs, is_placed = self._pieces.runs_with_next(k, v)
        self._count(1, int(is_placed))
        return [*self._runs.of(self._parts_before()), *runs]

    def slot_for_next(self, k: mx.array, v: mx.array) -> Slot:
        """Make room for one more token, which the caller writes there, or has written by `put_last`."""
        slot = self._pieces.next_slot(k, v)
        if slot is None:
            raise self._no_room(1)
        self.offset += 1
        return slot

    def put_last(self, k: mx.array, v: mx.array) -> None:
        self._pieces.put_last(k, v)

    def before_slot(self) -> tuple[Part, ...]:
        """All that it reads beside the buffer that the next token goes to."""
        self._pieces.make_room(1)
        if not (self._before or self._sealed or self._pieces.num_full):
            return ()
        return (*self._parts_before(), *self._pieces.full_parts())

    @property
    def has_runs(self) -> bool:
        """Whether kernels can read all that it attends to."""
        return self._runs.covers(self._parts_before())

    def _count(self, wanted: int, written: int) -> None:
        if written != wanted:
            raise self._no_room(wanted)
        self.offset += wanted

    def _no_room(self, wanted: int) -> IndexError:
        return IndexError(f"{wanted} tokens do not fit: {self.capacity} reserved, {self.offset} used")

    def parts(self) -> tuple[Part, ...]:
        return (*self._parts_before(), *self._pieces.parts())

    def own_parts(self, start: int, end: int) -> tuple[Part, ...]:
        """Of its own tokens, [start, end) counted from the first of them. Good until the next write."""
        return tuple(cut_parts((*self._sealed, *self._pieces.parts()), start, end))

    def own_arrays(self) -> tuple[mx.array, mx.array] | None:
        """K and V if they fill one buffer exactly: it can be kept as it is, if the layer is not used again."""
        return None if self._sealed else self._pieces.whole_arrays()

    def _parts_before(self) -> tuple[Part, ...]:
        """All that it does not write."""
        return (*(part for source in self._before for part in source.parts()), *self._sealed)

    def let_go(self) -> None:
        """Keep nothing of what is stored in another way now."""
        self._runs.keep_only(self._parts_before())

    def end_pass(self) -> list[mx.array]:
        """What has to be issued before the next pass."""
        step, self._step = self._step, None
        return step.launched if step else []

    # What mlx-lm's models call.

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Keys, Keys]:
        if self._steps(keys, values):
            step = cpu.Step((self,), keys, values)
            return step, step
        if cuda_rows.fits(keys, values):
            self._step = cuda_rows.Step((self,), keys, values, self._counters)
            return self._step, self._step
        self.append(keys, values)
        return self.keys_and_values()

    def _steps(self, keys: mx.array, values: mx.array) -> bool:
        """Whether new tokens of this sequence alone go by a `Step`."""
        if keys.shape[2] > 1 or not cpu.fits(keys, values):
            return False
        before = self._parts_before()
        is_long = cpu.pays_alone(self.offset, keys, values)
        return (is_long or self._runs.has_codes(before)) and self._runs.covers(before)

    def keys_and_values(self) -> tuple[Keys, Keys]:
        parts = self._step or Parts((self.parts(),))
        return parts, parts

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:  # noqa: N803
        if window_size is not None:
            return create_causal_mask(N, self.offset, window_size=window_size)
        if N == 1:
            return None
        return create_causal_mask(N, self.offset) if return_array else "causal"


def _with_room(array: mx.array, size: int) -> mx.array:
    """In memory of its own, with zeros after it up to `size` tokens."""
    missing = size - array.shape[2]
    if not missing:
        return copy_rows(array, 0, size)
    room = mx.zeros((*array.shape[:2], missing, array.shape[3]), array.dtype)
    return mx.concatenate([array, room], axis=2)

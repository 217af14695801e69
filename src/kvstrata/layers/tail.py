"""Full attention, one sequence: what others computed before, then preallocated buffers that are written in place.

Buffers come in pieces: the first is sized from the request, later ones are added while it runs. No piece is ever copied
into another, so growing costs only what it adds. A sequence that is encoded while it runs has buffers for its newest
tokens alone: room for the rest is promised, and allocated when it is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from kvstrata.attention import cpu, cuda_rows
from kvstrata.attention.attend import Keys
from kvstrata.attention.cuda_step import Slot
from kvstrata.attention.parts import Part, Parts, RawPart, SealedPart, Source, cut_parts
from kvstrata.attention.runs import RunCache
from kvstrata.codecs.base import Codec, copy_rows
from kvstrata.codecs.raw import RawCodec
from kvstrata.layers.buffers import Buffer, round_up
from kvstrata.layers.grain import Grain, grain_for, ranges

# Room beside the newest tokens when the others were encoded, and of every buffer that is added later: what is encoded
# next moves the newest tokens again, and would move all room that they have.
ROOM_TOKENS = 512


@dataclass
class Piece:
    buffer: Buffer
    used: int = 0

    @property
    def free(self) -> int:
        return self.buffer.size - self.used


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
        self._raw_tokens = raw_tokens
        first = capacity if raw_tokens is None else min(capacity, raw_tokens)
        self._pieces = [_piece(first)]
        self._promised = capacity - first  # tokens that there is no buffer for yet
        self._runs = RunCache()
        self._counters = cuda_rows.Counters()
        self._step: cuda_rows.Step | None = None

    @property
    def capacity(self) -> int:
        """Of its own buffers, in tokens, those that are only promised included."""
        return sum(piece.buffer.size for piece in self._pieces) + self._promised

    @property
    def nbytes(self) -> int:
        """Its own: what comes before is counted where it is held."""
        return sum(piece.buffer.nbytes for piece in self._pieces) + sum(part.nbytes for part in self._sealed)

    @property
    def token_bytes(self) -> int:
        return self._pieces[0].buffer.token_bytes

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
        return [array for piece in self._pieces for array in piece.buffer.arrays()]

    def grow(self, tokens: int) -> None:
        if self._raw_tokens is None and not self._promised:
            self._pieces.append(_piece(tokens))
        else:
            self._promised += tokens

    def _make_room(self, num_tokens: int) -> None:
        """Buffers for so many more, out of what was promised. Few of them, whatever the sequence grows to."""
        free = sum(piece.free for piece in self._pieces)
        if free < num_tokens and self._promised:
            size = max(num_tokens - free, self._raw_tokens or max(ROOM_TOKENS, self.capacity // 4))
            self._pieces.append(_piece(min(size, self._promised)))
            self._promised = max(0, self._promised - self._pieces[-1].buffer.size)

    def num_to_seal(self, first_raw: int, recent_raw: int) -> int:
        """How many tokens `seal` would encode."""
        num_raw = self.offset - self.start - self.sealed_tokens
        first = min(max(0, first_raw - (self.offset - num_raw)), num_raw)
        return max(0, num_raw - recent_raw - first)

    def buffer_tokens_after(self, num_recent: int) -> int:
        """The size of the buffer that the newest tokens move to when all others are sealed."""
        room = self.capacity - sum(piece.used for piece in self._pieces)
        most = ROOM_TOKENS if self._raw_tokens is None else max(0, self._raw_tokens - num_recent)
        return round_up(num_recent + min(room, most))

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
        room = self.capacity - sum(piece.used for piece in self._pieces)
        tail = Piece(Buffer(self.buffer_tokens_after(num_recent)), num_recent)
        recent = self._raw_arrays(start, self.offset) if num_recent else ()
        raw_start = self.offset - sum(piece.used for piece in self._pieces)
        first = self._raw_arrays(raw_start, first_end) if raw_start < first_end else ()
        kept = [copy_rows(array, 0, array.shape[1]) for array in first]
        moved = [_with_room(array[None], tail.buffer.size) for array in recent]
        mx.eval(moved, kept)  # at once: the host waits for it each time
        if moved:
            tail.buffer.adopt(*moved)
        if kept:
            self._sealed.append(SealedPart(*(RawCodec().adopt(array, raw_start) for array in kept)))
        self._pieces = [tail]
        self._promised = max(0, room - tail.free)

    def _raw_arrays(self, start: int, end: int) -> tuple[mx.array, mx.array]:
        """K and V, [kv_heads, tokens, dim], of positions [start, end) that are not sealed."""
        first = self.offset - sum(piece.used for piece in self._pieces)
        raw = tuple(cut_parts(self._raw_parts(), start - first, end - first))
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
        start, total = 0, k.shape[2]
        self._make_room(total)
        for piece in self._pieces:
            count = min(piece.free, total - start)
            if count:
                piece.buffer.put(piece.used, k[:, :, start : start + count], v[:, :, start : start + count])
                piece.used += count
                start += count
        self._count(total, start)

    def runs_with_next(self, k: mx.array, v: mx.array) -> list[cpu.Run]:
        """Make room for one more token, which the caller writes where the runs say. Only if `has_runs`."""
        self._make_room(1)
        runs = self._runs.of(self._parts_before())
        left = 1
        for piece in self._pieces:
            at = piece.used if left and piece.free else cpu.NOWHERE
            if at != cpu.NOWHERE:
                piece.used += 1
                left = 0
            if piece.used:
                runs.append(cpu.Run(*piece.buffer.addresses(k, v), piece.buffer.size, at, piece.used))
        self._count(1, 1 - left)
        return runs

    def slot_for_next(self, k: mx.array, v: mx.array) -> Slot:
        """Make room for one more token, which the caller writes there, or has written by `put_last`."""
        self._make_room(1)
        piece = self._pieces[self._num_full()]
        used, buffer = piece.used + 1, piece.buffer
        self._count(1, int(used <= buffer.size))
        if buffer.k is None or buffer.v is None:
            buffer.allocate(k, v)
            assert buffer.k is not None
            assert buffer.v is not None
        piece.used = used
        return Slot(buffer.k, buffer.v, buffer.size, used - 1, used)

    def put_last(self, k: mx.array, v: mx.array) -> None:
        piece = next(piece for piece in reversed(self._pieces) if piece.used)
        piece.buffer.put(piece.used - 1, k, v)

    def before_slot(self) -> tuple[Part, ...]:
        """All that it reads beside the buffer that the next token goes to."""
        self._make_room(1)
        num_full = self._num_full()
        if not (self._before or self._sealed or num_full):
            return ()
        return (*self._parts_before(), *map(_part, self._pieces[:num_full]))

    def _num_full(self) -> int:
        """Buffers that the next token does not go to: they fill up in their order."""
        if len(self._pieces) == 1:
            return 0
        return next((i for i, piece in enumerate(self._pieces) if piece.free), len(self._pieces) - 1)

    @property
    def has_runs(self) -> bool:
        """Whether kernels can read all that it attends to."""
        return self._runs.covers(self._parts_before())

    def _count(self, wanted: int, written: int) -> None:
        if written != wanted:
            raise IndexError(f"{wanted} tokens do not fit: {self.capacity} reserved, {self.offset} used")
        self.offset += wanted

    def parts(self) -> tuple[Part, ...]:
        return (*self._parts_before(), *self._raw_parts())

    def own_parts(self, start: int, end: int) -> tuple[Part, ...]:
        """Of its own tokens, [start, end) counted from the first of them. Good until the next write."""
        return tuple(cut_parts((*self._sealed, *self._raw_parts()), start, end))

    def own_arrays(self) -> tuple[mx.array, mx.array] | None:
        """K and V if they fill one buffer exactly: it can be kept as it is, if the layer is not used again."""
        piece = self._pieces[0]
        if self._sealed or len(self._pieces) > 1 or piece.free or piece.buffer.k is None or piece.buffer.v is None:
            return None
        return piece.buffer.k.squeeze(0), piece.buffer.v.squeeze(0)  # an index would copy

    def _parts_before(self) -> tuple[Part, ...]:
        """All that it does not write."""
        return (*(part for source in self._before for part in source.parts()), *self._sealed)

    def let_go(self) -> None:
        """Keep nothing of what is stored in another way now."""
        self._runs.keep_only(self._parts_before())

    def _raw_parts(self) -> list[RawPart]:
        return [_part(piece) for piece in self._pieces if piece.used]

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


def _piece(num_tokens: int) -> Piece:
    return Piece(Buffer(round_up(num_tokens)))


def _part(piece: Piece) -> RawPart:
    assert piece.buffer.k is not None
    assert piece.buffer.v is not None
    return RawPart(piece.buffer.k, piece.buffer.v, piece.used)

"""Full attention, one sequence: what others computed before, then preallocated buffers that are written in place.

Buffers come in pieces: the first is sized from the request, later ones are added while it runs. No piece is ever copied
into another, so growing costs only what it adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from kvstrata.codecs.base import Codec, copy_rows
from kvstrata.codecs.cuda_step import Slot
from kvstrata.codecs.raw import RawCodec
from kvstrata.layers import cpu, cuda
from kvstrata.layers.buffers import Buffer, round_up
from kvstrata.layers.parts import Part, Parts, RawPart, SealedPart, Source, cut_parts
from kvstrata.layers.runs import RunCache

Keys = Parts | cpu.Step | cuda.Step


@dataclass
class Piece:
    buffer: Buffer
    used: int = 0

    @property
    def free(self) -> int:
        return self.buffer.size - self.used


class FullLayer:
    """`before` are tokens that others hold: maybe still being written by their owner, never by this layer."""

    def __init__(self, capacity: int, before: Sequence[Source] = ()) -> None:
        self._before = tuple(before)
        self.start = sum(source.num_tokens for source in before)
        self.offset = self.start
        self._sealed: list[SealedPart] = []
        self.sealed_tokens = 0  # asked for by every plan of a step, so kept
        self.sealed_bytes = 0
        self._pieces = [_piece(capacity)]
        self._runs = RunCache()
        self._counters = cuda.Counters()
        self._step: cuda.Step | None = None

    @property
    def capacity(self) -> int:
        """Of its own buffers, in tokens."""
        return sum(piece.buffer.size for piece in self._pieces)

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

    def replace_sealed(self, parts: Sequence[SealedPart]) -> None:
        """The same tokens, stored in another way."""
        if sum(part.num_tokens for part in parts) != self.sealed_tokens:
            raise ValueError(f"{self.sealed_tokens} sealed tokens cannot become others")
        self._sealed = list(parts)
        self._count_sealed()

    def _count_sealed(self) -> None:
        self.sealed_tokens = sum(part.num_tokens for part in self._sealed)
        self.sealed_bytes = sum(part.nbytes for part in self._sealed)

    def arrays(self) -> list[mx.array]:
        return [array for piece in self._pieces for array in piece.buffer.arrays()]

    def grow(self, tokens: int) -> None:
        self._pieces.append(_piece(tokens))

    def num_to_seal(self, first_raw: int, recent_raw: int) -> int:
        """How many tokens `seal` would encode."""
        num_raw = self.offset - self.start - self.sealed_tokens
        first = min(max(0, first_raw - (self.offset - num_raw)), num_raw)
        return max(0, num_raw - recent_raw - first)

    def seal(self, k: Codec, v: Codec, *, first_raw: int = 4, recent_raw: int = 128) -> int:
        """Encode what is raw, but for the sequence's first tokens and the newest; tells how many tokens were encoded.

        The buffers go; the newest tokens move to one of their own, with the room that was left.
        """
        num_raw = sum(piece.used for piece in self._pieces)
        start = self.offset - num_raw
        first, last = min(max(0, first_raw - start), num_raw), num_raw - recent_raw
        if last <= first:
            return 0
        all_k, all_v = self._raw_arrays()
        tail = _tail_of(all_k, all_v, last, num_raw, room=self.capacity - num_raw)
        flat_k, flat_v = all_k.squeeze(0), all_v.squeeze(0)  # an index would copy
        kept = [copy_rows(flat, 0, first) for flat in (flat_k, flat_v)] if first else []
        next_k, next_v = flat_k[:, first:last], flat_v[:, first:last]
        mx.eval(tail.buffer.arrays(), kept, next_k, next_v)  # at once: the host waits for it each time
        sealed = [SealedPart(*(RawCodec().adopt(array, start) for array in kept))] if kept else []
        sealed.append(SealedPart(k.encode(next_k, start + first), v.encode(next_v, start + first)))
        self._sealed += sealed
        self._pieces = [tail]
        self._count_sealed()
        self._join_sealed()
        return last - first

    def _raw_arrays(self) -> tuple[mx.array, mx.array]:
        """K and V of all that is not sealed; what comes after it in them is room."""
        raw = self._raw_parts()
        if len(raw) == 1:
            return raw[0].k_buffer, raw[0].v_buffer
        return Parts((tuple(raw),)).joined(raw[0].k_buffer)

    def _join_sealed(self) -> None:
        """Join neighbours of like size and the same codecs: parts stay few, and a token is copied seldom."""
        while len(self._sealed) > 1:
            a, b = self._sealed[-2:]
            if (a.k.codec, a.v.codec) != (b.k.codec, b.v.codec) or a.num_tokens > 2 * b.num_tokens:
                return
            self._sealed[-2:] = [SealedPart(a.k.codec.join(a.k, b.k), a.v.codec.join(a.v, b.v))]
            self._count_sealed()

    def append(self, k: mx.array, v: mx.array) -> None:
        """Write tokens; the caller has made sure that there is room."""
        start, total = 0, k.shape[2]
        for piece in self._pieces:
            count = min(piece.free, total - start)
            if count:
                piece.buffer.put(piece.used, k[:, :, start : start + count], v[:, :, start : start + count])
                piece.used += count
                start += count
        self._count(total, start)

    def runs_with_next(self, k: mx.array, v: mx.array) -> list[cpu.Run]:
        """Make room for one more token, which the caller writes where the runs say. Only if `has_runs`."""
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
        if cuda.fits(keys, values):
            self._step = cuda.Step((self,), keys, values, self._counters)
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


def _tail_of(k: mx.array, v: mx.array, start: int, end: int, *, room: int) -> Piece:
    """Tokens [start, end) and the room for more, in a buffer of their own."""
    tail = _piece(end - start + room)
    if start < end:
        tail.buffer.adopt(*(_moved(array, start, tail.buffer.size) for array in (k, v)))
        tail.used = end - start
    return tail


def _moved(array: mx.array, start: int, size: int) -> mx.array:
    """`size` tokens from `start` on, in memory of their own; zeros where there are none."""
    missing = start + size - array.shape[2]
    if missing <= 0:
        return copy_rows(array, start, start + size)
    room = mx.zeros((*array.shape[:2], missing, array.shape[3]), array.dtype)
    return mx.concatenate([array[:, :, start:], room], axis=2)


def _piece(num_tokens: int) -> Piece:
    return Piece(Buffer(round_up(num_tokens)))


def _part(piece: Piece) -> RawPart:
    assert piece.buffer.k is not None
    assert piece.buffer.v is not None
    return RawPart(piece.buffer.k, piece.buffer.v, piece.used)

"""Full attention, one sequence: what others computed before, then its own tokens."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from kvstrata.attention.cpu import step as cpu_step
from kvstrata.attention.cuda.step import Slot
from kvstrata.attention.cuda.tables import Place
from kvstrata.attention.run_cache import RunCache
from kvstrata.attention.segments import Part, Source
from kvstrata.kv.attention_layer import AttentionLayer, Watched
from kvstrata.kv.buffers import KvShape, Piece, Pieces
from kvstrata.kv.own_kv import OwnTokens


class FullLayer(AttentionLayer):
    """`before` are tokens that others hold: maybe still being written by their owner, never by this layer."""

    def __init__(
        self,
        capacity: int,
        before: Sequence[Source] = (),
        raw_tokens: int | None = None,
        shape: KvShape | None = None,
    ) -> None:
        """Room for `capacity` tokens; buffers for no more than `raw_tokens` of them at once, if what is older is sealed
        in time."""
        super().__init__(sum(source.num_tokens for source in before))
        self._before = tuple(before)
        self._pieces = Pieces(capacity, raw_tokens, shape)
        self.own = OwnTokens(self.offset, self._pieces)
        self._runs = RunCache()

    @property
    def nbytes(self) -> int:
        """Its own: what comes before is counted where it is held."""
        return self.own.nbytes

    @property
    def token_bytes(self) -> int:
        return self._pieces.token_bytes

    @property
    def has_runs(self) -> bool:
        return self._runs.covers(self._parts_before())

    def arrays(self) -> list[mx.array]:
        return self._pieces.arrays()

    def grow(self, tokens: int) -> None:
        self._pieces.grow(tokens)

    def append(self, k: mx.array, v: mx.array) -> None:
        """Write tokens; the caller has made sure that there is room."""
        self._count(k.shape[2], self._pieces.append(k, v))

    def runs_with_next(self) -> list[cpu_step.Run]:
        """Make room for one more token, which the caller writes where the runs say. Only if `has_runs`."""
        runs, is_placed = self._pieces.runs_with_next()
        self._count(1, int(is_placed))
        return [*self._runs.of(self._parts_before()), *runs]

    def next_slot(self) -> Slot:
        slot = self._pieces.next_slot()
        if slot is None:
            raise self._no_room(1)
        return slot

    def count_next(self) -> None:
        self._pieces.count_next()
        self.offset += 1

    def next_place(self) -> Place:
        used = self._pieces.next_piece.used
        return Place(used, used + 1)

    @property
    def most_tokens(self) -> int:
        return 0

    def watched(self) -> list[Watched]:
        return [self._pieces, *self._before]

    def next_piece(self) -> Piece | None:
        return self._pieces.next_piece

    def put_last(self, k: mx.array, v: mx.array) -> None:
        self._pieces.put_last(k, v)

    def before_slot(self) -> tuple[Part, ...]:
        """All that it reads beside the buffer that the next token goes to."""
        self._pieces.make_room(1)
        if not (self._before or self.own.sealed or self._pieces.num_full):
            return ()
        return (*self._parts_before(), *self._pieces.full_parts())

    def _count(self, wanted: int, written: int) -> None:
        if written != wanted:
            raise self._no_room(wanted)
        self.offset += wanted

    def _no_room(self, wanted: int) -> IndexError:
        return IndexError(f"{wanted} tokens do not fit: {self._pieces.capacity} reserved, {self.offset} used")

    def parts(self) -> tuple[Part, ...]:
        return (*self._parts_before(), *self._pieces.parts())

    def _parts_before(self) -> tuple[Part, ...]:
        """All that it does not write."""
        return (*(part for source in self._before for part in source.parts()), *self.own.sealed)

    def let_go(self) -> None:
        """Keep nothing of what is stored in another way now."""
        self._runs.keep_only(self._parts_before())

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:  # noqa: N803
        if window_size is not None:
            return create_causal_mask(N, self.offset, window_size=window_size)
        if N == 1:
            return None
        return create_causal_mask(N, self.offset) if return_array else "causal"

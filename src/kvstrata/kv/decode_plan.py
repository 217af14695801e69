"""What the next steps of a batch read, found once for as long as it stays the same.

A step of a batch asks every layer of every row what it reads. Between two steps that changes seldom: when a buffer is
full, when tokens are sealed or stored in another way. So a plan remembers the answers, with what would change them,
and a step only moves the places of the new tokens on. Launches read through addresses, of which MLX knows nothing: the
plan keeps what they point to, and hands it to MLX when it changes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import mlx.core as mx

from kvstrata.attention.cuda.rows import Found
from kvstrata.attention.cuda.step import Launch
from kvstrata.attention.cuda.tables import Tables, places_of
from kvstrata.kv.attention_layer import AttentionLayer, Watched
from kvstrata.kv.attention_rows import AttentionRows
from kvstrata.kv.sequence_cache import SequenceCache


class LayerPlan(NamedTuple):
    """What was found of one layer, and while it holds."""

    found: Found
    watched: list[Watched]
    versions: list[Hashable]

    @property
    def is_good(self) -> bool:
        return [watched.version for watched in self.watched] == self.versions


class Group(NamedTuple):
    """Layers that are stored alike: they have the same tables, and new tokens go to the same places."""

    tables: Tables
    kv_heads: int
    rows: Sequence[AttentionLayer]  # of one of the layers


class DecodePlan:
    def __init__(
        self, sequences: Sequence[SequenceCache], rows: Sequence[AttentionRows], layers: Sequence[LayerPlan]
    ) -> None:
        self.rows = rows  # by layer
        self.layers = layers
        self._groups, self._numbers = _grouped(rows, layers)
        self._sequences = sequences
        self._attending = [layer for each in rows for layer in each.layers]
        self._pieces = [piece for layer in self._attending if (piece := layer.next_piece()) is not None]
        self._ends = _ends(sequences, rows)
        self._watched = [watched for layer in layers for watched in layer.watched]
        self._versions = [version for layer in layers for version in layer.versions]

    @property
    def has_room(self) -> bool:
        """For a token of every row, in the buffers that they are in."""
        return all(s.num_tokens < end for s, end in zip(self._sequences, self._ends, strict=True))

    @property
    def is_good(self) -> bool:
        """Whether the next step can go by it."""
        return self.has_room and [watched.version for watched in self._watched] == self._versions

    def reads(self, arrays: Sequence[mx.array]) -> bool:
        """Whether its addresses point to one of these."""
        held = {id(array) for layer in self.layers for array in layer.found.held}
        return any(id(array) in held for array in arrays)

    def launches(self) -> list[Launch]:
        """Of each layer, for the next tokens."""
        places = [
            places_of(group.tables, [layer.next_place() for layer in group.rows], group.kv_heads)
            for group in self._groups
        ]
        made = []
        for number, layer in zip(self._numbers, self.layers, strict=True):
            (reads, counters, *_), at = layer.found, places[number]
            tables = reads.tables
            made.append(Launch(at.table, tables.pieces, tables.kinds, reads.addresses, counters, at.num_blocks))
        return made

    def count(self) -> None:
        """The next tokens are written."""
        for layer in self._attending:
            layer.offset += 1
        for piece in self._pieces:
            piece.used += 1
        for sequence in self._sequences:
            sequence.num_tokens += 1

    def end(self) -> None:
        """No step goes by it any more."""
        part_with(self.layers)


def plan_after(
    before: DecodePlan | None, sequences: Sequence[SequenceCache], rows: Sequence[AttentionRows]
) -> DecodePlan | None:
    """A plan for the next step: `before`, if that is good, else what is good of it and what is found anew. None: the
    step has to go layer by layer."""
    if before is not None and before.is_good:
        return before
    known: Sequence[LayerPlan | None] = before.layers if before is not None and before.has_room else [None] * len(rows)
    layers: list[LayerPlan] = []
    new: list[mx.array] = []
    for each, layer in zip(rows, known, strict=True):
        now = layer if layer is not None and layer.is_good else _find(each)
        if now is None:
            break
        layers.append(now)
        if now is not layer:
            new += [now.found.reads.addresses, now.found.counters]
    # Apart from the step: CUDA gets a graph of what is evaluated together, and one that differs from those of the steps
    # before would have to be made anew, with all of its kernels.
    mx.async_eval(new)
    is_whole = len(layers) == len(rows)
    if before is not None:
        kept = {id(layer) for layer in layers} if is_whole else set()
        part_with([layer for layer in before.layers if id(layer) not in kept])
    return DecodePlan(sequences, rows, layers) if is_whole else None


def part_with(layers: Sequence[LayerPlan]) -> None:
    """Launches that were issued may still read what these point to. MLX keeps what it is given until all that was
    issued before has ended; given with each step, it would cost two microseconds an array."""
    held = [array for layer in layers for array in layer.found.held]
    if held:
        mx.async_eval(mx.zeros((1,)), held)


def _find(rows: AttentionRows) -> LayerPlan | None:
    found = rows.find()
    if found is None:
        return None
    watched = [each for layer in rows.layers for each in layer.watched()]
    return LayerPlan(found, watched, [each.version for each in watched])


def _ends(sequences: Sequence[SequenceCache], rows: Sequence[AttentionRows]) -> list[int]:
    """How many tokens each sequence can have in the buffers that it is in."""
    ends = []
    for number, sequence in enumerate(sequences):
        pieces = [rows_of_layer.layers[number].next_piece() for rows_of_layer in rows]
        ends.append(sequence.num_tokens + min([piece.free for piece in pieces if piece is not None], default=1 << 30))
    return ends


def _grouped(rows: Sequence[AttentionRows], layers: Sequence[LayerPlan]) -> tuple[list[Group], list[int]]:
    """The groups, and which one each layer is in."""
    known: dict[tuple[object, ...], int] = {}
    groups: list[Group] = []
    numbers = []
    for each, layer in zip(rows, layers, strict=True):
        tables, kv_heads = layer.found.reads.tables, layer.found.kv_heads
        # Rings of two sizes may be at the same places now, and not later.
        places = tuple([(row.next_place(), row.most_tokens) for row in each.layers])
        number = known.setdefault((id(tables), kv_heads, places), len(groups))
        if number == len(groups):
            groups.append(Group(tables, kv_heads, each.layers))
        numbers.append(number)
    return groups, numbers

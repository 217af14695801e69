"""Decode plan: what the next steps of a batch read, found once and kept while it stays the same.

A step of a batch asks every layer of every row what the layer reads. Answers change seldom between two steps: when a
buffer is full, when tokens are sealed or transcoded. A plan keeps the answers and watches what would change them; a
step only advances the places of the new tokens. Launches read through addresses, of which MLX knows nothing: the plan
keeps the arrays behind the addresses, and hands them to MLX when the plan changes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import mlx.core as mx

from kvstrata.attention.cuda.step import PlannedReads, StepLaunch
from kvstrata.attention.cuda.tables import StepTables, places_of
from kvstrata.kv.attention_layer import AttentionLayer, Versioned
from kvstrata.kv.attention_rows import AttentionRows
from kvstrata.kv.sequence_cache import SequenceCache


class LayerPlan(NamedTuple):
    """The answers of one layer, and the versions for which they are valid."""

    reads: PlannedReads
    watched: list[Versioned]
    versions: list[Hashable]

    @property
    def is_good(self) -> bool:
        return [watched.version for watched in self.watched] == self.versions


class LaunchGroup(NamedTuple):
    """Layers with the same tables, whose new tokens go to the same places."""

    tables: StepTables
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
        self._buffers = [buffer for layer in self._attending if (buffer := layer.next_buffer()) is not None]
        self._ends = _ends(sequences, rows)
        self._watched = [watched for layer in layers for watched in layer.watched]
        self._versions = [version for layer in layers for version in layer.versions]

    @property
    def has_free_slots(self) -> bool:
        """Whether the present buffers have a free slot for the next token of every row."""
        return all(s.num_tokens < end for s, end in zip(self._sequences, self._ends, strict=True))

    @property
    def is_good(self) -> bool:
        """Whether the plan is valid for the next step."""
        return self.has_free_slots and [watched.version for watched in self._watched] == self._versions

    def reads(self, arrays: Sequence[mx.array]) -> bool:
        """Whether the plan's addresses point to one of these arrays."""
        held = {id(array) for layer in self.layers for array in layer.reads.held}
        return any(id(array) in held for array in arrays)

    def launches(self) -> list[StepLaunch]:
        """Return the launch of each layer for the next tokens."""
        places = [
            places_of(group.tables, [layer.next_place() for layer in group.rows], group.kv_heads)
            for group in self._groups
        ]
        made = []
        for number, layer in zip(self._numbers, self.layers, strict=True):
            (reads, counters, *_), at = layer.reads, places[number]
            tables = reads.tables
            made.append(StepLaunch(at.table, tables.pieces, tables.kinds, reads.addresses, counters, at.num_blocks))
        return made

    def count(self) -> None:
        """Count the next tokens, which the launches write."""
        for layer in self._attending:
            layer.offset += 1
        for buffer in self._buffers:
            buffer.used += 1
        for sequence in self._sequences:
            sequence.num_tokens += 1

    def end(self) -> None:
        """Release the plan: no further step uses it."""
        release_after_launches(self.layers)


def plan_after(
    before: DecodePlan | None, sequences: Sequence[SequenceCache], rows: Sequence[AttentionRows]
) -> DecodePlan | None:
    """Return a plan for the next step: `before` if it is valid, else a new plan that keeps the valid layers of
    `before`. None: the step has to go layer by layer."""
    if before is not None and before.is_good:
        return before
    known: Sequence[LayerPlan | None] = (
        before.layers if before is not None and before.has_free_slots else [None] * len(rows)
    )
    layers: list[LayerPlan] = []
    new: list[mx.array] = []
    for each, layer in zip(rows, known, strict=True):
        now = layer if layer is not None and layer.is_good else _find(each)
        if now is None:
            break
        layers.append(now)
        if now is not layer:
            new += [now.reads.reads.addresses, now.reads.counters]
    # Evaluated apart from the step: CUDA gets one graph of all arrays that are evaluated together, and a graph unlike
    # the earlier steps' would have to be built anew, with all of its kernels.
    mx.async_eval(new)
    is_whole = len(layers) == len(rows)
    if before is not None:
        kept = {id(layer) for layer in layers} if is_whole else set()
        release_after_launches([layer for layer in before.layers if id(layer) not in kept])
    return DecodePlan(sequences, rows, layers) if is_whole else None


def release_after_launches(layers: Sequence[LayerPlan]) -> None:
    """Hand MLX the arrays that layers' addresses point to, because issued launches may still read them. MLX keeps the
    arrays until all work issued before has ended. Handed over at each step, an array would cost two microseconds."""
    held = [array for layer in layers for array in layer.reads.held]
    if held:
        mx.async_eval(mx.zeros((1,)), held)


def _find(rows: AttentionRows) -> LayerPlan | None:
    found = rows.plan_reads()
    if found is None:
        return None
    watched = [each for layer in rows.layers for each in layer.watched()]
    return LayerPlan(found, watched, [each.version for each in watched])


def _ends(sequences: Sequence[SequenceCache], rows: Sequence[AttentionRows]) -> list[int]:
    """Return how many tokens each sequence can have in its present buffers."""
    ends = []
    for number, sequence in enumerate(sequences):
        buffers = [rows_of_layer.layers[number].next_buffer() for rows_of_layer in rows]
        free = min([buffer.free for buffer in buffers if buffer is not None], default=1 << 30)
        ends.append(sequence.num_tokens + free)
    return ends


def _grouped(rows: Sequence[AttentionRows], layers: Sequence[LayerPlan]) -> tuple[list[LaunchGroup], list[int]]:
    """Return the groups, and the number of each layer's group."""
    known: dict[tuple[object, ...], int] = {}
    groups: list[LaunchGroup] = []
    numbers = []
    for each, layer in zip(rows, layers, strict=True):
        tables, kv_heads = layer.reads.reads.tables, layer.reads.kv_heads
        # Rings of two sizes may have the same places now, but not later.
        places = tuple([(row.next_place(), row.most_tokens) for row in each.layers])
        number = known.setdefault((id(tables), kv_heads, places), len(groups))
        if number == len(groups):
            groups.append(LaunchGroup(tables, kv_heads, each.layers))
        numbers.append(number)
    return groups, numbers

"""mlx-lm's files of prompt caches: taken in after they were checked against the model, and written for mlx-lm to read.

Called on worker threads, like engine/moving.py, which it is a part of. Bytes are read and cut there, arrays are made on
the engine's thread in small steps.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from kvstrata.attention.parts import SealedPart
from kvstrata.bundle.reading import CHANGED
from kvstrata.bundle.tensors import TensorNamed, TensorTable, encode_table
from kvstrata.engine.loop import Loop
from kvstrata.engine.recompute import checking
from kvstrata.errors import InvalidRequest, UnusableFile
from kvstrata.index.ids import TokenIds
from kvstrata.layers.kinds import Layout
from kvstrata.spans.checks import check_mark, check_parts
from kvstrata.spans.marks import Mark, MarkState, needs_marks, take_mark
from kvstrata.spans.prompt_file import (
    TOKENS,
    LayerFile,
    Scalars,
    Stored,
    flattened,
    layers_in,
    metadata_of,
    scalar_kinds,
)
from kvstrata.spans.prompt_in import FullLayerIn, cut_tensor, full_layer, num_tokens_in, other_layer, sealed_piece
from kvstrata.spans.prompt_out import LayerOut, layers_out, tensors_of, trees_of
from kvstrata.spans.span import Span
from kvstrata.store.errands import Steps
from kvstrata.store.outgoing import Leaving

MAX_TEXT = 256  # characters of a name
INTEGERS: Mapping[str, str] = {"I32": "<i4", "I64": "<i8", "U32": "<u4", "U64": "<u8", "I16": "<i2", "U16": "<u2"}
WITHOUT_PROMPT = (
    "A prompt cache of mlx-lm does not say which tokens it holds. Give the prompt that it was made of: --prompt-file "
    f"TEXT, --messages JSON or --tokens JSON. {CHANGED}"
)

Wait = Callable[[Callable[[Loop], Steps[Any]]], Any]  # have an errand done, and wait for it


# In.


class PromptFileIn:
    """One file. What can be said without arrays is said when it is made. Raises ConfigError, UnusableFile."""

    def __init__(self, table: TensorTable, layout: Layout) -> None:
        self.table = table
        self._layout = layout
        self._tensors = {name: Stored(place.dtype, place.shape) for name, place in table.places.items()}
        self._scalars = Scalars(scalar_kinds(table.metadata), self._number, self._text)
        files = layers_in(layout, table.metadata, self._scalars)
        self._layers: list[LayerFile] = files
        self.num_tokens = num_tokens_in(list(zip(layout.flat(), files, strict=True)), self._scalars)

    @property
    def own_ids(self) -> TokenIds | None:
        """Where `export --mlx` wrote it; anyone may have."""
        text = self.table.metadata.get(f"0.{TOKENS}")
        if text is None:
            return None
        try:
            octets = base64.b64decode(text, validate=True)
            return np.frombuffer(octets, "<i4").astype(np.int32)
        except (binascii.Error, ValueError) as error:
            raise UnusableFile(f"The token ids in the file cannot be read. {CHANGED}") from error

    def span(self, wait: Wait, ids: TokenIds) -> Span:
        """What it holds, checked against the model. Nothing of it is stored yet."""
        num_tokens = len(ids)
        if self.num_tokens is not None and self.num_tokens != num_tokens:
            raise InvalidRequest(
                f"The prompt has {num_tokens} tokens, and the prompt cache holds {self.num_tokens}. Give the prompt "
                f"that it was made of. {CHANGED}",
                code="other_prompt",
            )
        held: dict[int, tuple[SealedPart, ...]] = {}
        states: list[MarkState] = []
        for i, (spec, file) in enumerate(zip(self._layout.flat(), self._layers, strict=True)):
            if spec.kind == "full":
                layer = full_layer(spec, file, self._tensors, self._scalars, num_tokens)
                held[i] = tuple(self._parts(wait, layer, num_tokens))
                states.append(None)
            else:
                states.append(wait(lambda _, i=i, file=file: self._other(i, file, num_tokens)))
        span = Span(self._layout, 0, num_tokens, dict(held))
        if needs_marks(self._layout):
            span.marks[num_tokens] = Mark(num_tokens, tuple(states))
        wait(lambda loop: self._checking(loop, ids, span))
        return span

    def _parts(self, wait: Wait, layer: FullLayerIn, num_tokens: int) -> Iterator[SealedPart]:
        octets = {path: self._read(path) for side in layer.sides for path in side}
        for start, end in layer.pieces(num_tokens):
            k, v = ([cut_tensor(octets[p], self._tensors[p], start, end) for p in side] for side in layer.sides)
            yield wait(lambda _, k=k, v=v, start=start: _in_one_step(lambda: sealed_piece(layer, k, v, start)))

    def _other(self, index: int, file: LayerFile, num_tokens: int) -> Steps[MarkState]:
        yield
        spec = self._layout.flat()[index]
        return other_layer(spec, file, self._tensors, self._scalars, self._read, num_tokens=num_tokens)

    def _checking(self, loop: Loop, ids: TokenIds, span: Span) -> Steps[None]:
        check_parts(self._layout, {layer: span.sealed(layer)[0] for layer in span.layers})
        if needs_marks(self._layout):
            like = yield from any_mark(loop)
            assert like is not None
            check_mark(self._layout, span.marks[span.end], span.end, like)
        yield from checking(loop.runner, ids, span)

    def _read(self, path: str) -> np.ndarray:
        return np.frombuffer(self.table.read(path), np.uint8)

    def _number(self, path: str) -> int:
        stored = self._tensors.get(path)
        if stored is None or stored.dtype not in INTEGERS or stored.shape not in ((), (1,)):
            raise UnusableFile(f"The prompt cache has no number at {path[:40]}. {CHANGED}")
        return int(np.frombuffer(self.table.read(path), INTEGERS[stored.dtype])[0])

    def _text(self, path: str) -> str:
        stored = self._tensors.get(path)
        if stored is None or stored.dtype not in INTEGERS or len(stored.shape) != 1 or stored.shape[0] > MAX_TEXT:
            raise UnusableFile(f"The prompt cache has no name at {path[:40]}. {CHANGED}")
        numbers = np.frombuffer(self.table.read(path), INTEGERS[stored.dtype]).tolist()
        return "".join(chr(number) for number in numbers if 0 < number < 128)


def any_mark(loop: Loop) -> Steps[Mark | None]:
    """What a mark of this model looks like; None: it needs none."""
    yield
    if not needs_marks(loop.runner.layout):
        return None
    cache = loop.runner.new_cache(1)
    loop.runner.prefill(cache, [0])
    return take_mark(cache)


def _in_one_step(make: Callable[[], Any]) -> Steps[Any]:
    yield
    return make()


# Out.


class PromptFileOut:
    """What leaves, as a file that mlx-lm's own loader takes."""

    def __init__(self, layout: Layout, leaving: Leaving, model_name: str) -> None:
        """On the engine's thread."""
        mark = leaving.marks.get(len(leaving.ids))
        self._layers = layers_out(layout, leaving.ranges, mark)
        names, self._trees = trees_of(layout, self._layers)
        tokens = base64.b64encode(leaving.ids.astype("<i4").tobytes()).decode()
        own = {"model": model_name, "tokenizer_config": json.dumps({}), TOKENS: tokens}
        self._metadata = metadata_of(names, self._trees, own)

    def pieces(self, wait: Wait) -> Iterator[memoryview]:
        leaves = list(flattened(self._trees))
        scalars = [(path, *_scalar(leaf)) for path, leaf in leaves if not isinstance(leaf, Stored)]
        named = [TensorNamed(path, dtype, shape) for path, dtype, shape, _ in scalars]
        named += [TensorNamed(path, leaf.dtype, leaf.shape) for path, leaf in leaves if isinstance(leaf, Stored)]
        yield memoryview(encode_table(named, self._metadata))
        yield memoryview(b"".join(octets for *_, octets in scalars))
        for layer in self._layers:
            yield from self._tensors(wait, layer)

    def _tensors(self, wait: Wait, layer: LayerOut) -> Iterator[memoryview]:
        for octets in wait(lambda _: tensors_of(layer)):
            yield memoryview(octets)


def _scalar(leaf: int | str | None) -> tuple[str, tuple[int, ...], bytes]:
    """As mlx-lm writes them: a number, the characters of a text, nothing."""
    if leaf is None:
        return "F32", (0,), b""
    if isinstance(leaf, str):
        return "I32", (len(leaf),), np.array([ord(each) for each in leaf], "<i4").tobytes()
    return "I32", (), np.array(leaf, "<i4").tobytes()

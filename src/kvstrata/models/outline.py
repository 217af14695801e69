"""Outline of a model: its layers and memory, from headers and config alone. No weight is read, nothing is computed.

mlx-lm builds the model over arrays that are not read yet, and a short prompt is run through it that is never evaluated:
shapes and dtypes of the caches are known all the same. So the outline says what `probe` will measure.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from kvstrata.attention.dispatch import install
from kvstrata.codecs import backends
from kvstrata.errors import ModelError
from kvstrata.kv.layout import LayerSpec, Layout, measure_layers, read_layer_specs
from kvstrata.kv.sequence_cache import SequenceCache
from kvstrata.models.cpu_options import DEFAULT, CpuOptions
from kvstrata.models.find import FoundModel, find_local_model
from kvstrata.models.folder import check_folder, weight_files
from kvstrata.models.load import build_lazily, context_tokens
from kvstrata.models.placement import choose_form, weight_bytes_in_memory
from kvstrata.packed.form import CpuForm
from kvstrata.platform.device import MlxBackend
from kvstrata.platform.files import raise_open_files

if TYPE_CHECKING:
    import mlx.nn as nn

PROMPT = (1, 2, 3, 4, 5)
CAPACITY = 16


@dataclass(frozen=True)
class ModelOutline:
    """Sizes and layers of a model for one back-end."""

    name: str
    backend: MlxBackend  # that the outline is made for
    layout: Layout
    weight_bytes: int  # in memory
    file_bytes: int
    context_tokens: int
    vocab_size: int
    num_heads: int  # of queries; 0: the config does not say
    widest: int  # values that the widest layer makes of a token, the output layer apart
    dtype: str  # of KV: "bfloat16"
    weights: str = ""  # the form that they will have, where it is not that of the files: for people to read


def outline(
    name_or_path: str | None, backend: MlxBackend, *, limit_bytes: int | None = None, cpu: CpuOptions = DEFAULT
) -> ModelOutline:
    """Return the outline of a model on this machine. Raises ModelError, also when it is not downloaded yet.

    `limit_bytes`: of memory, which decides how many bits plain weights get on a CPU."""
    with _folder_here(name_or_path) as found:
        raise_open_files()
        module, config = build_lazily(found.folder)
        form = _form(module, backend, cpu, limit_bytes)
        weight_bytes = weight_bytes_in_memory(module, form)
        widest = _widest(module)
        if backend == "cpu":
            module.set_dtype(mx.float32)
        layout, logits = outline_layers(module, is_mla="kv_lora_rank" in _text_config(config))
        return ModelOutline(
            name=found.name,
            backend=backend,
            layout=layout,
            weight_bytes=weight_bytes,
            file_bytes=sum(path.stat().st_size for path in weight_files(found.folder)),
            context_tokens=context_tokens(config),
            vocab_size=logits.shape[-1],
            num_heads=int(_text_config(config).get("num_attention_heads") or 0),
            widest=widest,
            dtype=_dtype(layout, logits),
            weights=form.words if form else "",
        )


def outline_layers(module: Any, *, is_mla: bool = False) -> tuple[Layout, mx.array]:
    """Return the layers with their cost, and logits that are not evaluated.

    `is_mla`: the model computes on fetched arrays of a cache, so every sequence gets passes of its own."""
    install()
    layout = Layout(read_layer_specs(module), batching="per_sequence")
    try:
        specs, logits = _run(module, layout)
    except Exception:  # noqa: BLE001
        # Whatever a model does with caches that are not mlx-lm's: it will be served with those, as the probe finds.
        specs, logits = _run(module, Layout((LayerSpec("foreign"),) * len(layout.layers), batching="per_sequence"))
    alone = is_mla or any(spec.kind in ("foreign", "chunked") for spec in specs)
    return Layout(specs, batching="per_sequence" if alone else "batched"), logits


def _run(module: Any, layout: Layout) -> tuple[tuple[LayerSpec, ...], mx.array]:
    cache = SequenceCache(layout, module, CAPACITY)
    with backends.without_kernels():
        logits = module(mx.array([PROMPT]), cache=cache.caches())
    return measure_layers(layout.layers, cache.layers, len(PROMPT)), logits


@contextmanager
def _folder_here(name_or_path: str | None) -> Iterator[FoundModel]:
    """Yield the model's folder. A GGUF file that is not converted gets a temporary folder without weights."""
    found = find_local_model(name_or_path)
    if found.folder.suffix != ".gguf":
        check_folder(found.folder)
        yield found
        return
    from kvstrata.models.gguf.container import read
    from kvstrata.models.gguf.convert import write_outline

    with TemporaryDirectory(prefix="kvstrata-plan-") as name:
        try:
            write_outline(read(found.folder), Path(name))
        except OSError as error:
            raise ModelError(f"The outline of {found.folder} could not be written: {error}. Set TMPDIR") from error
        yield FoundModel(found.name, Path(name))


def _form(module: nn.Module, backend: MlxBackend, cpu: CpuOptions, limit_bytes: int | None) -> CpuForm | None:
    if backend != "cpu":
        return None
    allowed_bytes = limit_bytes if limit_bytes is not None else 1 << 62
    return choose_form(module, cpu, allowed_bytes)


def _dtype(layout: Layout, logits: mx.array) -> str:
    kept = (spec.dtype for spec in layout.flat() if spec.kv_heads)
    return str(next(kept, logits.dtype)).rpartition(".")[2]


def _widest(module: nn.Module) -> int:
    from kvstrata.packed.place import weight_layers

    rows = sorted({layer["weight"].shape[-2] for layer in weight_layers(module)}, reverse=True)
    # Embeddings and the output layer have a row for each token that there is; prompts never run through the latter.
    return rows[1] if len(rows) > 1 else rows[0]


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the text model. Multimodal configs keep it in `text_config`."""
    return {**config, **(config.get("text_config") or {})}

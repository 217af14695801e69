"""Loads a model for serving: finds its folder, checks it, lets mlx-lm build it, and says what it is.

Knows mlx-lm's loader and the hub. Code that comes with a model is never run. On a CPU weights stay packed or become
float32 (cpu_form.py); on Metal and CUDA dtype and quantization stay as they are.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from kvstrata.errors import ModelError
from kvstrata.kv.layout import arrays_in
from kvstrata.models.cpu_form import choose_form
from kvstrata.models.cpu_options import DEFAULT, CpuOptions
from kvstrata.models.files import check_folder, read_json
from kvstrata.models.find import find
from kvstrata.models.fingerprint import fingerprint
from kvstrata.models.generation import read_sampling_defaults
from kvstrata.models.loaded import LoadedModel
from kvstrata.models.room import check_room, room_bytes
from kvstrata.packed.form import CpuForm
from kvstrata.platform.files import raise_open_files
from kvstrata.platform.logging import begin

if TYPE_CHECKING:
    import mlx.nn as nn
    from mlx_lm.tokenizer_utils import TokenizerWrapper

logger = logging.getLogger(__name__)

CONTEXT_KEYS = ("max_position_embeddings", "max_sequence_length", "max_seq_len", "n_positions", "seq_length", "n_ctx")
# Purely recurrent models know no limit; a budget of memory is what ends their context.
UNLIMITED_CONTEXT_TOKENS = 1 << 20


def load(
    name_or_path: str | None,
    *,
    adapter: Path | None = None,
    memory_limit_bytes: int | None = None,
    cpu: CpuOptions = DEFAULT,
) -> LoadedModel:
    """A folder, a hub id, or None for the default model. Raises ModelError, before the weights are read where they
    would take more than the limit or than what is free."""
    begin("model files", "Looking for the model's files")
    found = find(name_or_path)
    folder = found.folder
    check_folder(folder)
    raise_open_files()  # each file of the weights stays open until it is read
    module, config, form = _loaded(folder, adapter, memory_limit_bytes, cpu)
    begin("tokenizer", "Reading the tokenizer")
    tokenizer = _tokenizer(folder, config)
    try:
        vocab_size = _num_logits(module)
    except Exception as error:
        if form is None or not form.packs:
            raise
        # Some code reads a layer's weight itself: adapters of the kind DoRA, for one.
        reason = f"{type(error).__name__}: {_shortened(str(error))}"
        logger.warning("The model does not run with packed weights (%s): they become float32.", reason)
        del module
        module, config, form = _loaded(folder, adapter, memory_limit_bytes, replace(cpu, weights="raw"))
        vocab_size = _num_logits(module)
    begin("fingerprint", "Taking the model's fingerprint")
    return LoadedModel(
        name=found.name,
        path=folder,
        module=module,
        tokenizer=tokenizer,
        config=config,
        context_tokens=context_tokens(config),
        vocab_size=vocab_size,
        eos_ids=frozenset(tokenizer.eos_token_ids),
        weight_bytes=sum(array.nbytes for array in _arrays(module)),
        dtype=_dtype(module),
        fingerprint=fingerprint(folder, adapter, form.identity if form else ""),
        weights=form.words if form else "",
        sampling=read_sampling_defaults(folder),
    )


def load_tokenizer(name_or_path: str | None) -> TokenizerWrapper:
    """Of the model that `load` would find, and no more of it. Raises ModelError."""
    folder = find(name_or_path).folder
    check_folder(folder)
    return _tokenizer(folder, read_json(folder / "config.json"))


def _loaded(
    folder: Path, adapter: Path | None, limit_bytes: int | None, cpu: CpuOptions
) -> tuple[nn.Module, dict[str, Any], CpuForm | None]:
    """The module with its weights in memory, its config, and on a CPU the form that they have."""
    begin("weights", f"Reading the weights of {folder.name}")
    module, config = build_lazily(folder)
    form = choose_form(module, cpu, room_bytes(limit_bytes)) if mx.default_device() == mx.cpu else None
    check_room(module, folder, limit_bytes, form)
    if adapter is not None:
        _add_adapter(module, adapter)
    identity = ""
    if form is not None and form.packs:
        begin("fingerprint", "Taking the model's fingerprint")
        identity = fingerprint(folder, adapter, form.identity)
        begin("packing", "Packing the weights (kernels are compiled at the first start, and packed weights are kept)")
    _place(module, folder, form, identity)
    return module, config, form


def context_tokens(config: dict[str, Any]) -> int:
    """Multimodal configs keep it one level down."""
    for part in (config, config.get("text_config") or {}):
        for key in CONTEXT_KEYS:
            if isinstance(part.get(key), int) and part[key] > 0:
                return part[key]
    return UNLIMITED_CONTEXT_TOKENS


def build_lazily(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """The model and its config. Of its weights only the headers are read."""
    from mlx_lm.utils import load_model

    try:
        # Lazy: what is about to be converted need not be read twice.
        return load_model(folder, lazy=True, trust_remote_code=False)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError, OSError) as error:
        raise ModelError(_build_failed(folder, error)) from error


def _build_failed(folder: Path, error: Exception) -> str:
    said = str(error)
    if "not supported" in said:
        return f"{folder}: {said} This version of mlx-lm cannot run it. Choose another model, or a newer kvstrata"
    if "Missing" in said or "parameters not in model" in said:
        return f"The weights in {folder} do not fit its config.json: {_shortened(said)}. Get the model again"
    if "custom module" in said:
        return f"{folder} brings its own code, which kvstrata never runs. Choose a model that mlx-lm supports itself"
    return f"mlx-lm could not load {folder}: {type(error).__name__}: {_shortened(said)}. Get the model again"


def _add_adapter(module: nn.Module, adapter: Path) -> None:
    from mlx_lm.utils import load_adapters

    try:
        load_adapters(module, str(adapter))
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OSError) as error:
        raise ModelError(
            f"The adapter {adapter} could not be loaded: {_shortened(str(error))}. "
            "Give a folder with adapter_config.json and adapters.safetensors that was made for this model"
        ) from error
    module.eval()


def _place(module: nn.Module, folder: Path, form: CpuForm | None, identity: str) -> None:
    """Brings the weights into memory, in the form that the device computes best."""
    try:
        if form is not None:
            from kvstrata.packed.place import place

            place(module, form, identity)
        # Not its parameters alone: frequencies of RoPE are kept apart, and what is lazy belongs to this thread.
        mx.eval(arrays_in(module))
    except (RuntimeError, ValueError) as error:
        raise ModelError(f"The weights in {folder} could not be read: {error}. Get the model again") from error


def _tokenizer(folder: Path, config: dict[str, Any]) -> TokenizerWrapper:
    from mlx_lm import utils

    try:
        # False, not left out: transformers would ask on the terminal.
        return utils.load_tokenizer(folder, {"trust_remote_code": False}, eos_token_ids=config.get("eos_token_id"))
    # tokenizers raises bare Exception for a file that it cannot parse, so nothing narrower will do.
    except Exception as error:
        raise ModelError(
            f"The tokenizer in {folder} could not be loaded: {_shortened(str(error))}. Get the tokenizer's files again"
        ) from error


def _num_logits(module: nn.Module) -> int:
    """From the shape of a forward pass that is never evaluated: configs are not always right about it."""
    from mlx_lm.models.cache import make_prompt_cache

    return module(mx.array([[0]]), cache=make_prompt_cache(module)).shape[-1]


def _arrays(module: nn.Module) -> list[mx.array]:
    """Each once, also where two modules share one."""
    parameters = cast("list[tuple[str, mx.array]]", tree_flatten(module.parameters()))
    return list({id(array): array for _, array in parameters}.values())


def _dtype(module: nn.Module) -> str:
    """The floating dtype that most values have."""
    sizes: dict[mx.Dtype, int] = {}
    for array in _arrays(module):
        if mx.issubdtype(array.dtype, mx.floating):
            sizes[array.dtype] = sizes.get(array.dtype, 0) + array.size
    largest = max(sizes, key=lambda dtype: sizes[dtype], default=mx.float32)
    return str(largest).rpartition(".")[2]


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 300 else f"{line[:300]}..."

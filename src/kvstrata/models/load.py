"""Loads a model for serving: finds its folder, checks it, and lets mlx-lm build it.

Code that comes with a model is never run. On a CPU weights stay packed or become float32 (`placement`); on Metal and
CUDA dtype and quantization stay as they are.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from kvstrata.errors import ModelError
from kvstrata.kv.layout import arrays_in
from kvstrata.models.cpu_options import DEFAULT, CpuOptions
from kvstrata.models.find import find_model
from kvstrata.models.fingerprint import fingerprint
from kvstrata.models.folder import check_folder, read_json
from kvstrata.models.generation_config import SamplingDefaults, read_sampling_defaults
from kvstrata.models.placement import allowed_weight_bytes, check_memory, choose_form
from kvstrata.packed.form import CpuForm
from kvstrata.platform.files import raise_open_files
from kvstrata.platform.logging import begin

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

if TYPE_CHECKING:
    import mlx.nn as nn


@dataclass(frozen=True)
class LoadedModel:
    """Model that is ready to run."""

    name: str  # what /v1/models shows: the hub's id, or the folder's name
    path: Path  # the model folder
    module: nn.Module  # mlx-lm's model
    tokenizer: TokenizerWrapper
    config: dict[str, Any]  # config.json
    context_tokens: int
    vocab_size: int  # number of logits
    eos_ids: frozenset[int]
    weight_bytes: int  # allocated, after load
    dtype: str  # what the model computes in: "float32", "bfloat16"
    fingerprint: str  # blake3 over the content of weights, tokenizer, template, config and adapter, and over their form
    weights: str = ""  # the form that they are in, where it is not that of the files: for people to read
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)  # what its makers recommend


if TYPE_CHECKING:
    import mlx.nn as nn

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
    """Load a folder, a hub id, or the default model (None).

    Raises ModelError, before weights are read when they would take more than the limit or the free memory."""
    begin("model files", "Looking for the model's files")
    found = find_model(name_or_path)
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
    """Load only the tokenizer of the model that `load` would find. Raises ModelError."""
    folder = find_model(name_or_path).folder
    check_folder(folder)
    return _tokenizer(folder, read_json(folder / "config.json"))


def _loaded(
    folder: Path, adapter: Path | None, limit_bytes: int | None, cpu: CpuOptions
) -> tuple[nn.Module, dict[str, Any], CpuForm | None]:
    """Return the module with its weights in memory, its config, and the form of the weights on a CPU."""
    begin("weights", f"Reading the weights of {folder.name}")
    module, config = build_lazily(folder)
    form = choose_form(module, cpu, allowed_weight_bytes(limit_bytes)) if mx.default_device() == mx.cpu else None
    check_memory(module, folder, limit_bytes, form)
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
    """Return the context length. Multimodal configs keep it in `text_config`."""
    for part in (config, config.get("text_config") or {}):
        for key in CONTEXT_KEYS:
            if isinstance(part.get(key), int) and part[key] > 0:
                return part[key]
    return UNLIMITED_CONTEXT_TOKENS


def build_lazily(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model and its config. Only the headers of the weights are read."""
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
    """Read the weights into memory, in the form that the device computes best."""
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
    """Return the number of logits from a forward pass that is not evaluated: configs are not always right."""
    from mlx_lm.models.cache import make_prompt_cache

    return module(mx.array([[0]]), cache=make_prompt_cache(module)).shape[-1]


def _arrays(module: nn.Module) -> list[mx.array]:
    """Return each array once, also when two modules share it."""
    parameters = cast("list[tuple[str, mx.array]]", tree_flatten(module.parameters()))
    return list({id(array): array for _, array in parameters}.values())


def _dtype(module: nn.Module) -> str:
    """Return the floating dtype of most values."""
    sizes: dict[mx.Dtype, int] = {}
    for array in _arrays(module):
        if mx.issubdtype(array.dtype, mx.floating):
            sizes[array.dtype] = sizes.get(array.dtype, 0) + array.size
    largest = max(sizes, key=lambda dtype: sizes[dtype], default=mx.float32)
    return str(largest).rpartition(".")[2]


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 300 else f"{line[:300]}..."

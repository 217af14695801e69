"""Tiny random models: one of each architecture, with a byte-level tokenizer, and in sixteen bits."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvstrata.grammar.compiler import GrammarCompiler
from kvstrata.kv.layout import Layout, arrays_in
from kvstrata.kv.sequence_cache import SequenceCache
from kvstrata.models.load import LoadedModel
from kvstrata.models.probe import probe

VOCAB = 97
_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}

_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "moe_intermediate_size": 32}
_DELTA_NET = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
}

_SPECIFIC: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "qwen3_moe": {**_MOE, "mlp_only_layers": [], "norm_topk_prob": True},
    "gemma3_text": {"sliding_window": 32, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
    "gemma4_text": {
        "num_hidden_layers": 6,
        "global_head_dim": 32,
        "sliding_window": 32,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "tie_word_embeddings": True,
    },
    "qwen3_next": {
        **_MOE,
        **_DELTA_NET,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [],
        "partial_rotary_factor": 0.5,
    },
    "qwen3_5": {
        **_DELTA_NET,
        "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 32,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
    },
    "mamba2": {
        "num_heads": 4,
        "head_dim": 32,
        "intermediate_size": 128,
        "state_size": 16,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 2,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": (0.0, float("inf")),
        "time_step_rank": "auto",
    },
    # Attention and a state side by side in each layer: composite caches.
    "falcon_h1": {
        "num_hidden_layers": 3,
        "mamba_d_head": 16,
        "mamba_d_ssm": 64,
        "mamba_d_state": 16,
        "mamba_n_heads": 4,
        "mamba_chunk_size": 16,
        "embedding_multiplier": 1.0,
        "lm_head_multiplier": 1.0,
        "key_multiplier": 1.0,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_group": 1,
        "topk_group": 1,
    },
}

ARCHITECTURES = tuple(_SPECIFIC)
# Reaches into mlx-lm's caches, so it is served with those.
FOREIGN = "deepseek_v32"

# For what is done to weights: keys have a bias, and it is served as llama is.
_SPECIFIC["qwen2"] = {}

_SPECIFIC[FOREIGN] = {**_SPECIFIC["deepseek_v3"], "index_head_dim": 32, "index_n_heads": 2, "index_topk": 8}


def tiny_config(architecture: str) -> dict[str, Any]:
    return {**_COMMON, **_SPECIFIC[architecture], "model_type": architecture}


def tiny_module(architecture: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A float32 model with random weights, the same for the same seed. `overrides` go into its config."""
    arch = importlib.import_module(f"mlx_lm.models.{architecture}")
    mx.random.seed(seed)
    model = arch.Model(arch.ModelArgs.from_dict({**tiny_config(architecture), **overrides}))
    model.update(
        tree_map(lambda a: a.astype(mx.float32) if mx.issubdtype(a.dtype, mx.floating) else a, model.parameters())
    )
    mx.eval(model.parameters())
    return model


def steady_module(architecture: str, **overrides: Any) -> Any:
    """A tiny model whose rounding errors stay far below the tolerance.

    gemma4 attends without a scale, because trained norms contain it. With random norms attention is so sharp that
    mlx-lm differs from itself in float64 by more than 1e-4.
    """
    model = tiny_module(architecture, **overrides)
    if architecture == "gemma4_text":
        for layer in model.layers:
            layer.self_attn.q_norm.weight = layer.self_attn.q_norm.weight * layer.self_attn.head_dim**-0.5
    return model


@functools.cache
def tiny_loaded(architecture: str, num_layers: int | None = None) -> LoadedModel:
    """Of two layers, as a rule: tests take less time. Some need more, or were made for the bytes of more."""
    config = {**tiny_config(architecture), **({"num_hidden_layers": num_layers} if num_layers else {})}
    module = tiny_module(architecture, **config)
    return LoadedModel(
        name=f"tiny-{architecture}",
        path=Path("nowhere"),
        module=module,
        tokenizer=tiny_tokenizer(),
        config=config,
        context_tokens=_COMMON["max_position_embeddings"],
        vocab_size=VOCAB,
        eos_ids=frozenset(),
        weight_bytes=sum(array.nbytes for array in arrays_in(module.parameters())),
        dtype="float32",
        fingerprint=f"tiny-{architecture}",
    )


def layout_of(loaded: LoadedModel, max_kv_size: int | None = None) -> Layout:
    """Tiny models are probed once: the layout follows from the configuration, not from the weights."""
    architecture, num_layers = loaded.config["model_type"], loaded.config["num_hidden_layers"]
    is_tiny = loaded.config == {**tiny_config(architecture), "num_hidden_layers": num_layers}
    return _tiny_layout(architecture, num_layers, max_kv_size) if is_tiny else probe(loaded.module, max_kv_size)


@functools.cache
def _tiny_layout(architecture: str, num_layers: int, max_kv_size: int | None) -> Layout:
    return probe(tiny_loaded(architecture, num_layers).module, max_kv_size)


def tiny_tokenizer() -> TokenizerWrapper:
    """One printable character for each id."""
    tokenizer = Tokenizer(models.WordLevel({chr(32 + i): i for i in range(VOCAB)}, unk_token=" "))
    tokenizer.decoder = decoders.Fuse()
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


SPECIAL = ("<s>", "</s>", "<|im_end|>", "<think>", "</think>", "[TOOL_CALLS]")
# Added and not special, as in Qwen's and Mistral's vocabularies.
ADDED = ("<tool_call>", "</tool_call>", "[ARGS]", "  ")
MERGES = [
    ("{", '"'),
    ('"', ":"),
    ('"', ","),
    ("t", "r"),
    ("tr", "u"),
    ("tru", "e"),
    ("n", "u"),
    ("nu", "l"),
    ("nul", "l"),
]

MERGES += [("a", "b"), ("ab", "c"), ("1", "0"), ("[", "A"), ("<", "t")]

EOS = ("</s>", "<|im_end|>")
PADDED_LOGITS = 11  # that stand for no token


@functools.cache
def byte_tokenizer() -> TokenizerWrapper:
    vocab: dict[str, int] = {}
    for token in (*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in MERGES)):
        vocab[token] = len(vocab)
    backend = Tokenizer(models.BPE(vocab, MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    backend.add_tokens([AddedToken(token, normalized=False) for token in ADDED])
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False
    )
    return TokenizerWrapper(hf)


def ids_of(text: str) -> list[int]:
    return byte_tokenizer().encode(text, add_special_tokens=False)


def id_of(token: str) -> int:
    (id_,) = ids_of(token)
    return id_


@functools.cache
def byte_model(architecture: str = "llama") -> LoadedModel:
    """Random weights; it has more logits than tokens, and two tokens that end a reply."""
    vocab_size = len(byte_tokenizer().get_vocab()) + PADDED_LOGITS
    # Its config says nothing of that: so its layout is known to be that of the other tiny model.
    return dataclasses.replace(
        tiny_loaded(architecture),
        name="tiny-bytes",
        module=tiny_module(architecture, vocab_size=vocab_size),
        tokenizer=byte_tokenizer(),
        vocab_size=vocab_size,
        eos_ids=frozenset(map(id_of, EOS)),
        fingerprint=f"tiny-bytes-{architecture}",
    )


def new_grammars() -> GrammarCompiler:
    loaded = byte_model()
    return GrammarCompiler(loaded.tokenizer, loaded.vocab_size, loaded.eos_ids)


@functools.cache
def byte_grammars() -> GrammarCompiler:
    return new_grammars()


DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16}
NUM_SEEDS = 3
NUM_TOKENS, NUM_SCORED = 68, 4
MOST = 1.5  # of mlx-lm's own error
# Heads of 32, so that MLX's quantized products take them; these have sizes of their own.
OWN_HEADS = {"mamba2", "deepseek_v3"}
# Keys of Qwen2.5 have a constant part that is many times larger than what differs between tokens.
OFFSET = "llama, keys with an offset"
CASES = (*ARCHITECTURES, OFFSET)
# Both dtypes for one of each kind of layer.
WITH_DTYPES = [
    *((case, "bfloat16") for case in CASES),
    *((case, "float16") for case in ("llama", "gemma3_text", "qwen3_next", OFFSET)),
]


@dataclass(frozen=True)
class Error:
    """Of each token that is scored."""

    ours: np.ndarray
    theirs: np.ndarray  # of the same values in 16 bits


@dataclass(frozen=True)
class Sixteen:
    """One model with the same weights in 16 and in 32 bits, and forced tokens."""

    dtype: mx.Dtype
    model: Any
    layout: Layout
    wide: Any
    wide_layout: Layout
    ids: tuple[int, ...]
    expected: np.ndarray  # [scored, vocab]: float32, mlx-lm's caches
    theirs: np.ndarray  # [scored]: the error of mlx-lm's 16-bit caches

    def error(self, logits: np.ndarray) -> Error:
        return Error(rms(logits - self.expected), self.theirs)


@cache
def sixteen(case: str, dtype_name: str, seed: int) -> Sixteen:
    wide = _module(case, seed)
    dtype = DTYPES[dtype_name]
    wide.update(cast(wide.parameters(), dtype, mx.float32))
    model = _module(case, seed)
    model.update(cast(model.parameters(), dtype))
    mx.eval(wide.parameters(), model.parameters())
    rng = random.Random(f"{case}{seed}")
    ids = tuple(rng.randrange(VOCAB) for _ in range(NUM_TOKENS))
    expected = _mlx_lm(wide, ids)
    theirs = rms(_mlx_lm(model, ids) - expected)
    return Sixteen(dtype, model, _layout(case, dtype_name), wide, _layout(case, None), ids, expected, theirs)


@cache
def _layout(case: str, dtype_name: str | None) -> Layout:
    """It follows from the configuration, not from the weights."""
    model = _module(case, 0)
    model.update(cast(model.parameters(), DTYPES[dtype_name] if dtype_name else mx.float32))
    return probe(model)


def _module(case: str, seed: int) -> Any:
    architecture = case.split(",")[0]
    overrides: dict[str, Any] = {} if architecture in OWN_HEADS else {"head_dim": 32}
    if case != OFFSET:
        return steady_module(architecture, seed=seed, **overrides)
    model = steady_module(architecture, seed=seed, attention_bias=True, **overrides)
    rng = np.random.default_rng(seed)
    for layer in model.layers:
        bias = layer.self_attn.k_proj.bias
        layer.self_attn.k_proj.bias = mx.array(rng.normal(0, 40, bias.shape).astype(np.float32))
    return model


def cast(parameters: Any, *dtypes: mx.Dtype) -> Any:
    for dtype in dtypes:
        parameters = tree_map(
            lambda a, to=dtype: a.astype(to) if mx.issubdtype(a.dtype, mx.floating) else a, parameters
        )
    return parameters


def _mlx_lm(model: Any, ids: Sequence[int]) -> np.ndarray:
    """The last tokens one by one, after a prefill of the others."""
    caches = make_prompt_cache(model)
    model(mx.array([ids[:-NUM_SCORED]]), cache=caches)
    return _stacked([model(mx.array([[token]]), cache=caches)[0, -1] for token in ids[-NUM_SCORED:]])


def run(model: Any, cache_: SequenceCache, tokens: Sequence[int]) -> mx.array:
    """-> [vocab], of the last"""
    logits = model(mx.array([tokens]), cache=cache_.caches())[0, -1]
    cache_.end_pass(len(tokens))
    mx.eval(logits, cache_.arrays())
    return logits


def scored(model: Any, cache_: SequenceCache, ids: Sequence[int], between: Callable[[], None] = lambda: None) -> Any:
    """Logits of the last tokens, one by one; what lies before them and is missing is prefilled."""
    missing = ids[cache_.num_tokens : -NUM_SCORED]
    if missing:
        run(model, cache_, missing)
    logits = []
    for token in ids[-NUM_SCORED:]:
        logits.append(run(model, cache_, [token]))
        between()
    return _stacked(logits)


def _stacked(logits: Sequence[mx.array]) -> np.ndarray:
    return np.array(mx.stack(list(logits)).astype(mx.float32))


def rms(difference: np.ndarray) -> np.ndarray:
    """Over the vocabulary, of each token."""
    return np.sqrt(np.mean(difference.astype(np.float64) ** 2, axis=-1))


def check(case: str, dtype_name: str, error: Callable[[Sixteen], Error], num_seeds: int = NUM_SEEDS) -> None:
    """The median error over seeds and tokens is at most so many times mlx-lm's. In one of the tokens another expert
    may be chosen, by either, and then all logits are others."""
    errors = [error(sixteen(case, dtype_name, seed)) for seed in range(num_seeds)]
    ours, theirs = np.median([e.ours for e in errors]), np.median([e.theirs for e in errors])
    assert ours <= MOST * theirs, f"{ours:.3g}, mlx-lm {theirs:.3g}"

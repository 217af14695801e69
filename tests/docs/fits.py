"""The tables 'how many tokens fit' and 'what to set' of README.md and docs/out-of-memory.md: python -m tests.docs.fits

Makes folders that have the shapes of published models and holes for weights, and asks `kvstrata plan` about each.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from typer.testing import CliRunner

from kvstrata.cli import app

GIB = (16, 36, 64, 128)
QUANTIZATION = {"group_size": 64, "bits": 4}
NAMES = {mx.uint32: "U32", mx.bfloat16: "BF16"}
QWEN3 = {
    "model_type": "qwen3", "head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936,
    "num_hidden_layers": 36, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "max_position_embeddings": 40960,
}  # fmt: skip
# As their makers publish them in config.json.
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "Qwen3-4B": {**QWEN3, "hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    "Qwen3-8B": {**QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
    "Llama-3.1-8B": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256, "rms_norm_eps": 1e-5,
        "rope_theta": 500000, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    },
    "Qwen3-30B-A3B": {
        **QWEN3, "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "tie_word_embeddings": False,
    },
}  # fmt: skip


def write_folder(folder: Path, config: Mapping[str, Any]) -> None:
    """Nothing is computed and nothing takes room on the disk: shapes and dtypes are known without weights."""
    from mlx_lm.utils import _get_classes

    model_class, arguments = _get_classes(config=dict(config))
    module: nn.Module = model_class(arguments.from_dict(dict(config)))
    module.set_dtype(mx.bfloat16)
    nn.quantize(module, group_size=QUANTIZATION["group_size"], bits=QUANTIZATION["bits"])
    header: dict[str, Any] = {}
    end = 0
    parameters: Any = tree_flatten(module.parameters())
    for name, array in parameters:
        start, end = end, end + math.prod(array.shape) * array.dtype.size
        header[name] = {"dtype": NAMES[array.dtype], "shape": array.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    (folder / "config.json").write_text(json.dumps({**config, "quantization": QUANTIZATION}))
    (folder / "tokenizer.json").write_text("{}")


@contextmanager
def folders() -> Iterator[dict[str, Path]]:
    with TemporaryDirectory(prefix="kvstrata-fits-") as name:
        made = {title: Path(name) / title for title in SHAPES}
        for title, folder in made.items():
            write_folder(folder, SHAPES[title])
        yield made


@cache
def plans() -> dict[tuple[str, int], dict[str, Any]]:
    """What `plan` says by model and GiB of a Mac. Empty where the model does not fit."""
    with folders() as made:
        return {(title, gib): _plan(folder, gib) for title, folder in made.items() for gib in GIB}


def _plan(folder: Path, gib: int) -> dict[str, Any]:
    words = ["plan", str(folder), "--memory", f"{gib}GiB", "--backend", "metal", "--json"]
    done = CliRunner().invoke(app, words)
    if done.exception is not None:
        return {}
    return json.loads(done.output)


def tokens_table() -> str:
    """Stored tokens in memory: full precision, 8 bits, 4 bits."""
    head = ["model, 4-bit weights", *(f"{gib} GB" for gib in GIB)]
    lines = [" | ".join(head), "|".join(["---"] * len(head))]
    for title in SHAPES:
        cells = [_tokens(plans()[title, gib]) for gib in GIB]
        lines.append(" | ".join([title, *cells]))
    return "\n".join(f"| {line} |" if "---" not in line else f"|{line}|" for line in lines)


def _tokens(plan: Mapping[str, Any]) -> str:
    rows = {(row["k"], row["v"]): row["tokens"] for row in plan.get("precisions", ())}
    wanted = (("raw", "raw"), ("planes:8", "planes:8"), ("planes:4", "planes:4"))
    return " / ".join(_short(rows[each]) for each in wanted) if rows else "does not fit"


def _short(tokens: int) -> str:
    return f"{tokens // 1000:,}k" if tokens >= 1000 else str(tokens)


def advice_table() -> str:
    """For four conversations of 32k tokens."""
    lines = ["| memory | model | `kvstrata plan` advises | conversations of 32k that stay |", "|---|---|---|---|"]
    for gib in GIB:
        for title in SHAPES:
            plan = plans()[title, gib]
            if plan:
                lines.append(f"| {gib} GB | {title} | {_advice(plan)} | {_conversations(plan)} |")
    return "\n".join(lines)


def _advice(plan: Mapping[str, Any]) -> str:
    flags = plan["advice"]["command"].split()[3:]
    return f"`{' '.join(flags)}`" if flags else "no flags"


def _conversations(plan: Mapping[str, Any]) -> str:
    """At full precision, 8 and 4 bits."""
    rows = {(row["k"], row["v"]): row["stored"] for row in plan["precisions"]}
    wanted = (("raw", "raw"), ("planes:8", "planes:8"), ("planes:4", "planes:4"))
    counts = [next(each["conversations"] for each in rows[pair] if each["tokens"] == 32768) for pair in wanted]
    return " / ".join(map(str, counts))


if __name__ == "__main__":
    print(tokens_table(), advice_table(), sep="\n\n")

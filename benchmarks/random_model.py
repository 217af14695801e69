"""Models of a real shape with random weights, for speed tests without a checkpoint. Their replies make no sense."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import mlx.core as mx
import typer
from mlx.utils import tree_map
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from benchmarks.common import command_line, run_app
from kvstrata.bench.peers.models import copy_tokenizer
from kvstrata.errors import ConfigError
from kvstrata.kv.layout import arrays_in
from kvstrata.models.default_model import ensure_default_model
from kvstrata.models.load import LoadedModel, load

# Qwen3-0.6B's config.json (Apache-2.0), as far as mlx-lm reads it.
QWEN3_0_6B: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}

# As wide and about as large, but three of four layers are recurrent, by the gated delta rule.
HYBRID: dict[str, Any] = {
    "model_type": "qwen3_next",
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "intermediate_size": 3072,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    # No experts.
    "num_experts": 0,
    "num_experts_per_tok": 0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 0,
    "shared_expert_intermediate_size": 0,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}


RandomWeights = Annotated[
    bool, typer.Option("--random-weights", help="Take a Qwen3-0.6B shape with random bf16 weights instead of MODEL.")
]


def load_model(name: str | None, *, random_weights: bool) -> LoadedModel:
    """Load a model by its folder, file or id, or make one of random weights."""
    return random_model() if random_weights else load(name)


def random_model(config: dict[str, Any] = QWEN3_0_6B, *, seed: int = 0) -> LoadedModel:
    mx.random.seed(seed)
    family = import_module(f"mlx_lm.models.{config['model_type']}")
    module = family.Model(family.ModelArgs.from_dict(config))
    module.update(tree_map(lambda array: array.astype(mx.bfloat16), module.parameters()))
    mx.eval(module.parameters())
    return LoadedModel(
        name=f"random-{config['model_type']}",
        path=Path("random"),
        module=module,
        tokenizer=_tokenizer(config["vocab_size"]),
        config=config,
        context_tokens=config["max_position_embeddings"],
        vocab_size=config["vocab_size"],
        eos_ids=frozenset(),
        weight_bytes=sum(array.nbytes for array in arrays_in(module.parameters())),
        dtype="bfloat16",
        fingerprint=f"random-{seed}",
    )


def write_random_model(
    folder: Path, tokenizer: Path, config: dict[str, Any] = QWEN3_0_6B, *, seed: int = 0
) -> dict[str, Any]:
    """Write a random model with the tokenizer and vocabulary of another one, loadable by any MLX server. Return its
    config."""
    from mlx_lm.utils import save_config, save_model

    theirs = json.loads((tokenizer / "config.json").read_text()) if (tokenizer / "config.json").is_file() else {}
    theirs |= theirs.get("text_config", {})  # for vision-language models
    if "vocab_size" not in theirs:
        raise ConfigError(f"{tokenizer} has no config.json that tells its vocab_size. Name another folder.")
    taken = {name: theirs[name] for name in ("vocab_size", "bos_token_id", "eos_token_id") if name in theirs}
    written = {**config, **taken, "torch_dtype": "bfloat16"}
    save_model(folder, random_model(written, seed=seed).module)
    copy_tokenizer(tokenizer, folder)
    save_config(written, folder / "config.json")
    return written


def _tokenizer(vocab_size: int) -> TokenizerWrapper:
    """Return a tokenizer with one word for each id, so that replies can be decoded to text."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i} ": i for i in range(vocab_size)}, unk_token="w0 "))
    tokenizer.decoder = decoders.Fuse()
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


app = command_line()


@app.command()
def main(
    folder: Annotated[Path, typer.Argument(file_okay=False, help="New folder for the model.")],
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Folder of a model with the tokenizer to copy.",
            show_default="the default model",
        ),
    ] = None,
    hybrid: Annotated[
        bool, typer.Option("--hybrid", help="Hybrid like Qwen3-Next: three of four layers are recurrent.")
    ] = False,
) -> None:
    """Write a model of Qwen3-0.6B's shape, or a hybrid, with random bf16 weights, for machines without a checkpoint."""
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty. Name a new folder.")
    config = write_random_model(folder, tokenizer or ensure_default_model(), HYBRID if hybrid else QWEN3_0_6B)
    layers, tokens = config["num_hidden_layers"], config["vocab_size"]
    typer.echo(f"{folder} has {layers} layers of random weights and a vocabulary of {tokens:,} tokens.")


if __name__ == "__main__":
    run_app(app)

"""The compared model in each peer's form: a folder for mlx-lm, a float32 folder for a CPU, a GGUF file."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvstrata.bench.peers.base import ComparedModel
from kvstrata.errors import ConfigError, ModelError
from kvstrata.models.folder import MARKER
from kvstrata.platform.files import cache_root


def subject(named: Path | None, gguf: Path | None, *, on_cpu: bool) -> ComparedModel:
    """Return the model of a comparison. `named` is a folder or a GGUF file; None means the default model."""
    folder, ours, file = _found(named, gguf)
    config = json.loads((folder / "config.json").read_text())
    # On a CPU mlx-lm multiplies packed weights about fifty times slower than dense ones.
    dense = dense_folder(folder) if on_cpu and "quantization" in config else folder
    context = int(config.get("max_position_embeddings", 8192))
    name = "SmolLM2-135M-Instruct" if ours is None else Path(ours).stem
    return ComparedModel(name, ours, folder, dense, file, context, _token_values(config), 4 if on_cpu else 2)


def _found(named: Path | None, gguf: Path | None) -> tuple[Path, str | None, Path | None]:
    from kvstrata.models.default_model import ensure_default_gguf, ensure_default_model
    from kvstrata.models.gguf.convert import folder_of

    if named is None:
        return ensure_default_model(), None, gguf or ensure_default_gguf()
    if named.is_file():
        return folder_of(named), str(named.absolute()), gguf or named.absolute()
    if not (named / "config.json").is_file():
        raise ConfigError(f"{named} is neither a GGUF file nor the folder of a model")
    return named.absolute(), str(named.absolute()), gguf


def _token_values(config: dict[str, Any]) -> int:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return 2 * config["num_hidden_layers"] * config.get("num_key_value_heads", heads) * head_dim


def dense_folder(folder: Path) -> Path:
    """Return a float32 copy of a model, made once by a separate process: that needs as much memory as the copy."""
    made = cache_root() / "models" / "dense" / folder.name
    source = folder / "config.json"
    if (made / "config.json").is_file() and made.stat().st_mtime > source.stat().st_mtime:
        return made
    making = made.with_name(f"{made.name}.making")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    command = [sys.executable, "-m", "kvstrata.bench.peers.models", str(folder), str(making)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ModelError(f"{folder} could not be written in float32: {done.stderr.strip()[-300:]}")
    shutil.rmtree(made, ignore_errors=True)
    making.rename(made)
    return made


def write_dense(folder: Path, into: Path) -> None:
    """Write a model in float32 with mlx-lm's own functions, so that every version of it can read the result."""
    import mlx.core as mx
    from mlx.utils import tree_map
    from mlx_lm.utils import dequantize_model, load_model, save_config, save_model

    mx.set_default_device(mx.cpu)
    model, config = load_model(folder)
    model = dequantize_model(model)
    model.update(tree_map(lambda a: a.astype(mx.float32), model.parameters()))
    for key in ("quantization", "quantization_config"):
        config.pop(key, None)
    save_model(into, model)
    copy_tokenizer(folder, into)
    save_config({**config, "torch_dtype": "float32"}, into / "config.json")


def copy_tokenizer(folder: Path, into: Path) -> None:
    """Copy all files but the weights: config, tokenizer and chat template."""
    for path in folder.iterdir():
        if path.suffix in {".json", ".jinja", ".txt", ".model"} and not (
            "safetensors" in path.name or path.name == MARKER
        ):
            shutil.copy(path, into / path.name)


if __name__ == "__main__":
    write_dense(Path(sys.argv[1]), Path(sys.argv[2]))

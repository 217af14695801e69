"""What the commands of `kvstrata bench` have in common: arguments, and the model that they mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvstrata.models.loaded import LoadedModel

MIB = 1 << 20

Model = Annotated[
    str | None,
    typer.Argument(help="Folder, GGUF file or Hugging Face id of a model.", show_default="the default model"),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value and nothing else.")]
Rounds = Annotated[int, typer.Option(min=1, help="How often to measure; medians are shown.")]
RandomWeights = Annotated[
    bool, typer.Option("--random-weights", help="Take a Qwen3-0.6B shape with random bf16 weights instead of MODEL.")
]


def chosen(model: str | None, *, random_weights: bool) -> LoadedModel:
    from kvstrata.bench.random_model import random_model
    from kvstrata.models.load import load

    return random_model() if random_weights else load(model)

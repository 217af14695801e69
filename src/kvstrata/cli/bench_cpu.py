"""`kvstrata bench cpu`: a GGUF file on a plain CPU, beside llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvstrata.cli.bench_options import Json, Rounds, numbers, say, show
from kvstrata.models.cpu_options import CpuWeights

ACTIVATIONS = (8, 16, 32)


def cpu(
    model: Annotated[
        Path | None,
        typer.Argument(exists=True, dir_okay=False, help="A GGUF file.", show_default="the default model's"),
    ] = None,
    cpu_weights: Annotated[CpuWeights, typer.Option(help="As for kvstrata serve.")] = "auto",
    activations: Annotated[str, typer.Option(help="Bits of ours, with commas between.")] = "8,16,32",
    batches: Annotated[str, typer.Option(help="Sequences that decode at once, with commas between.")] = "1,8",
    prefills: Annotated[str, typer.Option(help="Tokens of prompts, with commas between.")] = "512,2048",
    reply_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each reply.")] = 64,
    text: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Text of the prompts.", show_default="a short one")
    ] = None,
    text_tokens: Annotated[int, typer.Option(min=0, help="Tokens of it that KL is measured on.")] = 256,
    rounds: Rounds = 5,
    as_json: Json = False,
) -> None:
    """Decode, prefill and memory on a CPU: ours beside llama.cpp (make peers), same file, same token ids."""
    from kvstrata.bench.cpu import SAMPLE, Load, Subject, measure, table
    from kvstrata.bench.cpu_process import find_peer
    from kvstrata.models.default_model import ensure_default_gguf

    load = Load(
        weights=cpu_weights,
        activations=_bits(activations),
        batches=numbers(batches, 1),
        prefills=numbers(prefills, 1),
        reply_tokens=reply_tokens,
        text_tokens=text_tokens,
        text=(text or SAMPLE).read_text(),
    )
    subject = Subject(ensure_default_gguf(), None) if model is None else Subject(model, str(model.absolute()))
    peer = find_peer()
    if peer.missing:
        typer.echo(f"{peer.missing}. Ours alone:", err=True)
    show(measure(subject, peer, load, rounds=rounds, progress=say), table, as_json=as_json)


def _bits(text: str) -> tuple[int, ...]:
    chosen = numbers(text, min(ACTIVATIONS), max(ACTIVATIONS))
    if not set(chosen) <= set(ACTIVATIONS):
        raise typer.BadParameter(f"'{text}' is not a list of 8, 16 or 32, with commas between")
    return chosen

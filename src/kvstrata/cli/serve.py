"""`kvstrata serve`: loads a model and answers until it is told to stop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstrata.cli.flags import with_settings

if TYPE_CHECKING:
    from kvstrata.backend import Device
    from kvstrata.config import Settings
    from kvstrata.server.service import Service


@with_settings(without=["model"])
def serve(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            help="Folder or Hugging Face id of a model that mlx-lm can load, or a GGUF file.",
            envvar="KVSTRATA_MODEL",
            show_default="the default model, SmolLM2-135M-Instruct",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="TOML file with settings by the names below (max_running = 8). Flags win over the environment, "
            "that over the file.",
            envvar="KVSTRATA_CONFIG",
            show_default="config.toml in the user's configuration folder, if there is one",
            metavar="file",
        ),
    ] = None,
    **flags: Any,
) -> None:
    """Serve a model to OpenAI clients.

    The first Ctrl-C lets running replies finish, the second ends at once.
    """
    from kvstrata.config import load as load_settings
    from kvstrata.server.logs import show_messages

    show_messages("warning")  # until the settings say which
    run(load_settings(config, _given(context, {"model": model, **flags})))


def run(settings: Settings) -> None:
    from kvstrata.server.listen import bind, url_of

    listener = bind(settings.host, settings.port)
    # Only now what takes seconds to import.
    from kvstrata.attention.cpu import compile_codecs_beside
    from kvstrata.backend import device
    from kvstrata.models.cpu_options import CpuOptions
    from kvstrata.models.load import load
    from kvstrata.server.assemble import bind_sockets, memory_limit_bytes, start_service
    from kvstrata.server.logs import show_messages
    from kvstrata.server.run import Server

    show_messages(settings.log_level)
    sockets = bind_sockets(settings)
    machine = device()
    limit_bytes = memory_limit_bytes(settings, machine)
    compile_codecs_beside()
    cpu = CpuOptions(settings.cpu_weights, settings.cpu_activations)
    loaded = load(settings.model, adapter=settings.adapter, memory_limit_bytes=limit_bytes, cpu=cpu)
    service = start_service(settings, loaded, machine, sockets)
    server = Server(
        service,
        drain_timeout_s=settings.drain_timeout_s,
        log_level=settings.log_level,
        on_ready=lambda: typer.echo("\n".join(start_lines(settings, service, machine, url_of(listener)))),
        say=typer.echo,
    )
    server.run(sockets=[listener])


def start_lines(settings: Settings, service: Service, machine: Device, url: str) -> list[str]:
    from kvstrata.server.assemble import memory_limit_bytes
    from kvstrata.sizes import human_bytes

    loaded, engine = service.loaded, service.engine.props()
    limit = memory_limit_bytes(settings, machine)
    needs_key = " -H 'Authorization: Bearer KEY'" if service.keys else ""
    asked = json.dumps({"model": service.name, "messages": [{"role": "user", "content": "Hello"}]})
    return [
        f"model     {service.name}, {loaded.dtype}, {human_bytes(loaded.weight_bytes)} of weights, "
        f"context {service.context_tokens} tokens",
        *([f"weights   {loaded.weights}"] if loaded.weights else []),
        f"back-end  {machine.backend} ({machine.name}), attention: {engine['attention']['path']}",
        *([f"BLAS      {_blas_line()}"] if machine.backend == "cpu" else []),
        f"memory    at most {human_bytes(limit)} ({settings.memory_limit}) of {human_bytes(machine.memory_bytes)}, "
        f"{human_bytes(engine['kv_budget_bytes'])} of it for KV",
        f"cache     stored as K {engine['kv']['k']}, V {engine['kv']['v']}{_disk_text(settings)}",
        *([f"events    {_events_text(service)}"] if service.publisher else []),
        f"serving   {url}/v1   (Ctrl-C to stop), the page is {url}/",
        f"try       curl {url}/v1/chat/completions -H 'Content-Type: application/json'{needs_key} -d '{asked}'",
        f"or        kvstrata chat --url {url}",
        f"agents    kvstrata launch claude --url {url}   (or codex, opencode, pi, aider)",
    ]


def _events_text(service: Service) -> str:
    publisher = service.publisher
    assert publisher is not None
    return f"{publisher.publish_url}, missed ones from {publisher.replay_url}"


def _disk_text(settings: Settings) -> str:
    if settings.disk_cache_dir is None or settings.hot_cache_only:
        return ", in memory only"
    return f", on disk in {settings.disk_cache_dir} (at most {settings.disk_cache_size})"


def _blas_line() -> str:
    from kvstrata.backend import blas

    used = blas()
    slow = "  SLOW: see kvstrata doctor" if used.name == "reference" else ""
    return f"{used.name} {used.version} with {used.num_threads} threads ({used.reason}){slow}"


def _given(context: typer.Context, flags: dict[str, Any]) -> dict[str, Any]:
    """On the command line. Settings reads the environment itself, and splits lists at commas as --help says."""
    sources = {name: context.get_parameter_source(name) for name in flags}
    return {name: flags[name] for name, source in sources.items() if source and source.name == "COMMANDLINE"}

"""`kvstrata serve`: start a server, and show the stages of the start.

The stages that `platform/logging.py` logs are one live line on a terminal, else a log line each.
"""

from __future__ import annotations

import json
import logging
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstrata.cli.settings_options import given, short_help, whole_help, with_settings
from kvstrata.platform.logging import STAGES_LOGGER

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

    from kvstrata.config import Settings
    from kvstrata.models.load import LoadedModel
    from kvstrata.platform.device import Device
    from kvstrata.server.run import Server
    from kvstrata.server.state import ServerState

logger = logging.getLogger("kvstrata.serve")

REFRESH_HZ = 8
LEAST_SHOWN_S = 0.05


class StartProgress(logging.Handler):
    """Log handler that shows stages, as a context manager; `end` ends it early. Silent afterwards."""

    def __init__(self, *, live: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """`live` redraws a single line, which needs a terminal."""
        super().__init__(logging.INFO)
        self._clock = clock
        self._began = self._stage_began = clock()
        self._stage, self._doing = "", "Starting"
        self.seconds: dict[str, float] = {}  # of each finished stage
        self._live = _line(self._drawn) if live else None
        self._source = logging.getLogger(STAGES_LOGGER)

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._began

    def __enter__(self) -> StartProgress:
        self._source.handlers = [self]
        self._source.propagate = False
        self._source.setLevel(logging.INFO)
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    def emit(self, record: logging.LogRecord) -> None:
        """Begin a stage and end the one before. May be called on any thread; stages follow each other."""
        self._end_stage()
        self._stage, self._doing = getattr(record, "stage", ""), record.getMessage()
        if self._live is None:
            fields = {"stage": self._stage, "elapsed_s": round(self.elapsed_s, 3)}
            logger.info("start: %s (after %.1f s)", self._doing, self.elapsed_s, extra={"fields": fields})

    def end(self) -> None:
        if self not in self._source.handlers:
            return
        self._end_stage()
        self._source.handlers = []
        if self._live is not None:
            self._live.stop()

    def summary(self) -> str:
        """Return the total time of the start and the time of each stage."""
        parts = [f"{stage} {seconds:.1f}" for stage, seconds in self.seconds.items() if seconds >= LEAST_SHOWN_S]
        return f"ready after {sum(self.seconds.values()):.1f} s: {', '.join(parts)}"

    def _end_stage(self) -> None:
        now = self._clock()
        if self._stage:
            self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + now - self._stage_began
        self._stage, self._stage_began = "", now

    def _drawn(self) -> Text:
        from rich.text import Text

        text = Text(f"{self._doing} ", no_wrap=True, overflow="ellipsis")
        return text.append(f"{self._clock() - self._stage_began:.0f} s, {self.elapsed_s:.0f} s in all", style="dim")


def is_terminal() -> bool:
    return sys.stderr.isatty()


def _line(drawn: Callable[[], Text]) -> Live:
    from rich.console import Console
    from rich.live import Live

    # Erased at the end: the final message has the times.
    return Live(get_renderable=drawn, console=Console(stderr=True), refresh_per_second=REFRESH_HZ, transient=True)


def _show(text: Callable[[], str]) -> Callable[[bool], None]:
    def show(wanted: bool) -> None:
        if wanted:
            typer.echo(text())
            raise typer.Exit

    return show


@with_settings(without=["model"])
def serve(
    context: typer.Context,
    model: Annotated[str | None, typer.Argument(envvar="KVSTRATA_MODEL")] = None,
    config: Annotated[Path | None, typer.Option(envvar="KVSTRATA_CONFIG", metavar="file")] = None,
    show_help: Annotated[bool, typer.Option("--help", "-h", is_eager=True, callback=_show(short_help))] = False,
    show_all: Annotated[bool, typer.Option("--help-all", is_eager=True, callback=_show(whole_help))] = False,
    **flags: Any,
) -> None:
    """Serve a model to OpenAI's and Anthropic's clients."""
    del show_help, show_all
    from kvstrata.config import load as load_settings
    from kvstrata.platform.logging import show_messages

    show_messages("warning")  # until the settings are loaded
    run(load_settings(config, given(context, {"model": model, **flags})))


def run(settings: Settings) -> None:
    from kvstrata.platform.logging import show_messages
    from kvstrata.platform.network import bind

    show_messages(settings.log_level, settings.log_format)
    check_paths(settings)
    listener = bind(settings.host, settings.port)
    with StartProgress(live=settings.log_format == "text" and is_terminal()) as starting:
        server = _started(settings, listener, starting)
    server.run(sockets=[listener])


def check_paths(settings: Settings) -> None:
    """Raise ModelError or ConfigError if the model, its adapter or the cache folder cannot be used.

    Called before libraries are loaded, so that these failures are reported at once and not after loading a model.
    """
    from kvstrata.errors import ConfigError, ModelError
    from kvstrata.models.find import check_model_name
    from kvstrata.platform.files import make_writable

    check_model_name(settings.model)
    if settings.adapter_path is not None and not settings.adapter_path.expanduser().is_dir():
        raise ModelError(f"There is no adapter folder {settings.adapter_path}. Check --adapter-path, or leave it out")
    if settings.disk_cache_dir is None or settings.hot_cache_only:
        return
    try:
        make_writable(settings.disk_cache_dir.expanduser())
    except OSError as error:
        raise ConfigError(
            f"--disk-cache-dir {settings.disk_cache_dir} cannot be written to: {error}. Choose another folder, or use "
            "--hot-cache-only."
        ) from error


def _started(settings: Settings, listener: socket.socket, starting: StartProgress) -> Server:
    from kvstrata.platform.logging import begin
    from kvstrata.platform.network import url_of

    begin("libraries", "Loading libraries")
    # Import slow modules only after the quick checks.
    from kvstrata.platform.device import device
    from kvstrata.server.build import bind_sockets, build_server, load_model
    from kvstrata.server.options import server_options
    from kvstrata.server.run import Server

    sockets = bind_sockets(settings)
    machine = device()
    options = server_options(settings, machine)  # mistakes in settings are reported before the model is loaded
    loaded = load_model(settings, machine)
    state = build_server(settings, loaded, machine, options=options, sockets=sockets)
    is_json = settings.log_format == "json"

    def on_ready() -> None:
        if is_json:
            fields = {"url": url_of(listener), "model": state.name, "stages": starting.seconds}
            if _has_disk(settings):
                fields["disk"] = _disk_text(settings, state)
            logger.info("serving, %s", starting.summary(), extra={"fields": fields})
            return
        lines = start_lines(settings, state, machine, url_of(listener))
        typer.echo("\n".join([*lines[:1], f"start     {starting.summary()}", *lines[1:]]))

    return Server(
        state,
        drain_timeout_s=settings.drain_timeout_s,
        log_level=settings.log_level,
        on_ready=on_ready,
        say=logger.info if is_json else typer.echo,
    )


def start_lines(settings: Settings, state: ServerState, machine: Device, url: str) -> list[str]:
    from kvstrata.cli import started_as
    from kvstrata.server.options import memory_limit_bytes
    from kvstrata.sizes import format_bytes

    loaded, engine = state.loaded, state.engine.props()
    limit = memory_limit_bytes(settings, machine)
    command = started_as()
    needs_key = " -H 'Authorization: Bearer KEY'" if state.keys else ""
    asked = json.dumps({"model": state.name, "messages": [{"role": "user", "content": "Hello"}]})
    return [
        f"model     {state.name}, context {state.limits.context_tokens} tokens",
        f"weights   {format_bytes(loaded.weight_bytes)}, {_weights_text(loaded)}",
        f"back-end  {machine.backend} ({machine.name}), attention: {engine['attention']['path']}",
        *([f"BLAS      {_blas_line()}"] if machine.backend == "cpu" else []),
        f"memory    at most {format_bytes(limit)} ({settings.memory_limit}) of {format_bytes(machine.memory_bytes)}, "
        f"{format_bytes(engine['kv_budget_bytes'])} of it for KV",
        f"cache     K {engine['kv']['k']}, V {engine['kv']['v']}{_where_text(settings)}",
        *([f"disk      {_disk_text(settings, state)}"] if _has_disk(settings) else []),
        *([f"events    {_events_text(state)}"] if state.publisher else []),
        f"serving   {url}/v1   (Ctrl-C to stop), the page is {url}/",
        f"try       curl {url}/v1/chat/completions -H 'Content-Type: application/json'{needs_key} -d '{asked}'",
        f"or        {command} chat --url {url}",
        f"agents    {command} launch claude --url {url}   (or codex, opencode, pi, aider)",
    ]


def _weights_text(loaded: LoadedModel) -> str:
    """Describe the weights in memory, and the compute dtype if it differs."""
    return f"{loaded.weights}; all else in {loaded.dtype}" if loaded.weights else loaded.dtype


def _events_text(state: ServerState) -> str:
    publisher = state.publisher
    assert publisher is not None
    return f"{publisher.publish_url}, missed ones from {publisher.replay_url}"


def _has_disk(settings: Settings) -> bool:
    return settings.disk_cache_dir is not None and not settings.hot_cache_only


def _where_text(settings: Settings) -> str:
    return ", in memory and on disk" if _has_disk(settings) else ", in memory only"


def _disk_text(settings: Settings, state: ServerState) -> str:
    from kvstrata.sizes import format_bytes

    counters = state.engine.ask_cache(lambda cache: cache.usage()).result().counters
    allowed_bytes = counters.get("disk_allowed_bytes", 0)
    most = str(settings.disk_cache_size)
    if allowed_bytes < counters.get("disk_limit_bytes", 0):
        most = f"{format_bytes(allowed_bytes)} of {most}, because the volume is nearly full"
    when = {
        "after_reply": "each reply is written seconds after its end",
        "on_evict": "written when memory runs short and when the server ends, so a crash loses what is in memory",
    }[settings.disk_write]
    return f"{settings.disk_cache_dir}, at most {most}; {when}"


def _blas_line() -> str:
    from kvstrata.platform.blas import blas

    used = blas()
    slow = "  SLOW: see kvstrata doctor" if used.name == "reference" else ""
    return f"{used.name} {used.version} with {used.num_threads} threads ({used.reason}){slow}"

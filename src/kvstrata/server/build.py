"""Start of everything behind a server: a loaded model and settings become a server state with a running engine."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.types import ASGIApp

from kvstrata.attention.cpu.step import compile_codecs_beside
from kvstrata.config import Settings
from kvstrata.engine.config import CacheListener, half_of_places
from kvstrata.engine.engine import Engine
from kvstrata.events.feed import GRAIN, ListenerThread
from kvstrata.events.options import bind_events, event_options, start_publisher
from kvstrata.grammar.compiler import GrammarCompiler
from kvstrata.metrics import Metrics
from kvstrata.models.cpu_options import CpuOptions
from kvstrata.models.generation_config import SamplingDefaults
from kvstrata.models.load import LoadedModel, load
from kvstrata.platform.device import Device
from kvstrata.platform.logging import begin
from kvstrata.server.app import allow_origins
from kvstrata.server.chat.prompt import PromptLimits, PromptRenderer
from kvstrata.server.chat.reply_files import ReplyFiles
from kvstrata.server.chat.reply_memory import ReplyMemory, SampledReplies
from kvstrata.server.http.access import RequireKey, RequireKnownHost
from kvstrata.server.http.body_limit import BodyLimits, BoundBodyMemory, DecompressBody, LimitBody
from kvstrata.server.options import ServerOptions, api_keys, http_limits, memory_limit_bytes, server_options
from kvstrata.server.state import ServerState
from kvstrata.text.harmony import harmony_tokens
from kvstrata.text.reply_parser import ReplyFormat
from kvstrata.text.template import ChatTemplate
from kvstrata.text.thinking import ThinkingSwitch
from kvstrata.text.tokenizer import longest_token_chars
from kvstrata.tiers.options import DiskOptions

if TYPE_CHECKING:
    from kvstrata.events.publisher import EventPublisher, EventSockets

REPLIES = "replies"  # subfolder of the disk cache

Closers = tuple[Callable[[], None], ...]


def load_model(settings: Settings, device: Device) -> LoadedModel:
    """Load the model while the codec kernels are compiled in parallel. Raises ModelError."""
    compile_codecs_beside()
    cpu = CpuOptions(settings.cpu_weights, settings.cpu_activations)
    limit_bytes = memory_limit_bytes(settings, device)
    return load(settings.model, adapter=settings.adapter_path, memory_limit_bytes=limit_bytes, cpu=cpu)


def bind_sockets(settings: Settings) -> EventSockets | None:
    """Bind the sockets of --kv-events; return None if it is not set. Raises ConfigError."""
    if settings.kv_events is None:
        return None
    return bind_events(event_options(settings.kv_events, settings.kv_events_topic, has_keys=bool(settings.keys)))


def build_server(
    settings: Settings,
    loaded: LoadedModel,
    device: Device,
    *,
    options: ServerOptions | None = None,
    sockets: EventSockets | None = None,
    listeners: Sequence[CacheListener] = (),
) -> ServerState:
    """Start the engine, wait until it is ready, and return the state of the server.

    `options`: None takes those of the settings. `sockets`: sockets already bound by `bind_sockets`. `listeners`:
    receivers of cache events, in addition to --kv-events. Raises ConfigError and ModelError.
    """
    options = options or server_options(settings, device)
    metrics = Metrics()
    sockets = sockets or bind_sockets(settings)
    publisher = None if sockets is None else start_publisher(sockets, metrics.events.count)
    engine, at_end = _start_engine(loaded, options, metrics, publisher, listeners)
    begin("template", "Trying the chat template and the grammars")
    template = _chat_template(settings, loaded)
    reply_format = ReplyFormat(loaded.tokenizer, template, harmony_tokens(loaded.tokenizer))
    replies = _sampled_replies(settings, loaded, reply_format, options.tiers.disk)
    names, paths = _model_names(settings, loaded)
    limits = PromptLimits(engine.context_tokens, longest_token_chars(loaded.tokenizer))
    renderer = PromptRenderer(
        template, ThinkingSwitch(template), settings.stable_prompts, limits, replies,
        resumes_at_checkpoints=engine.resumes_at_checkpoints, pin_quota=settings.pin_quota,
    )  # fmt: skip
    return ServerState(
        loaded=loaded,
        engine=engine,
        metrics=metrics,
        template=template,
        reply_format=reply_format,
        renderer=renderer,
        grammars=GrammarCompiler(loaded.tokenizer, loaded.vocab_size, loaded.eos_ids),
        name=settings.served_model_name or loaded.name,
        names=names,
        paths=paths,
        limits=limits,
        max_prompts=half_of_places(options.engine.num_places),
        sampling=loaded.sampling if settings.generation_config == "model" else SamplingDefaults(),
        replies=replies,
        cache_ttl_s=settings.cache_ttl_s,
        any_model_name=settings.any_model_name,
        keys=options.keys,
        pin_quota=settings.pin_quota,
        hosts=_host_names(settings),
        http_limits=options.http,
        origins=settings.allowed_origins,
        publisher=publisher,
        at_end=at_end,
        started=int(time.time()),
    )


def protect_app(app: ASGIApp, settings: Settings) -> ASGIApp:
    """Return an app that forwards requests to replicas, behind the same keys and limits as theirs."""
    limits = BodyLimits(http_limits(settings), {})
    app = LimitBody(DecompressBody(BoundBodyMemory(app, limits), limits), limits)
    keys = api_keys(settings)
    app = RequireKey(app, keys) if keys else RequireKnownHost(app, _host_names(settings), settings.allowed_origins)
    return allow_origins(app, settings.allowed_origins)


def _start_engine(
    loaded: LoadedModel,
    options: ServerOptions,
    metrics: Metrics,
    publisher: EventPublisher | None,
    listeners: Sequence[CacheListener],
) -> tuple[Engine, Closers]:
    """Return the running engine and the functions to call at shutdown: the listeners close first, so that their last
    events are still published."""
    listeners = (*listeners, *((publisher,) if publisher is not None else ()))
    listening = ListenerThread(listeners, on_dropped=metrics.events.lost.inc) if listeners else None
    closers = tuple(each.close for each in (listening, publisher) if each is not None)
    tiers = options.tiers
    engine = Engine(
        loaded, options.engine, metrics, options.cache, tiers.disk, tiers.files, remote=tiers.remote, watcher=listening
    )
    try:
        engine.start()
    except BaseException:
        for close in closers:
            close()
        raise
    _publish_block_sizes(metrics, engine)
    return engine, closers


def _publish_block_sizes(metrics: Metrics, engine: Engine) -> None:
    props = engine.props()
    block_bytes = GRAIN * props["kv_bytes_per_token"]
    num_blocks = props["kv_budget_bytes"] // block_bytes if block_bytes else 0
    metrics.set_blocks(block_tokens=GRAIN, num_blocks=num_blocks, dtype=props["kv"]["dtype"])


def _chat_template(settings: Settings, loaded: LoadedModel) -> ChatTemplate:
    return ChatTemplate(
        loaded.tokenizer,
        system_in_place=settings.stable_prompts,
        allow_special_tokens=settings.allow_special_tokens,
    )


def _sampled_replies(
    settings: Settings, loaded: LoadedModel, reply_format: ReplyFormat, disk: DiskOptions | None
) -> SampledReplies | None:
    if not settings.stable_prompts:
        return None
    files = disk and ReplyFiles(disk.directory / REPLIES, loaded.fingerprint, loaded.vocab_size)
    return SampledReplies(ReplyMemory(files), reply_format, loaded.eos_ids | reply_format.ending_ids)


def _host_names(settings: Settings) -> frozenset[str]:
    return frozenset({settings.host, socket.gethostname(), *settings.allowed_hosts})


def _model_names(settings: Settings, loaded: LoadedModel) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of the model, and the paths that requests may use as names: its folder and the --model
    argument."""
    names, paths = {settings.served_model_name, loaded.name}, {str(loaded.path)}
    if settings.model is not None:
        (paths if Path(settings.model).expanduser().exists() else names).add(settings.model)
    return frozenset(name for name in names if name), frozenset(paths)

"""Start of everything behind a server: a loaded model and settings become a service with a running engine."""

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
from kvstrata.server.auth import RequireKey
from kvstrata.server.conversation.hygiene import Hygiene
from kvstrata.server.cors import Cors
from kvstrata.server.hosts import RequireHost
from kvstrata.server.inflate import Inflate
from kvstrata.server.limits import BodyLimits, BoundBodyMemory, LimitBody
from kvstrata.server.options import ServerOptions, api_keys, http_limits, memory_limit_bytes, server_options
from kvstrata.server.replay.carrier import ReplyCarrier
from kvstrata.server.replay.files import ReplyFiles
from kvstrata.server.replay.memory import ReplyMemory
from kvstrata.server.service import Service
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
) -> Service:
    """Start the engine, wait until it is ready, and return the service.

    `options`: None takes those of the settings. `sockets`: sockets already bound by `bind_sockets`. `listeners`:
    receivers of cache events, in addition to --kv-events. Raises ConfigError and ModelError.
    """
    options = options or server_options(settings, device)
    metrics = Metrics()
    sockets = sockets or bind_sockets(settings)
    publisher = None if sockets is None else start_publisher(sockets, metrics.events.count)
    engine, at_end = _start_engine(loaded, options, metrics, publisher, listeners)
    begin("template", "Trying the chat template and the grammars")
    replies = _reply_memory(settings, loaded, options.tiers.disk)
    names, paths = _model_names(settings, loaded)
    template = ChatTemplate(
        loaded.tokenizer,
        system_in_place=settings.stable_prompts,
        allow_special_tokens=settings.allow_special_tokens,
    )
    return Service(
        loaded=loaded,
        engine=engine,
        metrics=metrics,
        template=template,
        form=ReplyFormat(loaded.tokenizer, template, harmony_tokens(loaded.tokenizer)),
        thinking=ThinkingSwitch(template),
        grammars=GrammarCompiler(loaded.tokenizer, loaded.vocab_size, loaded.eos_ids),
        name=settings.served_model_name or loaded.name,
        names=names,
        paths=paths,
        context_tokens=engine.context_tokens,
        max_prompts=half_of_places(options.engine.num_places),
        longest_token_chars=longest_token_chars(loaded.tokenizer),
        sampling=loaded.sampling if settings.generation_config == "model" else SamplingDefaults(),
        hygiene=Hygiene(settings.stable_prompts, settings.stable_prompts),
        replies=replies,
        cache_ttl_s=settings.cache_ttl_s,
        carriers=(ReplyCarrier(replies, loaded.vocab_size),) if replies is not None else (),
        any_model_name=settings.any_model_name,
        keys=options.keys,
        pin_quota=settings.pin_quota,
        hosts=_host_names(settings),
        bounds=options.http,
        origins=settings.allowed_origins,
        publisher=publisher,
        at_end=at_end,
        started=int(time.time()),
    )


def protect_app(app: ASGIApp, settings: Settings) -> ASGIApp:
    """Return an app that forwards requests to replicas, behind the same keys and limits as theirs."""
    limits = BodyLimits(http_limits(settings), {})
    app = LimitBody(Inflate(BoundBodyMemory(app, limits), limits), limits)
    keys = api_keys(settings)
    app = RequireKey(app, keys) if keys else RequireHost(app, _host_names(settings), settings.allowed_origins)
    return Cors(app, settings.allowed_origins)


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


def _reply_memory(settings: Settings, loaded: LoadedModel, disk: DiskOptions | None) -> ReplyMemory | None:
    if not settings.stable_prompts:
        return None
    if disk is None:
        return ReplyMemory()
    return ReplyMemory(ReplyFiles(disk.directory / REPLIES, loaded.fingerprint, loaded.vocab_size))


def _host_names(settings: Settings) -> frozenset[str]:
    return frozenset({settings.host, socket.gethostname(), *settings.allowed_hosts})


def _model_names(settings: Settings, loaded: LoadedModel) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of the model, and the paths that requests may use as names: its folder and the --model
    argument."""
    names, paths = {settings.served_model_name, loaded.name}, {str(loaded.path)}
    if settings.model is not None:
        (paths if Path(settings.model).expanduser().exists() else names).add(settings.model)
    return frozenset(name for name in names if name), frozenset(paths)

"""Construction of the service: settings and a loaded model become a service with a running engine. The only module of
the server that reads Settings."""

from __future__ import annotations

import logging
import resource
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.types import ASGIApp

from kvstrata.attention.cpu.step import compile_codecs_beside
from kvstrata.codecs.base import Codec
from kvstrata.codecs.registry import parse
from kvstrata.config import Settings
from kvstrata.engine.config import CacheListener, EngineLimits, KvConfig, half_of_places
from kvstrata.engine.engine import Engine
from kvstrata.errors import ConfigError
from kvstrata.events.feed import GRAIN, ListenerThread
from kvstrata.events.options import bind_events, event_options, start_publisher
from kvstrata.grammar.compiler import GrammarCompiler
from kvstrata.kv.precision_plan import choose_codecs
from kvstrata.metrics import Metrics
from kvstrata.models.cpu_options import CpuOptions
from kvstrata.models.generation_config import SamplingDefaults
from kvstrata.models.load import LoadedModel, load
from kvstrata.platform.device import Device
from kvstrata.platform.logging import begin
from kvstrata.prefix_cache.ladder import parse_lengths
from kvstrata.server.auth import ApiKey, RequireKey
from kvstrata.server.conversation.hygiene import Hygiene
from kvstrata.server.cors import Cors
from kvstrata.server.hosts import RequireHost
from kvstrata.server.inflate import Inflate
from kvstrata.server.limits import BodyLimits, BoundBodyMemory, LimitBody
from kvstrata.server.replay.carrier import ReplyCarrier
from kvstrata.server.replay.files import ReplyFiles
from kvstrata.server.replay.memory import ReplyMemory
from kvstrata.server.service import Service
from kvstrata.server.wire.bounds import Bounds
from kvstrata.sizes import format_bytes
from kvstrata.text.harmony import harmony_tokens
from kvstrata.text.reply_parser import ReplyFormat
from kvstrata.text.template import ChatTemplate
from kvstrata.text.thinking import ThinkingSwitch
from kvstrata.text.tokenizer import longest_token_chars
from kvstrata.tiers.options import DiskOptions, RemoteOptions
from kvstrata.tiers.remote.sealing import keys_for
from kvstrata.tiers.remote.url import parse_url

if TYPE_CHECKING:
    from kvstrata.events.publisher import EventPublisher, EventSockets

logger = logging.getLogger(__name__)

REPLIES = "replies"  # subfolder of the disk cache
MIN_DISK_BYTES = 16 << 20
# Files of the model, the disk cache and libraries, and connections that are being refused.
OTHER_FILES = 192
# For pending disk writes at shutdown, even if the drain timeout of running replies is shorter.
MIN_FLUSH_S = 30.0


def start_service(
    settings: Settings,
    loaded: LoadedModel,
    machine: Device,
    sockets: EventSockets | None = None,
    *,
    listeners: Sequence[CacheListener] = (),
) -> Service:
    """Start the engine, wait until it is ready, and return the service. `sockets`: sockets already bound by
    `bind_sockets`. `listeners`: receivers of cache events, in addition to --kv-events. Raises ModelError."""
    metrics = Metrics()
    limits, storage = _limits(settings, machine), _storage(settings, machine.memory_bytes)
    disk, remote = _disk(settings), _remote(settings)
    sockets = sockets or bind_sockets(settings)
    publisher = None if sockets is None else start_publisher(sockets, metrics.events.count)
    listeners = (*listeners, *((publisher,) if publisher is not None else ()))
    watching = ListenerThread(listeners, on_dropped=metrics.events.lost.inc) if listeners else None
    engine = Engine(loaded, limits, metrics, storage, disk, remote=remote, watcher=watching)
    at_end = _endings(watching, publisher)
    try:
        engine.start()
    except BaseException:
        for end in at_end:
            end()
        raise
    _say_blocks(metrics, engine)
    begin("template", "Trying the chat template and the grammars")
    replies = _replies(settings, loaded, disk)
    names, paths = _names(settings, loaded)
    template = ChatTemplate(
        loaded.tokenizer,
        system_in_place=settings.system_in_place,
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
        max_prompts=half_of_places(limits.num_places),
        longest_token_chars=longest_token_chars(loaded.tokenizer),
        sampling=loaded.sampling if settings.generation_config == "model" else SamplingDefaults(),
        hygiene=Hygiene(settings.drop_nonces, settings.system_in_place),
        replies=replies,
        cache_ttl_s=settings.cache_ttl_s,
        carriers=(ReplyCarrier(replies, loaded.vocab_size),) if replies is not None else (),
        any_model_name=settings.any_model_name,
        keys=_keys(settings),
        pin_quota=settings.pin_quota,
        hosts=_hosts(settings),
        bounds=_bounds(settings),
        origins=settings.allowed_origins,
        publisher=publisher,
        at_end=at_end,
        started=int(time.time()),
    )


def guarded(app: ASGIApp, settings: Settings) -> ASGIApp:
    """Return an app that forwards requests to replicas, behind the same keys and limits as theirs."""
    limits = BodyLimits(_bounds(settings), {})
    app = LimitBody(Inflate(BoundBodyMemory(app, limits), limits), limits)
    keys = _keys(settings)
    app = RequireKey(app, keys) if keys else RequireHost(app, _hosts(settings), settings.allowed_origins)
    return Cors(app, settings.allowed_origins)


def _hosts(settings: Settings) -> frozenset[str]:
    return frozenset({settings.host, socket.gethostname(), *settings.allowed_hosts})


def load_model(settings: Settings, machine: Device) -> LoadedModel:
    """Load the model while the codec kernels are compiled in parallel. Raises ModelError."""
    compile_codecs_beside()
    cpu = CpuOptions(settings.cpu_weights, settings.cpu_activations)
    limit_bytes = memory_limit_bytes(settings, machine)
    return load(settings.model, adapter=settings.adapter_path, memory_limit_bytes=limit_bytes, cpu=cpu)


def bind_sockets(settings: Settings) -> EventSockets | None:
    """Bind the sockets of --kv-events; return None if it is not set. Raises ConfigError."""
    if settings.kv_events is None:
        if settings.kv_events_replay is not None:
            raise ConfigError("--kv-events-replay is for --kv-events, and none is given. Give one, or leave both.")
        return None
    asked = event_options(
        settings.kv_events, settings.kv_events_replay, settings.kv_events_topic, has_keys=bool(settings.keys)
    )
    return bind_events(asked)


def _endings(watching: ListenerThread | None, publisher: EventPublisher | None) -> tuple[Callable[[], None], ...]:
    """Return the functions to call at shutdown: the listeners close first, so that their last events are still
    published."""
    return tuple(one.close for one in (watching, publisher) if one is not None)


def _say_blocks(metrics: Metrics, engine: Engine) -> None:
    told = engine.props()
    block_bytes = GRAIN * told["kv_bytes_per_token"]
    num_blocks = told["kv_budget_bytes"] // block_bytes if block_bytes else 0
    metrics.set_blocks(block_tokens=GRAIN, num_blocks=num_blocks, dtype=told["kv"]["dtype"])


def _replies(settings: Settings, loaded: LoadedModel, disk: DiskOptions | None) -> ReplyMemory | None:
    if not settings.exact_replay:
        return None
    if disk is None:
        return ReplyMemory()
    return ReplyMemory(ReplyFiles(disk.directory / REPLIES, loaded.fingerprint, loaded.vocab_size))


def _keys(settings: Settings) -> tuple[ApiKey, ...]:
    plain = (ApiKey.of(key) for key in settings.plain_keys)
    return (*plain, *(ApiKey.of(key, is_admin=True) for key in settings.admin_keys))


def _bounds(settings: Settings) -> Bounds:
    return Bounds(
        max_connections=_connections(settings.max_connections),
        max_header_bytes=settings.max_header_bytes,
        header_timeout_s=settings.header_timeout_s,
        max_body_bytes=settings.max_body_bytes,
        body_memory_bytes=settings.body_memory,
        body_timeout_s=settings.body_timeout_s,
        send_timeout_s=settings.send_timeout_s,
    )


def _connections(asked: int) -> int:
    """Return the maximum number of connections: the configured one, reduced to what the open-file limit leaves."""
    max_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if max_files == resource.RLIM_INFINITY or asked <= max_files - OTHER_FILES:
        return asked
    possible = max(1, max_files - OTHER_FILES)
    logger.warning(
        "At most %d connections instead of %d (--max-connections): this process may have %d files open. "
        "Raise that with: ulimit -n %d", possible, asked, max_files, asked + OTHER_FILES,
    )  # fmt: skip
    return possible


def memory_limit_bytes(settings: Settings, machine: Device) -> int:
    return settings.memory_limit.of(machine.memory_bytes, machine.working_set_bytes)


def _limits(settings: Settings, machine: Device) -> EngineLimits:
    return EngineLimits(
        max_running=settings.max_num_seqs,
        max_waiting=settings.max_waiting,
        shares_queue=len(settings.keys) > 1,
        context_tokens=settings.max_model_len,
        prefill_share=settings.prefill_share,
        prefill_chunk_tokens=settings.prefill_chunk_tokens,
        max_kv_size=settings.max_kv_size,
        buffer_step_tokens=settings.tail_step_tokens,
        memory_bytes=memory_limit_bytes(settings, machine),
        wired_bytes=_wired_bytes(settings, machine),
        slice_s=settings.cache_slice_ms / 1000,
    )


def _wired_bytes(settings: Settings, machine: Device) -> int:
    wired_bytes = settings.wired_limit
    if wired_bytes and machine.backend != "metal":
        raise ConfigError("--wired-limit is for Macs: no other system wires memory for MLX. Leave it out.")
    if wired_bytes > machine.working_set_bytes:
        raise ConfigError(
            f"--wired-limit {format_bytes(wired_bytes)} is more than the {format_bytes(machine.working_set_bytes)} "
            "that Metal recommends for one process. Give less."
        )
    return wired_bytes


def _storage(settings: Settings, total_memory_bytes: int) -> KvConfig:
    k, v = choose_codecs(
        quantization=settings.kv_cache_quantization,
        bits=settings.kv_cache_bits,
        k=settings.cache_type_k,
        v=settings.cache_type_v,
        group_size=settings.kv_cache_group_size,
    )
    return KvConfig(
        k=k,
        v=v,
        edge_layers=settings.kv_cache_edge_layers,
        edge=parse(settings.kv_cache_edge),
        min_quantize_tokens=settings.kv_cache_min_quantize_tokens,
        encodes_running=settings.kv_cache_live,
        first_raw_tokens=settings.kv_cache_first_raw,
        recent_raw_tokens=settings.kv_cache_recent_raw,
        dynamic=settings.dynamic_cache,
        floor_k_bits=settings.kv_floor_k,
        floor_v_bits=settings.kv_floor_v,
        dynamic_at=_lengths(settings.dynamic_cache_at),
        hot_bytes=_hot_bytes(settings, total_memory_bytes),
        archives_planes=settings.disk_put_away,
        disk_write=settings.disk_write,
        ttl_s=settings.cache_ttl_s,
        max_checkpoints=settings.kv_cache_marks,
        checkpoint_every_tokens=settings.kv_cache_mark_every,
    )


def _disk(settings: Settings) -> DiskOptions | None:
    if settings.disk_cache_dir is None or settings.hot_cache_only:
        return None
    directory = settings.disk_cache_dir.expanduser()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        volume_bytes = shutil.disk_usage(directory).total
    except OSError as error:
        raise ConfigError(f"--disk-cache-dir {directory} cannot be used: {error}. Choose another folder.") from error
    limit_bytes = settings.disk_cache_size.of(volume_bytes)
    if limit_bytes < MIN_DISK_BYTES:
        raise ConfigError(
            f"--disk-cache-size {settings.disk_cache_size} is too small to be of use: give it at least "
            f"{format_bytes(MIN_DISK_BYTES)}, or use --hot-cache-only."
        )
    return DiskOptions(
        directory=directory,
        limit_bytes=limit_bytes,
        reserve_bytes=settings.disk_reserve,
        queue_bytes=settings.disk_queue,
        daily_write_bytes=settings.disk_daily_writes,
        second_touch=settings.disk_second_touch,
        wait_s=settings.disk_wait_s,
        flush_s=max(settings.drain_timeout_s, MIN_FLUSH_S),
    )


def _remote(settings: Settings) -> RemoteOptions | None:
    if settings.remote_cache is None:
        if settings.remote_secret_file is not None:
            raise ConfigError(
                "--remote-secret-file is for a --remote-cache, and none is named. Name one, or leave both."
            )
        return None
    url = parse_url(settings.remote_cache)
    # Checked before the model is loaded, so that a mistake is reported at once.
    keys_for(url, settings.remote_secret_file)
    return RemoteOptions(
        url=url,
        secret_file=settings.remote_secret_file,
        precision=parse(settings.remote_precision).name,
        ttl_s=settings.remote_ttl_s,
        daily_write_bytes=settings.remote_daily_writes,
        second_touch=settings.remote_second_touch,
    )


def _lengths(text: str) -> tuple[tuple[int, Codec], ...]:
    try:
        return parse_lengths(text)
    except ConfigError as error:
        raise ConfigError(f"--dynamic-cache-at: {str(error).rstrip('.')}.") from None


def _hot_bytes(settings: Settings, total_memory_bytes: int) -> int | None:
    if settings.hot_cache_size is None:
        return None
    asked = settings.hot_cache_size.of(total_memory_bytes)
    if not 0 < asked <= total_memory_bytes:
        raise ConfigError(
            f"--hot-cache-size {settings.hot_cache_size} is not possible: this machine has "
            f"{format_bytes(total_memory_bytes)} of memory. Leave it out to use what running requests leave."
        )
    return asked


def _names(settings: Settings, loaded: LoadedModel) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of the model, and the paths that requests may use as names: its folder and the --model
    argument."""
    names, paths = {settings.served_model_name, loaded.name}, {str(loaded.path)}
    if settings.model is not None:
        (paths if Path(settings.model).expanduser().exists() else names).add(settings.model)
    return frozenset(name for name in names if name), frozenset(paths)

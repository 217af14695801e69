"""From settings and a loaded model to a service with a running engine. Only this knows Settings."""

from __future__ import annotations

import time

from kvstrata.config import Settings, human_bytes
from kvstrata.engine.engine import Engine
from kvstrata.engine.limits import Limits, Storage
from kvstrata.errors import ConfigError
from kvstrata.metrics import Metrics
from kvstrata.models.loaded import LoadedModel
from kvstrata.server.auth import ApiKey
from kvstrata.server.service import Service
from kvstrata.spans.plan import choose_names
from kvstrata.text.template import ChatTemplate


def start_service(settings: Settings, loaded: LoadedModel, *, total_memory_bytes: int) -> Service:
    """Starts the engine and waits until it is ready. Raises ModelError."""
    metrics = Metrics()
    engine = Engine(loaded, _limits(settings, total_memory_bytes), metrics, _storage(settings, total_memory_bytes))
    engine.start()
    return Service(
        loaded=loaded,
        engine=engine,
        metrics=metrics,
        template=ChatTemplate(loaded.tokenizer),
        name=settings.served_name or loaded.name,
        names=_names(settings, loaded),
        context_tokens=engine.context_tokens,
        max_prompts=max(1, settings.max_waiting),
        max_body_bytes=settings.max_body_bytes,
        keys=tuple(ApiKey.of(key) for key in settings.keys),
        started=int(time.time()),
    )


def _limits(settings: Settings, total_memory_bytes: int) -> Limits:
    return Limits(
        max_running=settings.max_running,
        max_waiting=settings.max_waiting,
        context_tokens=settings.context_tokens,
        prefill_chunk_tokens=settings.prefill_chunk_tokens,
        max_kv_size=settings.max_kv_size,
        tail_step_tokens=settings.tail_step_tokens,
        memory_bytes=settings.memory_limit.of(total_memory_bytes),
    )


def _storage(settings: Settings, total_memory_bytes: int) -> Storage:
    k, v = choose_names(
        quantization=settings.kv_cache_quantization,
        bits=settings.kv_cache_bits,
        k=settings.kv_cache_k,
        v=settings.kv_cache_v,
        group_size=settings.kv_cache_group_size,
    )
    return Storage(
        k=k,
        v=v,
        edge_layers=settings.kv_cache_edge_layers,
        edge=settings.kv_cache_edge,
        min_quantize_tokens=settings.kv_cache_min_quantize_tokens,
        live=settings.kv_cache_live,
        first_raw_tokens=settings.kv_cache_first_raw,
        recent_raw_tokens=settings.kv_cache_recent_raw,
        hot_bytes=_hot_bytes(settings, total_memory_bytes),
        ttl_s=settings.cache_ttl_s,
        max_marks=settings.kv_cache_marks,
        mark_every_tokens=settings.kv_cache_mark_every,
    )


def _hot_bytes(settings: Settings, total_memory_bytes: int) -> int | None:
    if settings.hot_cache_size is None:
        return None
    asked = settings.hot_cache_size.of(total_memory_bytes)
    if not 0 < asked <= total_memory_bytes:
        raise ConfigError(
            f"--hot-cache-size {settings.hot_cache_size} is not possible: this machine has "
            f"{human_bytes(total_memory_bytes)} of memory. Leave it out to use what running requests leave."
        )
    return asked


def _names(settings: Settings, loaded: LoadedModel) -> frozenset[str]:
    """The name it is shown by, its own name, and what it was started with."""
    names = {settings.served_name, loaded.name, settings.model, str(loaded.path)}
    return frozenset(name for name in names if name)

"""From settings and a loaded model to a service with a running engine. Only this knows Settings."""

from __future__ import annotations

import time

from kvstrata.config import Settings
from kvstrata.engine.engine import Engine
from kvstrata.engine.limits import Limits
from kvstrata.metrics import Metrics
from kvstrata.models.loaded import LoadedModel
from kvstrata.server.auth import ApiKey
from kvstrata.server.service import Service
from kvstrata.text.template import ChatTemplate


def start_service(settings: Settings, loaded: LoadedModel, *, total_memory_bytes: int) -> Service:
    """Starts the engine and waits until it is ready. Raises ModelError."""
    metrics = Metrics()
    engine = Engine(loaded, _limits(settings, total_memory_bytes), metrics)
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


def _names(settings: Settings, loaded: LoadedModel) -> frozenset[str]:
    """The name it is shown by, its own name, and what it was started with."""
    names = {settings.served_name, loaded.name, settings.model, str(loaded.path)}
    return frozenset(name for name in names if name)

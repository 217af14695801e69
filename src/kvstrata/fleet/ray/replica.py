"""Replica deployment on Ray Serve: a whole server without its HTTP listener. Ray creates, calls and ends it.

Replicas of a machine have exclusive folders: each takes the first one that is not locked. After a restart they take the
same folders again, so the blocks in them are reused.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import os
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from ray import serve
from starlette.types import Message

from kvstrata.config import Settings
from kvstrata.errors import ConfigError
from kvstrata.fleet.prompt_keys import ReplicaSummary
from kvstrata.fleet.replicas import call_app
from kvstrata.prefix_cache.entry_table import CacheListener
from kvstrata.server.history import HistorySampler
from kvstrata.server.state import ServerState

MAX_FOLDERS = 1024


def take_folder(parent: Path) -> tuple[Path, Callable[[], None]]:
    """Lock a folder and return it with a function that releases it. The lock also ends with the process. Raises
    ConfigError."""
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in range(MAX_FOLDERS):
            fd = os.open(parent / f"replica-{number}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                continue
            return parent / f"replica-{number}", lambda fd=fd: os.close(fd)
    except OSError as error:
        raise ConfigError(f"--disk-cache-dir {parent} cannot be used: {error}. Choose another folder.") from error
    raise ConfigError(f"--disk-cache-dir {parent}: all of its {MAX_FOLDERS} folders are in use. Choose another folder.")


GONE = "replica_gone"  # message type that replaces a response


class Replica:
    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Load the model, which takes as long as starting a server. `settings` are as in a TOML file."""
        from kvstrata.config import load as load_settings
        from kvstrata.server.app import create_app, wrap_app

        self._name = serve.get_replica_context().replica_id.unique_id
        self._summary = ReplicaSummary()
        own, self._give_back = _with_folder(load_settings(flags=settings))
        self._state = _start(own, self._summary)
        self._app = wrap_app(create_app(self._state), self._state, cors=False)
        self._capacity = own.max_num_seqs
        self._has_ended = False
        self._sampling: asyncio.Task[None] | None = None  # started by the first request, on Ray's event loop

    async def ask(
        self, request: Mapping[str, Any], body: bytes, *, to: str = "", only: bool = False
    ) -> AsyncIterator[Message]:
        """Yield the messages of the response. With `only`, a replica that `to` does not name refuses with `GONE`."""
        if only and to != self._name:
            yield {"type": GONE}
            return
        if self._sampling is None:
            self._sampling = asyncio.create_task(
                HistorySampler(self._state.engine, self._state.metrics, self._state.request_log.history).run()
            )
        async for message in call_app(self._app, request, body):
            yield message

    async def identity(self) -> dict[str, Any]:
        """Return the identity from which prefix keys are derived."""
        return dataclasses.asdict(self._state.engine.identity)

    def check_health(self) -> None:
        if not self._state.engine.alive:
            raise RuntimeError("The engine has stopped; the replica's log says why.")

    def record_routing_stats(self) -> dict[str, Any]:
        return {"keys": self._summary.to_bytes(), "capacity": self._capacity}

    def __del__(self) -> None:
        """Stop the server; Ray calls this when running replies have ended. Unwritten KV goes to the disk and shared
        tiers now."""
        if getattr(self, "_has_ended", True):
            return
        self._has_ended = True
        if self._sampling is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._sampling.get_loop().call_soon_threadsafe(self._sampling.cancel)
        self._state.engine.stop()
        if self._state.replies is not None:
            self._state.replies.memory.close()
        for end in self._state.at_end:
            end()
        self._give_back()


def _with_folder(settings: Settings) -> tuple[Settings, Callable[[], None]]:
    if settings.disk_cache_dir is None or settings.hot_cache_only:
        return settings, lambda: None
    folder, give_back = take_folder(settings.disk_cache_dir.expanduser())
    return settings.model_copy(update={"disk_cache_dir": folder}), give_back


def _start(settings: Settings, listener: CacheListener) -> ServerState:
    from kvstrata.platform.device import device
    from kvstrata.platform.logging import show_messages
    from kvstrata.server.build import build_server, load_model
    from kvstrata.server.options import server_options

    show_messages(settings.log_level, settings.log_format)
    machine = device()
    options = server_options(settings, machine)  # mistakes in settings are reported before the model is loaded
    return build_server(settings, load_model(settings, machine), machine, options=options, listeners=[listener])

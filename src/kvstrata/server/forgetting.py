"""Removal of texts that the server remembers besides the KV cache: divergences of sessions, replies, stored responses,
recent requests.

They are removed with the KV cache: when a caller clears it, and when they are unused for `--cache-ttl-s`. Runs on the
event loop; files of replies are changed on their own thread.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial

from anyio import to_thread

from kvstrata.engine.cache_api import Tier
from kvstrata.server.service import Service

# Interval between expiry runs: a tenth of the time to live, within these bounds.
LEAST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0


async def forget_texts(service: Service, salt: str | None, owner: str | None, tier: Tier) -> None:
    """Remove the texts under a salt, under all salts of an owner, or all. `hot` keeps replies and responses, because
    cached KV on the disk is found with them; `disk` keeps texts in memory."""
    if tier != "hot" and service.replies is not None:
        await to_thread.run_sync(partial(service.replies.clear, salt, owner, only_files=tier == "disk"))
    if tier != "disk":
        service.sessions.forget(salt, owner)
        service.journal.forget(salt, owner)
    if tier == "all":
        service.responses.clear(salt, owner)


def expire_texts(service: Service, before_s: float) -> None:
    """Remove the texts that were last used before a time, in seconds since the epoch."""
    service.sessions.expire(before_s)
    service.journal.expire(before_s)
    service.responses.expire(before_s)
    if service.replies is not None:
        service.replies.expire(before_s)


async def expire_regularly(service: Service, ttl_s: float) -> None:
    """Expire texts periodically until cancelled."""
    while True:
        expire_texts(service, time.time() - ttl_s)
        await asyncio.sleep(min(max(ttl_s / 10, LEAST_PAUSE_S), LONGEST_PAUSE_S))

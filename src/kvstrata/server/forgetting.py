"""Texts that the server remembers beside the KV: where sessions diverged, replies, stored responses, recent requests.

They go with the KV: when a caller clears it, and when no request has used them for `--cache-ttl-s`. Runs on the event
loop; files of replies are changed on their own thread.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial

from anyio import to_thread

from kvstrata.engine.cache_api import Tier
from kvstrata.server.service import Service

# Between two looks for what has expired: a tenth of the time to live, within these bounds.
LEAST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0


async def forget_texts(service: Service, salt: str | None, owner: str | None, tier: Tier) -> None:
    """Drop the texts under a salt, under all salts of an owner, or all texts. `hot`: replies and responses stay,
    because KV on the disk is found with them. `disk`: texts in memory stay."""
    if tier != "hot" and service.replies is not None:
        await to_thread.run_sync(partial(service.replies.clear, salt, owner, only_files=tier == "disk"))
    if tier != "disk":
        service.sessions.forget(salt, owner)
        service.journal.forget(salt, owner)
    if tier == "all":
        service.responses.clear(salt, owner)


def expire_texts(service: Service, before_s: float) -> None:
    """Drop the texts that were last used before a time, in seconds since the epoch."""
    service.sessions.expire(before_s)
    service.journal.expire(before_s)
    service.responses.expire(before_s)
    if service.replies is not None:
        service.replies.expire(before_s)


async def expire_regularly(service: Service, ttl_s: float) -> None:
    """Until it is cancelled."""
    while True:
        expire_texts(service, time.time() - ttl_s)
        await asyncio.sleep(min(max(ttl_s / 10, LEAST_PAUSE_S), LONGEST_PAUSE_S))

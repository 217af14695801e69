"""Open the store of a URL and try it out: problems are reported at the start, before anything is written.

A marker with a fixed name shows whether servers share one secret: the first creates it, all others must unseal it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from kvstrata.errors import ConfigError
from kvstrata.tiers.block_file import DamagedBlock
from kvstrata.tiers.remote.folder_store import FolderStore
from kvstrata.tiers.remote.health import StoreFault, StoreFaultReason
from kvstrata.tiers.remote.object_store import ObjectStore
from kvstrata.tiers.remote.redis_store import RedisStore
from kvstrata.tiers.remote.sealing import Keys, aes_gcm, seal, unseal
from kvstrata.tiers.remote.store import Content, KeyValueStore
from kvstrata.tiers.remote.url import FLAG, RemoteUrl

MARKER = "cluster"

BODY = b'{"format":2}'

TRIED_TTL_S = 60.0

LARGEST_MARKER_BYTES = 4096

NEXT_STEP = {
    StoreFaultReason.UNREACHABLE: "Check the address, that the store runs, and whether it speaks TLS",
    StoreFaultReason.TIMEOUT: "Check the address, that the store answers, and whether it speaks TLS",
    StoreFaultReason.DENIED: "Check user, password or credentials, and that they may read, write, list and delete "
    "there",
    StoreFaultReason.TLS: "Check that the store speaks TLS, and its certificate's name, date and authority (your own "
    "one: rediss://host:6380/0?ssl_ca_certs=FILE)",
    StoreFaultReason.READ_ONLY: "Name a store that can be written, not a replica",
    StoreFaultReason.FULL: "Make room there, or let the store evict (maxmemory-policy allkeys-lru)",
    StoreFaultReason.NO_PLACE: "Make the bucket or the folder first",
    StoreFaultReason.OTHER: "See what the store logs",
}


def make_store(url: RemoteUrl, clock: Callable[[], float] = time.time, *, ttl_s: float = 0.0) -> KeyValueStore:
    """Make a store without a query. `ttl_s`: for stores that cannot tell themselves what has expired. Raises
    ConfigError if the environment lacks what this kind of store needs."""
    if url.is_redis:
        return RedisStore(url)
    try:
        return FolderStore(url, clock, ttl_s=ttl_s) if url.scheme == "file" else ObjectStore(url, clock)
    except StoreFault as fault:
        raise ConfigError(f"{FLAG} {describe_fault(url, fault)}") from None


def open_store(
    url: RemoteUrl, keys: Keys, clock: Callable[[], float] = time.time, *, ttl_s: float = 0.0
) -> KeyValueStore:
    """Open a store that answers, can be written, and whose servers have this secret; otherwise raise ConfigError."""
    if keys.seal is not None:
        aes_gcm()
    store = make_store(url, clock, ttl_s=ttl_s)
    try:
        _try_out(store)
        _join_cluster(store, url, keys)
    except StoreFault as fault:
        store.close()
        raise ConfigError(f"{FLAG} {describe_fault(url, fault)}") from None
    except ConfigError:
        store.close()
        raise
    return store


def describe_fault(url: RemoteUrl, fault: StoreFault) -> str:
    """Return the reason why a store cannot be used, and the next step."""
    said = str(fault).rstrip(".")
    return f"{url.shown} cannot be used ({fault.reason}): {said}. {NEXT_STEP[fault.reason]}."


def _try_out(store: KeyValueStore) -> None:
    """Try every operation on a name that no value has: missing permissions show before anything is written."""
    no_one = os.urandom(32).hex()
    store.sizes([no_one])
    store.get(no_one, LARGEST_MARKER_BYTES)
    store.touch([no_one], TRIED_TTL_S)
    store.delete([no_one])


def _join_cluster(store: KeyValueStore, url: RemoteUrl, keys: Keys) -> None:
    try:
        found = _marker_of(store, seal(keys, MARKER, BODY))
        if found is None or bytes(unseal(keys, MARKER, bytes(found))) != BODY:
            raise ConfigError(f"{FLAG} {url.shown} does not keep what is written there. Name another store.")
    except DamagedBlock:
        other = "another secret" if keys.seal is not None else "a secret, and none was given"
        raise ConfigError(
            f"{FLAG} {url.shown} is used by servers with {other} (--remote-secret-file). Give all servers of "
            "a store the same file, or this one a store, database or prefix of its own."
        ) from None


def _marker_of(store: KeyValueStore, made: Content) -> Content | None:
    """Return the marker of a store: the new one if there was none."""
    try:
        return made if store.create(MARKER, made, 0.0) else store.get(MARKER, LARGEST_MARKER_BYTES)
    except StoreFault as fault:
        # A full store can be read, and may have space again; it must still prove that it is this cluster's.
        found = store.get(MARKER, LARGEST_MARKER_BYTES) if fault.reason is StoreFaultReason.FULL else None
        if found is None:
            raise
        return found

"""The store of a URL, tried before it is used: what is wrong with it is said at the start, and nothing is written.

A marker with a name of its own says whether servers share one secret: the first makes it, all others must open it.
"""

from __future__ import annotations

from kvstrata.errors import ConfigError
from kvstrata.remote.faults import DamagedBlock, Fault, StoreFault
from kvstrata.remote.seal import aes_gcm, seal, unseal
from kvstrata.remote.secret import Keys
from kvstrata.remote.stores.base import Store
from kvstrata.remote.stores.folder import FolderStore
from kvstrata.remote.stores.objects import ObjectStore
from kvstrata.remote.stores.redis import RedisStore
from kvstrata.remote.url import RemoteUrl

MARKER = "cluster"
BODY = b'{"format":1}'

NEXT_STEP = {
    Fault.UNREACHABLE: "Check the address, and that the store runs",
    Fault.TIMEOUT: "Check the address, and that the store answers",
    Fault.DENIED: "Check user, password or credentials, and that they may read, write and list there",
    Fault.READ_ONLY: "Name a store that can be written, not a replica",
    Fault.FULL: "Make room there, or let the store evict (maxmemory-policy allkeys-lru)",
    Fault.NO_PLACE: "Make the bucket or the folder first",
    Fault.OTHER: "See what the store logs",
}


def make_store(url: RemoteUrl) -> Store:
    """Asks nothing yet."""
    if url.is_redis:
        return RedisStore(url)
    return FolderStore(url) if url.scheme == "file" else ObjectStore(url)


def open_store(url: RemoteUrl, keys: Keys) -> Store:
    """A store that answers and can be written, and whose servers have this secret. Raises ConfigError."""
    if keys.seal is not None:
        aes_gcm()
    store = make_store(url)
    try:
        _join_cluster(store, url, keys)
    except StoreFault as fault:
        store.close()
        raise ConfigError(
            f"--remote-cache {url.shown} cannot be used ({fault.reason}): {fault}. {NEXT_STEP[fault.reason]}."
        ) from None
    except ConfigError:
        store.close()
        raise
    return store


def _join_cluster(store: Store, url: RemoteUrl, keys: Keys) -> None:
    made = seal(keys, MARKER, BODY)
    try:
        found = made if store.create(MARKER, made, 0.0) else store.get(MARKER)
    except StoreFault as fault:
        # A full store can be read, and may have room again; whether it is this cluster's it must say.
        found = store.get(MARKER) if fault.reason is Fault.FULL else None
        if found is None:
            raise
    try:
        if found is None or bytes(unseal(keys, MARKER, bytes(found))) != BODY:
            raise ConfigError(f"--remote-cache {url.shown} does not keep what is written there. Name another store.")
    except DamagedBlock:
        other = "another secret" if keys.seal is not None else "a secret, and none was given"
        raise ConfigError(
            f"--remote-cache {url.shown} is used by servers with {other} (--remote-secret-file). Give all servers of "
            "a store the same file, or this one a store, database or prefix of its own."
        ) from None

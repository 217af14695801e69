"""Values in Valkey or Redis, through redis-py. All names of a query go in one pipeline: one round trip."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from kvstrata.errors import ConfigError
from kvstrata.tiers.remote.health import StoreFault, StoreFaultReason
from kvstrata.tiers.remote.store import ANSWER_S, CONNECT_S, PREFIX, Content, StoredValue, require_size
from kvstrata.tiers.remote.url import FLAG, TLS_FILES, RemoteUrl

if TYPE_CHECKING:
    import redis

BATCH_SIZE = 500

# Words of Python's ssl in errors of redis-py. They may come with any later answer too, if TLS ends a connection.
TLS_SIGNS = ("SSL", "CERTIFICATE", "certificate")


class RedisStore:
    """A `KeyValueStore` in Redis or Valkey."""

    def __init__(self, url: RemoteUrl, *, connect_s: float = CONNECT_S, answer_s: float = ANSWER_S) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError:
            raise ConfigError(
                f"{url.scheme}:// needs the package redis. Install it with: pip install 'kvstrata[remote]'"
            ) from None
        _check_tls_files(url)
        self._client: redis.Redis = redis.Redis.from_url(
            url.with_login,
            socket_connect_timeout=connect_s,
            socket_timeout=answer_s,
            # A fault is a miss and a pause: no request waits for a second attempt.
            retry=Retry(NoBackoff(), 0),
            health_check_interval=0,
        )

    def sizes(self, names: Sequence[str]) -> list[int]:
        if not names:
            return []
        with _faults():
            pipeline = self._client.pipeline(transaction=False)
            for name in names:
                pipeline.strlen(_key(name))
            return [int(size) for size in pipeline.execute()]

    def leading(self, names: Sequence[str]) -> list[int]:
        return list(takewhile(bool, self.sizes(names)))

    def get(self, name: str, max_bytes: int) -> bytes | None:
        with _faults():
            # One round trip, and at most one byte above the limit.
            found: Any = self._client.getrange(_key(name), 0, max_bytes)
        require_size(len(found), max_bytes)
        return found or None

    def create(self, name: str, content: Content, ttl_s: float) -> bool:
        with _faults():
            # redis-py sends a view without a copy.
            view: Any = memoryview(content)
            return bool(self._client.set(_key(name), view, nx=True, px=int(1000 * ttl_s) or None))

    def touch(self, names: Sequence[str], ttl_s: float) -> None:
        with _faults():
            pipeline = self._client.pipeline(transaction=False)
            for name in names:
                if ttl_s:
                    pipeline.pexpire(_key(name), int(1000 * ttl_s))
                else:
                    pipeline.touch(_key(name))
            pipeline.execute()

    def delete(self, names: Sequence[str]) -> None:
        with _faults():
            if names:
                self._client.delete(*map(_key, names))

    def values(self) -> Iterator[StoredValue]:
        with _faults():
            batch: list[str] = []
            for key in self._client.scan_iter(match=f"{PREFIX}:*", count=BATCH_SIZE):
                batch.append(key.decode().removeprefix(f"{PREFIX}:"))
                if len(batch) == BATCH_SIZE:
                    yield from self._sized(batch)
                    batch = []
            yield from self._sized(batch)

    def _sized(self, names: Sequence[str]) -> Iterator[StoredValue]:
        sizes = zip(names, self.sizes(names), strict=True)
        return (StoredValue(name, nbytes) for name, nbytes in sizes if nbytes)

    def sweep(self, ttl_s: float) -> int:
        del ttl_s
        return 0

    def close(self) -> None:
        self._client.close()


def _check_tls_files(url: RemoteUrl) -> None:
    """Raise ConfigError with the name of an unreadable file: errors of redis-py do not name it."""
    for option in TLS_FILES:
        file = url.options.get(option)
        if file is not None and not os.access(file, os.R_OK):
            raise ConfigError(
                f"{FLAG}: {option} names {file}, which cannot be read. Name a file that this user may read."
            )


def _key(name: str) -> str:
    return f"{PREFIX}:{name}"


@contextmanager
def _faults() -> Iterator[None]:
    from redis import exceptions

    try:
        yield
    except exceptions.RedisError as error:
        raise StoreFault(_fault_of(error), _first_line(error)) from None
    except OSError as error:
        raise StoreFault(StoreFaultReason.UNREACHABLE, _first_line(error)) from None


def _fault_of(error: Exception) -> StoreFaultReason:
    from redis import exceptions as known

    denied = (known.AuthenticationError, known.AuthorizationError, known.NoPermissionError)
    match error:
        case _ if isinstance(error, denied) or str(error).startswith(("WRONGPASS", "NOAUTH", "NOPERM")):
            return StoreFaultReason.DENIED
        case known.ReadOnlyError():
            return StoreFaultReason.READ_ONLY
        case known.OutOfMemoryError():
            return StoreFaultReason.FULL
        case known.TimeoutError():
            return StoreFaultReason.TIMEOUT
        case known.ConnectionError() if any(sign in str(error) for sign in TLS_SIGNS):
            return StoreFaultReason.TLS
        case known.ConnectionError():
            return StoreFaultReason.UNREACHABLE
        case _ if "MISCONF" in str(error):
            return StoreFaultReason.READ_ONLY
        case _:
            return StoreFaultReason.OTHER


def _first_line(error: Exception) -> str:
    """Return one line of an error. Messages of a server do not repeat a password."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]

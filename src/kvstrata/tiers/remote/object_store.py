"""Values in an object store (S3, Google, Azure), through obstore. Each name is a request: few are sent, in parallel.

No object store lets a server set the expiry of a single object: a rule of the bucket or a sweep deletes objects that
were not used in time. An object's age counts from its last write, so an object that is used in the second half of its
time is written again.
"""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from kvstrata.errors import ConfigError
from kvstrata.tiers.block_file import DamagedBlock
from kvstrata.tiers.remote.health import StoreFault, StoreFaultReason
from kvstrata.tiers.remote.store import LARGEST_VALUE_BYTES, PREFIX, Content, StoredValue, require_size
from kvstrata.tiers.remote.url import RemoteUrl

T = TypeVar("T")

QUERY = re.compile(r"\?\S*")

CODE = re.compile(r"<Code>(\w+)</Code>")

NUM_PARALLEL_REQUESTS = 16

CLIENT = {"connect_timeout": "2s", "timeout": "60s"}

# Options of obstore. Under these names no variable of the environment overrides the URL: the address decides whether a
# store needs a secret.
ENDPOINT_OPTION = {"s3": "aws_endpoint_url_s3", "gs": "base_url", "az": "endpoint"}

RETRY: dict[str, Any] = {"max_retries": 1, "retry_timeout": datetime.timedelta(seconds=5)}


class ObjectStore:
    """A `KeyValueStore` in a bucket of an object store."""

    def __init__(self, url: RemoteUrl, clock: Callable[[], float] = time.time) -> None:
        """Open a bucket. Raises StoreFault if the environment does not name the store's account."""
        self._clock = clock
        try:
            with _faults():
                self._store = _open(url)
        except ImportError:
            raise ConfigError(
                f"{url.scheme}:// needs the package obstore. Install it with: pip install 'kvstrata[remote]'"
            ) from None
        self._pool = ThreadPoolExecutor(NUM_PARALLEL_REQUESTS, thread_name_prefix="kvstrata-remote")

    def sizes(self, names: Sequence[str]) -> list[int]:
        return self._each(self._size, names)

    def leading(self, names: Sequence[str]) -> list[int]:
        """Search in rounds of parallel requests. Parents are written first, so each round narrows the range between the
        last present and the first absent value."""
        found = [0] * len(names)
        first, last = 0, len(names)  # values before `first` are present, values from `last` on are absent
        while first < last:
            step = max(1, -(-(last - first) // NUM_PARALLEL_REQUESTS))
            looked = list(range(first + step - 1, last, step)) or [last - 1]
            if looked[-1] != last - 1:
                looked.append(last - 1)
            sizes = self.sizes([names[at] for at in looked])
            for at, nbytes in zip(looked, sizes, strict=True):
                if not nbytes:
                    last = at
                    break
                found[first : at + 1] = [nbytes] * (at + 1 - first)
                first = at + 1
        return found[:first]

    def get(self, name: str, max_bytes: int) -> memoryview | None:
        import obstore
        from obstore.exceptions import NotFoundError

        with _faults():
            try:
                found = obstore.get(self._store, _path(name))
                require_size(int(found.meta["size"]), max_bytes)  # before its bytes are read
                return memoryview(found.bytes())
            except (NotFoundError, FileNotFoundError):
                self._require_place()
                return None

    def create(self, name: str, content: Content, ttl_s: float) -> bool:
        del ttl_s
        import obstore
        from obstore.exceptions import AlreadyExistsError

        with _faults():
            try:
                obstore.put(self._store, _path(name), bytes(content), mode="create", use_multipart=False)
            except (AlreadyExistsError, FileExistsError):
                return False
        return True

    def touch(self, names: Sequence[str], ttl_s: float) -> None:
        if ttl_s:
            self._each(lambda name: self._refresh(name, ttl_s), names)

    def delete(self, names: Sequence[str]) -> None:
        import obstore
        from obstore.exceptions import NotFoundError

        with _faults():
            for name in names:
                try:
                    obstore.delete(self._store, _path(name))
                except (NotFoundError, FileNotFoundError):
                    continue

    def values(self) -> Iterator[StoredValue]:
        for meta in self._metas():
            yield StoredValue(str(meta["path"]).rsplit("/", 1)[-1], int(meta["size"]))

    def sweep(self, ttl_s: float) -> int:
        old = [str(meta["path"]) for meta in self._metas() if ttl_s and self._age_s(meta) > ttl_s]
        names = [path.rsplit("/", 1)[-1] for path in old if path.count("/") > 1]
        self.delete(names)
        return len(names)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _metas(self) -> Iterator[Any]:
        import obstore

        with _faults():
            for batch in obstore.list(self._store, prefix=PREFIX):
                yield from batch

    def _size(self, name: str) -> int:
        meta = self._head(name)
        return 0 if meta is None else int(meta["size"])

    def _head(self, name: str) -> Any:
        import obstore
        from obstore.exceptions import NotFoundError

        with _faults():
            try:
                return obstore.head(self._store, _path(name))
            except (NotFoundError, FileNotFoundError):
                return None

    def _refresh(self, name: str, ttl_s: float) -> None:
        import obstore

        meta = self._head(name)
        if meta is None or self._age_s(meta) < ttl_s / 2:
            return
        try:
            content = self.get(name, LARGEST_VALUE_BYTES)
        except DamagedBlock:
            return
        if content is not None:
            with _faults():
                obstore.put(self._store, _path(name), bytes(content), use_multipart=False)

    def _age_s(self, meta: Any) -> float:
        """Return the age of an object, by the clocks of this machine and of the store."""
        return self._clock() - meta["last_modified"].timestamp()

    def _require_place(self) -> None:
        """Raise if the bucket does not exist: a request for an object has the same error for both."""
        import obstore

        next(iter(obstore.list(self._store, prefix=PREFIX, chunk_size=1)), None)

    def _each(self, ask: Callable[[str], T], names: Sequence[str]) -> list[T]:
        return list(self._pool.map(ask, names))


def _open(url: RemoteUrl) -> Any:
    from obstore.store import AzureStore, GCSStore, S3Store

    kinds: dict[str, Any] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
    client = dict(CLIENT)
    options: dict[str, Any] = {name: value for name, value in url.options.items() if name == "region"}
    if url.endpoint:
        if url.scheme == "az":
            options["use_emulator"] = False  # the emulator has an address of its own
        options[ENDPOINT_OPTION[url.scheme]] = url.endpoint
        client["allow_http"] = str(url.endpoint.startswith("http://")).lower()
    prefix = url.path.strip("/") or None
    return kinds[url.scheme](url.host, prefix=prefix, client_options=client, retry_config=RETRY, **options)


def _path(name: str) -> str:
    """Return a path: blocks are in 256 folders, which object stores spread, values with fixed names beside these."""
    return f"{PREFIX}/{name[:2]}/{name}" if len(name) > 32 else f"{PREFIX}/{name}"


@contextmanager
def _faults() -> Iterator[None]:
    from obstore import exceptions

    try:
        yield
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise StoreFault(StoreFaultReason.DENIED, _first_line(error)) from None
    except exceptions.BaseError as error:
        raise StoreFault(_fault_of(str(error)), _first_line(error)) from None
    except FileNotFoundError as error:
        raise StoreFault(StoreFaultReason.NO_PLACE, _first_line(error)) from None
    except PermissionError as error:
        raise StoreFault(StoreFaultReason.DENIED, _first_line(error)) from None
    except (OSError, ValueError) as error:
        raise StoreFault(StoreFaultReason.OTHER, _first_line(error)) from None


SIGNS = {
    # Without credentials obstore asks the metadata server of the cloud that it may run in.
    "169.254.169.254": StoreFaultReason.DENIED,
    "metadata.google.internal": StoreFaultReason.DENIED,
    "Account must be specified": StoreFaultReason.DENIED,
    "NoSuchBucket": StoreFaultReason.NO_PLACE,
    "ContainerNotFound": StoreFaultReason.NO_PLACE,
    "AccessDenied": StoreFaultReason.DENIED,
    "InvalidAccessKeyId": StoreFaultReason.DENIED,
    "SignatureDoesNotMatch": StoreFaultReason.DENIED,
    "Forbidden": StoreFaultReason.DENIED,
    "InvalidCertificate": StoreFaultReason.TLS,
    "InvalidContentType": StoreFaultReason.TLS,
    "timed out": StoreFaultReason.TIMEOUT,
    "TimedOut": StoreFaultReason.TIMEOUT,
    "onnect": StoreFaultReason.UNREACHABLE,
    "error sending request": StoreFaultReason.UNREACHABLE,
    "not found": StoreFaultReason.NO_PLACE,
}


def _fault_of(text: str) -> StoreFaultReason:
    return next((fault for sign, fault in SIGNS.items() if sign in text), StoreFaultReason.OTHER)


def _first_line(error: Exception) -> str:
    """Return one line of an error, without the queries of addresses, which may hold signatures."""
    said = str(error).splitlines() or [type(error).__name__]
    said = QUERY.sub("", said[0].split(": <")[0])[:200]
    code = CODE.search(str(error))
    return f"{code[1]}: {said}" if code else said

"""MLX's CPU streams, handed from a thread that ends to the next one.

MLX starts a thread for every CPU stream and keeps it for the life of the process, `mx.clear_streams()` or not; with it
stay its stack and its share of the allocator's arenas. A thread that took a stream of its own would leave all that
behind, so there are never more streams than threads that compute at the same time.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mlx.core as mx


class MlxStreams:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[mx.Stream] = []

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Give this thread a CPU stream that no other thread uses meanwhile. To be left on the same thread, where MLX
        cannot be used afterwards."""
        import mlx.core as mx

        stream = self._take()
        mx.set_default_stream(stream)
        try:
            yield
        finally:
            try:
                mx.synchronize()
                mx.synchronize(stream)
            finally:
                # A thread that ends with streams of its own still alive can take the process down with it.
                mx.clear_streams()
                with self._lock:
                    self._free.append(stream)

    def _take(self) -> mx.Stream:
        import mlx.core as mx

        with self._lock:
            if self._free:
                return self._free.pop()
        return mx.new_thread_unsafe_stream(mx.cpu)


@functools.cache
def streams() -> MlxStreams:
    """Return the streams of this process."""
    return MlxStreams()

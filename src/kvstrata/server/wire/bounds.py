"""Limits of a client: bytes, seconds, connections."""

from __future__ import annotations

from dataclasses import dataclass

# Least transfer rate of a body and of a response; slower clients time out.
MIN_BYTES_S = 1024


@dataclass(frozen=True)
class Bounds:
    max_connections: int = 512
    max_header_bytes: int = 32 << 10
    header_timeout_s: float = 20.0
    max_body_bytes: int = 32 << 20
    body_memory_bytes: int = 256 << 20
    body_timeout_s: float = 30.0
    send_timeout_s: float = 60.0

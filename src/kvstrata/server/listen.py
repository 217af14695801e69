"""Binds the address to listen on. Light to import: a port in use is known in a moment, before any model loads."""

from __future__ import annotations

import errno
import socket

from kvstrata.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(_bind_problem(host, port, error)) from None
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _bind_problem(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        other = port + 1 if port < 65535 else port - 1
        return f"Port {port} on {host} is in use. Stop the other program, or take another port: --port {other}"
    if error.errno == errno.EACCES:
        return f"Port {port} needs more rights than this process has. Take one above 1023: --port 8000"
    return f"Cannot listen on {host}, port {port}: {error.strerror or error}. Check --host and --port."

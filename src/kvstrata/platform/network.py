"""Loopback addresses and listening sockets. Light to import: a server learns that its port is in use before it loads
a model.
"""

from __future__ import annotations

import errno
import ipaddress
import socket

from kvstrata.errors import ConfigError


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address. A name other than localhost may resolve to anything."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address. Raises ConfigError with the next step."""
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

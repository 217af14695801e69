"""TLS on loopback: a certificate authority, and a TLS front of a plain server."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import ssl
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Certificate:
    file: Path
    key_file: Path


class Authority:
    """A certificate authority. `file`: its certificate; certificates that it signs are in the same folder."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        pytest.importorskip("cryptography", reason="cryptography is not installed: pip install 'kvstrata[remote]'")
        from cryptography.hazmat.primitives.asymmetric import ec

        self._folder = folder
        self._name = name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(_pem(self._build_certificate(name, self._key.public_key(), (), is_authority=True)))

    def make_certificate(self, name: str, *addresses: str, is_expired: bool = False) -> Certificate:
        """Make a certificate for these host names and addresses."""
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        made = Certificate(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        made.file.write_bytes(_pem(self._build_certificate(name, key.public_key(), addresses, is_expired=is_expired)))
        secret = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        made.key_file.write_bytes(secret)
        return made

    def _build_certificate(
        self, name: str, public_key, addresses, *, is_authority: bool = False, is_expired: bool = False
    ):
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes

        day = datetime.timedelta(days=1)
        now = datetime.datetime.now(datetime.UTC) - (10 * day if is_expired else 0 * day)
        named = [
            x509.IPAddress(ipaddress.ip_address(each)) if each[0].isdigit() else x509.DNSName(each)
            for each in addresses
        ]
        builder = (
            x509.CertificateBuilder()
            .subject_name(_x509_name(name))
            .issuer_name(_x509_name(self._name))
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - day)
            .not_valid_after(now + 5 * day)
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        )
        if named:
            builder = builder.add_extension(x509.SubjectAlternativeName(named), critical=False)
        return builder.sign(self._key, hashes.SHA256())


def _x509_name(name: str):
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _pem(certificate) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return certificate.public_bytes(serialization.Encoding.PEM)


class TlsFront:
    """A TLS front of a plain server on loopback. `client_authority`: the authority that must have signed the
    certificates of clients; None: clients need none."""

    def __init__(self, port: int, certificate: Certificate, client_authority: Authority | None = None) -> None:
        self._target = port
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate.file, certificate.key_file)
        if client_authority is not None:
            self._context.verify_mode = ssl.CERT_REQUIRED
            self._context.load_verify_locations(client_authority.file)
        self.port = 0
        self.num_bytes = 0  # forwarded, in both directions
        self._listens = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self._listens.wait(10)

    async def _run(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        self._loop.set_exception_handler(lambda *_: None)  # tests make clients break off
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context) as server:
            self.port = server.sockets[0].getsockname()[1]
            self._listens.set()
            await self._ended.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._target)
        try:
            await asyncio.gather(self._pump(reader, to_server), self._pump(from_server, writer))
        finally:
            writer.transport.abort()
            to_server.transport.abort()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await source.read(64 << 10):
                self.num_bytes += len(piece)
                sink.write(piece)
                await sink.drain()
        sink.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(10)

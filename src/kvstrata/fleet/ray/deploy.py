"""Configuration text for `serve run`, `serve deploy` and KubeRay (`serveConfigV2`). Does not need Ray."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstrata.config import Settings
from kvstrata.server.http.body_limit import HttpLimits

# Time for running replies and for writing cached KV when a replica ends, unless --drain-timeout-s is given: Ray
# also ends replicas by itself, and that should not cut off a long reply.
# Names of the deployments, in the application and in its configuration.
INGRESS, REPLICA = "Router", "Replica"
GRACE_S = 600.0


@dataclass(frozen=True)
class Scale:
    """Number of replicas, fixed or autoscaled by the number of requests, and the resources of each."""

    least: int = 1
    most: int = 2
    cpus: float = 1.0  # per replica, in Ray's units
    gpus: float = 0.0

    @property
    def is_fixed(self) -> bool:
        return self.least == self.most


def deploy_text(settings: Settings, given: Mapping[str, Any], scale: Scale) -> str:
    """Return the configuration as YAML. `given` holds the settings that were set; replicas use defaults for the
    rest."""
    options = {"num_cpus": scale.cpus, **({"num_gpus": scale.gpus} if scale.gpus else {})}
    grace = grace_s(settings)
    config = {
        "proxy_location": "EveryNode",
        "http_options": {"host": settings.host, "port": settings.port},
        "applications": [
            {
                "name": "kvstrata",
                "route_prefix": "/",
                "import_path": "kvstrata.fleet.ray.app:build",
                "args": dict(given),
                "deployments": [
                    {
                        "name": REPLICA,
                        **_replicas(settings, scale),
                        "max_ongoing_requests": settings.max_num_seqs + settings.max_waiting,
                        "graceful_shutdown_timeout_s": grace,
                        "ray_actor_options": options,
                    },
                    {
                        "name": INGRESS,
                        "num_replicas": 1,
                        "max_ongoing_requests": HttpLimits.max_connections,
                        "graceful_shutdown_timeout_s": grace,
                        "ray_actor_options": {"num_cpus": 0},
                    },
                ],
            }
        ],
    }
    return "\n".join(["# serve run serve.yaml", *_lines(config), ""])


def grace_s(settings: Settings) -> float:
    return settings.drain_timeout_s if "drain_timeout_s" in settings.model_fields_set else GRACE_S


def _replicas(settings: Settings, scale: Scale) -> dict[str, Any]:
    if scale.is_fixed:
        return {"num_replicas": scale.least}
    # Above max_num_seqs, a replica has waiting requests.
    return {
        "autoscaling_config": {
            "min_replicas": scale.least,
            "max_replicas": scale.most,
            "target_ongoing_requests": settings.max_num_seqs,
            "upscale_delay_s": 10,
            "downscale_delay_s": 600,  # a removed replica's cache is lost
        }
    }


def _lines(value: Any, indent: str = "") -> list[str]:
    """Return a value as lines of YAML. Scalars are written as JSON, which is valid YAML."""
    if isinstance(value, Mapping):
        lines: list[str] = []
        for key, inner in value.items():
            if isinstance(inner, Mapping | list) and inner:
                lines += [f"{indent}{key}:", *_lines(inner, indent + "  ")]
            else:
                lines.append(f"{indent}{key}: {json.dumps(inner)}")
        return lines
    lines = []
    for item in value:
        first, *rest = _lines(item, indent + "  ") if isinstance(item, Mapping) else [f"{indent}  {json.dumps(item)}"]
        lines += [f"{indent}- {first.lstrip()}", *rest]
    return lines

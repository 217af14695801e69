"""The application that `serve run` builds from a configuration (`kvstrata ray config`)."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from kvstrata.config import load as load_settings
from kvstrata.fleet.ray.deploy import INGRESS, REPLICA, grace_s
from kvstrata.fleet.ray.ingress import RayIngress
from kvstrata.fleet.ray.replica import Replica
from kvstrata.server.http.body_limit import HttpLimits

# Interval of a replica's reports. The router itself knows the prompts sent in between.
REPORT_S = 2.0
ROUTER = "kvstrata.fleet.ray.request_router:RouteToNamed"


def build(args: dict[str, Any]) -> Application:
    """Build the application. `args` holds settings as in a TOML file; errors in them are raised before a replica
    starts."""
    settings = load_settings(flags=args)
    router = RequestRouterConfig(request_router_class=ROUTER, request_routing_stats_period_s=REPORT_S)  # pyright: ignore
    replica: Any = serve.deployment(
        Replica,
        name=REPLICA,
        request_router_config=router,
        # Above this limit the server itself responds with an error in the shape of its API.
        max_ongoing_requests=settings.max_num_seqs + settings.max_waiting,
        graceful_shutdown_timeout_s=grace_s(settings),
        health_check_period_s=5.0,
    )
    ingress: Any = serve.deployment(
        RayIngress,
        name=INGRESS,
        max_ongoing_requests=HttpLimits.max_connections,
        graceful_shutdown_timeout_s=grace_s(settings),
    )
    return ingress.bind(args, replica.bind(args))

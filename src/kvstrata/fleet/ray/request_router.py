"""Request router for Ray Serve: sends a request to the replica that it names. `fleet/router.py` has made the choice.

Ray creates one in each process that calls replicas, and updates it with the replicas and their reports.
"""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from kvstrata.fleet.ray import reports


class RouteToNamed(RequestRouter):
    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the named replica, or all of them if it is gone; the call's `only` argument then decides."""
        if pending_request is None:
            return [list(candidate_replicas)]
        pending_request.routing_context.should_backoff = True  # otherwise Ray retries in a busy loop
        wanted = pending_request.kwargs.get("to")
        named = [replica for replica in candidate_replicas if replica.replica_id.unique_id == wanted]
        return [named or list(candidate_replicas)]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        reports.publish_reports(
            {replica.replica_id.unique_id: dict(replica.routing_stats or {}) for replica in replicas}
        )

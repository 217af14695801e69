"""Ray's part of routing: a request goes to the replica that it names. The choice is made before, in `fleet/front.py`.

Ray makes one of these in each process that calls replicas, and tells it which there are and what they report.
"""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from kvstrata.fleet.ray import hearing


class ToNamed(RequestRouter):
    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Where the named one has gone, any other: the call says itself whether that will do."""
        if pending_request is None:
            return [list(candidate_replicas)]
        pending_request.routing_context.should_backoff = True  # else Ray asks again and again, without a pause
        wanted = pending_request.kwargs.get("to")
        named = [replica for replica in candidate_replicas if replica.replica_id.unique_id == wanted]
        return [named or list(candidate_replicas)]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        hearing.tell({replica.replica_id.unique_id: dict(replica.routing_stats or {}) for replica in replicas})

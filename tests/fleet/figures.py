"""What replicas find of four conversations of three turns, and what a killed one costs: default model, real Ray.

    python -m tests.fleet.figures

One server, then two replicas behind our front, then two behind Ray's own router, in one run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.fleet.ray_fleet import FLEET_PAUSE_S, PATIENCE_S, RayFleet, cached, kill, ray_fleet
from tests.support.eventually import eventually

TURNS, CONVERSATIONS, REPLY_TOKENS = 3, 4, 24
SYSTEM = "You are a careful engineer. You answer in short sentences and give the reason for what you say. " * 3
NEXT = "What should I try next?"
FLAGS = {"memory_limit": "3GiB", "max_num_seqs": "4"}


def first(number: int) -> list[dict[str, Any]]:
    question = f"Case {number}: " + f"the pump numbered {number * 7919} stops after {number + 3} minutes. " * 8
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def found(chat: Callable[..., httpx.Response]) -> tuple[int, int]:
    """Cached and asked tokens of turns 2 and 3; the turns of all conversations one after the other."""
    chats = [first(number) for number in range(CONVERSATIONS)]
    hits, asked = 0, 0
    for turn in range(TURNS):
        for messages in chats:
            answer = chat(messages, max_tokens=REPLY_TOKENS).raise_for_status()
            if turn:
                hits += cached(answer)
                asked += answer.json()["usage"]["prompt_tokens"]
            reply = answer.json()["choices"][0]["message"]["content"]
            messages += [
                {"role": "assistant", "content": reply},
                {"role": "user", "content": "What should I try next?"},
            ]
    return hits, asked


def deploy_by_load(num_replicas: int) -> None:
    """The same, but Ray's own router chooses."""
    from ray import serve

    from kvstrata.fleet.ray.deploy import INGRESS
    from kvstrata.fleet.ray.ingress import RayIngress
    from kvstrata.fleet.ray.replica import Replica

    nothing = {"num_cpus": 0}
    replica: Any = serve.deployment(
        Replica, name="Replica", num_replicas=num_replicas, ray_actor_options=nothing, max_ongoing_requests=100
    )
    front: Any = serve.deployment(RayIngress, name=INGRESS, ray_actor_options=nothing, max_ongoing_requests=100)
    serve.run(front.bind(FLAGS, replica.bind(FLAGS)), name="kvstrata", route_prefix="/")


def show(name: str, told: tuple[int, int], one: int) -> None:
    print(f"{name:24} {told[0]:6,} of {told[1]:6,} cached, {told[0] / one:.1%} of what one server finds", flush=True)


def main() -> None:
    from ray import serve

    with tempfile.TemporaryDirectory() as folder, ray_fleet() as fleet:
        shared = Path(folder) / "shared"
        shared.mkdir(mode=0o700)
        fleet.deploy(1, **FLAGS, remote_cache=f"file://{shared}")
        one = found(fleet.chat)
        show("one server", one, one[0])
        serve.delete("kvstrata")
        fleet.deploy(2)
        show("our front, 2 replicas", found(fleet.chat), one[0])
        resume(fleet)
        serve.delete("kvstrata")
        deploy_by_load(2)
        show("Ray's router, 2 replicas", found(fleet.chat), one[0])


def resume(fleet: RayFleet) -> None:
    """A conversation of some 1,000 tokens whose replica is killed."""
    messages = first(99)
    messages[1]["content"] *= 6
    before = {name: one["remote"]["written_tokens"] for name, one in fleet.replicas().items()}
    answer = fleet.chat(messages, max_tokens=REPLY_TOKENS).raise_for_status()
    home = answer.headers["x-kvstrata-replica"]
    num_blocks = answer.json()["usage"]["prompt_tokens"] // 256
    written_tokens = before[home] + 256 * num_blocks
    eventually(
        lambda: fleet.replicas()[home]["remote"]["written_tokens"] >= written_tokens, PATIENCE_S, pause_s=FLEET_PAUSE_S
    )
    kill(home)
    fleet.wait_for(2, without=home)
    messages += [{"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]}]
    messages += [{"role": "user", "content": NEXT}]
    again = fleet.chat(messages, max_tokens=REPLY_TOKENS).raise_for_status()
    prompt = again.json()["usage"]["prompt_tokens"]
    print(
        f"killed: {prompt:,} tokens asked at another replica, {prompt - cached(again):,} prefilled; "
        f"{prompt - answer.json()['usage']['prompt_tokens']} of them were new",
        flush=True,
    )


if __name__ == "__main__":
    main()

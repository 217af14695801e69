"""Client process of the server benchmark: reads a line from stdin, runs one round of streams, writes a line to stdout.

It is a separate module so that this process imports neither MLX nor the server.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import httpx


async def read_stream(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for _ in response.aiter_lines():
            pass


async def serve_rounds(url: str, bodies: list[dict[str, Any]]) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        for _ in sys.stdin:
            await asyncio.gather(*(read_stream(client, body) for body in bodies))
            print("done", flush=True)


if __name__ == "__main__":
    asyncio.run(serve_rounds(sys.argv[1], json.loads(sys.argv[2])))

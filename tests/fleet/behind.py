"""Two real servers behind the routers that people have: how much of each prompt is found where it was sent.

    python -m tests.fleet.behind --nginx NGINX --smg SMG --dynamo PYTHON

Four conversations of three turns on the default model, in an order that changes from turn to turn, streamed. Shown are
the cached tokens of turns 2 and 3, beside one server alone and beside round robin in the same run. Routers that are not
named are left out; PYTHON is one that has ai-dynamo-runtime. Nothing is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

TOPICS = ("an orchard", "a harbour", "a railway station", "a library")
QUESTIONS = ("Who works there, and from when on?", "What do they do when it rains?", "And what is it like at night?")
NUM_TURNS = len(QUESTIONS)
REPLY_TOKENS = 32
START_S = 900.0
SESSION_HEADER = "x-kvstrata-session"
MODEL = "default"  # Dynamo's name for it: it only has to be the same everywhere

# Without TLS there is nothing to verify, and reading the machine's certificates takes 65 ms for each client. No
# connection is kept: routers come and go under it.
HTTP = httpx.Client(verify=False, timeout=600, limits=httpx.Limits(max_keepalive_connections=0))

# What docs/routers.md shows. HASH is a line or nothing.
NGINX = """
worker_processes 1;
daemon off;
pid FOLDER/nginx.pid;
error_log FOLDER/error.log warn;
events { worker_connections 1024; }
http {
    access_log off;
    client_body_temp_path FOLDER/body;
    proxy_temp_path FOLDER/proxy;
    fastcgi_temp_path FOLDER/fastcgi;
    uwsgi_temp_path FOLDER/uwsgi;
    scgi_temp_path FOLDER/scgi;

    map "$http_x_kvstrata_session$http_x_claude_code_session_id" $kv_session {
        ""      $remote_addr;
        default "$http_x_kvstrata_session$http_x_claude_code_session_id";
    }
    upstream kvstrata {
        HASH
        SERVERS
        keepalive 32;
    }
    server {
        listen 127.0.0.1:PORT;
        client_max_body_size 32m;
        location / {
            proxy_pass http://kvstrata;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_read_timeout 3600s;
            proxy_send_timeout 3600s;
        }
    }
}
"""

# Where a request goes: from conversation and messages to a base URL.
Route = Callable[[int, list[dict[str, str]]], str]


@dataclass(frozen=True)
class Worker:
    url: str
    events: str
    replay: str


@dataclass(frozen=True)
class Found:
    name: str
    cached: int  # tokens, of turns 2 and 3
    asked: int
    chunks: int  # that came one by one, of all replies
    replies: tuple[int, ...]  # of each server: one that got all of them would find everything too


def free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextmanager
def process(command: Sequence[str], health_url: str) -> Iterator[None]:
    """Runs until the block ends. Its output goes to a file, and is shown where it does not start."""
    with tempfile.TemporaryFile("w+") as log:
        running = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_for(health_url, running, log)
            yield
        finally:
            running.terminate()
            try:
                running.wait(20)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()


def wait_for(url: str, running: subprocess.Popen[bytes], log: Any) -> None:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s and running.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if HTTP.get(url, timeout=5).status_code == 200:
                return
        time.sleep(1)
    log.seek(0)
    raise SystemExit(f"{running.args} did not start:\n{log.read()[-3000:]}")


@contextmanager
def workers(number: int) -> Iterator[list[Worker]]:
    with ExitStack() as stack:
        found: list[Worker] = []
        for _ in range(number):
            port, events = free_ports(2)
            one = Worker(f"http://127.0.0.1:{port}", f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{events + 1}")
            program = (sys.executable, "-c", "from kvstrata.cli import main; main()", "serve")
            flags = ("--port", str(port), "--kv-events", one.events)
            stack.enter_context(process((*program, *flags, "--memory-limit", "2GiB"), f"{one.url}/health"))
            found.append(one)
        yield found


@contextmanager
def nginx(program: str, behind: Sequence[Worker], hash_line: str) -> Iterator[Route]:
    (port,) = free_ports(1)
    folder = Path(tempfile.mkdtemp())
    servers = " ".join(f"server {worker.url.removeprefix('http://')};" for worker in behind)
    text = NGINX.replace("FOLDER", str(folder)).replace("PORT", str(port))
    (folder / "nginx.conf").write_text(text.replace("HASH", hash_line).replace("SERVERS", servers))
    command = (program, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log"))
    url = f"http://127.0.0.1:{port}"
    try:
        with process(command, f"{url}/health"):
            yield lambda _conversation, _messages: url
    finally:
        shutil.rmtree(folder)


@contextmanager
def smg(program: str, behind: Sequence[Worker], *flags: str) -> Iterator[Route]:
    port, metrics_port = free_ports(2)
    url = f"http://127.0.0.1:{port}"
    command = (program, "launch", "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port))
    urls = ("--worker-urls", *(worker.url for worker in behind))
    with process((*command, *urls, *flags), f"{url}/readiness"):
        yield lambda _conversation, _messages: url


@contextmanager
def dynamo(python: str, behind: Sequence[Worker]) -> Iterator[Route]:
    """Its selector hears our events, is asked with token ids, and says to which worker to go."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command = (python, "-m", "dynamo.select_service", "--port", str(port))
    with process(command, f"{url}/health"), httpx.Client(base_url=url, verify=False) as selector:
        for number, worker in enumerate(behind):
            registered = {
                "worker_id": number, "model_name": MODEL, "endpoint": worker.url, "block_size": 16,
                "kv_events_endpoints": {"0": worker.events}, "replay_endpoint": worker.replay,
            }  # fmt: skip
            selector.post("/workers", json=registered).raise_for_status()

        def route(_conversation: int, messages: list[dict[str, str]]) -> str:
            told = HTTP.post(f"{behind[0].url}/tokenize", json={"messages": messages}).raise_for_status()
            asked = {"model_name": MODEL, "token_ids": told.json()["tokens"]}
            chosen = selector.post("/select", json=asked).raise_for_status()
            return behind[chosen.json()["worker_id"]].url

        yield route


def round_robin(behind: Sequence[Worker]) -> Route:
    calls = iter(range(1 << 30))
    return lambda _conversation, _messages: behind[next(calls) % len(behind)].url


def talk(name: str, behind: Sequence[Worker], route: Route) -> Found:
    """All conversations, on servers that hold nothing before."""
    for worker in behind:
        HTTP.post(f"{worker.url}/cache/clear", json={"tier": "all"}).raise_for_status()
    before = [num_replies(worker) for worker in behind]
    order = random.Random(7)
    chats = [[{"role": "system", "content": _system(topic)}] for topic in TOPICS]
    cached = asked = chunks = 0
    for turn, question in enumerate(QUESTIONS):
        for number in order.sample(range(len(chats)), len(chats)):
            chats[number].append({"role": "user", "content": question})
            text, usage, came = streamed(route(number, chats[number]), number, chats[number])
            chats[number].append({"role": "assistant", "content": text})
            chunks += came
            if turn:
                cached += usage["prompt_tokens_details"]["cached_tokens"]
                asked += usage["prompt_tokens"]
    replies = tuple(num_replies(worker) - earlier for worker, earlier in zip(behind, before, strict=True))
    return Found(name, cached, asked, chunks, replies)


def num_replies(worker: Worker) -> int:
    name = "vllm:e2e_request_latency_seconds_count"
    lines = HTTP.get(f"{worker.url}/metrics").raise_for_status().text.splitlines()
    return next(int(float(line.split()[1])) for line in lines if line.startswith(name))


def _system(topic: str) -> str:
    text = f"You are a guide to {topic}. You answer in one plain sentence and never invent a name. "
    return text + f"Whoever visits {topic} wants to know what there is to see, who works there and when it opens. " * 5


def streamed(url: str, number: int, messages: list[dict[str, str]]) -> tuple[str, dict[str, Any], int]:
    body = {
        "model": "SmolLM2-135M-Instruct", "messages": messages, "max_tokens": REPLY_TOKENS, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    headers = {SESSION_HEADER: f"conversation-{number}"}
    text, usage, chunks = "", {}, 0
    with HTTP.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
        if answer.status_code != 200:
            raise SystemExit(f"{url}: {answer.status_code} {answer.read()!r}")
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            usage = chunk.get("usage") or usage
            pieces = [choice["delta"].get("content") or "" for choice in chunk["choices"]]
            text += "".join(pieces)
            chunks += any(pieces)
    return text, usage, chunks


def table(found: Sequence[Found]) -> str:
    alone = found[0].cached / found[0].asked
    lines = ["| in front | cached of asked | of what one server finds | replies of each |", "|---|---|---|---|"]
    for one in found:
        share = one.cached / one.asked / alone
        each = ", ".join(map(str, one.replies))
        lines.append(f"| {one.name} | {one.cached}/{one.asked} | {share:.1%} | {each} |")
    return "\n".join(lines)


def measure(asked: argparse.Namespace) -> Iterator[Found]:
    with workers(2) as both:
        yield talk("one server, nothing in front", both[:1], round_robin(both[:1]))
        yield talk("two servers, round robin", both, round_robin(both))
        if asked.nginx:
            for name, line in (("round robin", ""), ("hash of the session", "hash $kv_session consistent;")):
                with nginx(asked.nginx, both, line) as route:
                    yield talk(f"nginx, {name}", both, route)
        if asked.smg:
            sticky = ("--routing-key-override", "--routing-key-headers", SESSION_HEADER)
            cases = (("--policy", "round_robin"), ("--policy", "cache_aware"), ("--policy", "round_robin", *sticky))
            for flags in cases:
                with smg(asked.smg, both, *flags) as route:
                    yield talk(f"smg {' '.join(flags)}", both, route)
        if asked.dynamo:
            with dynamo(asked.dynamo, both) as route:
                yield talk("Dynamo's selector, by our KV events", both, route)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("nginx", "smg", "dynamo"):
        parser.add_argument(f"--{name}", default=os.environ.get(f"KVSTRATA_TEST_{name.upper()}"))
    found: list[Found] = []
    for one in measure(parser.parse_args()):
        found.append(one)
        print(f"{one.name}: {one.cached}/{one.asked}, {one.chunks} chunks, replies of each {one.replies}", flush=True)
    print(table(found))


if __name__ == "__main__":
    main()

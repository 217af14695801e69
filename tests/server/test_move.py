"""Sessions that move between real servers, as files of ours and of mlx-lm's."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from typer.testing import CliRunner

from kvstrata.cli import app
from kvstrata.engine.cache_api import as_ids
from kvstrata.errors import KvstrataError
from kvstrata.models.load import LoadedModel
from kvstrata.server.sessions import SessionName
from tests.support.models import VOCAB, tiny_loaded, tiny_module
from tests.support.servers import Served, running

OCTETS = {"content-type": "application/octet-stream"}
PROMPT = [5 + (7 * i + i * i) % 80 for i in range(400)]
QUESTION = [9, 8, 7]


def complete(served: Served, prompt: list[int], key: str = "", **fields: Any) -> tuple[list[int], int]:
    """The reply's ids, and how many tokens of the prompt were cached."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "prompt_cache_key": "chat-1", **fields}
    with served.http() as http:
        answer = http.post("/v1/completions", json=body, headers=headers).json()
    ids = [ord(letter) - 32 for letter in answer["choices"][0]["text"]]
    return ids, answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def exported(served: Served, session: str = "chat-1", key: str = "", query: str = "") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with served.http() as http:
        return http.get(f"/cache/sessions/{session}/export{query}", headers=headers)


def imported(served: Served, content: bytes, key: str = "", query: str = "") -> httpx.Response:
    headers = {**OCTETS, **({"authorization": f"Bearer {key}"} if key else {})}
    with served.http() as http:
        return http.post(f"/cache/import{query}", content=content, headers=headers)


def run(served: Served, *arguments: str) -> dict[str, Any]:
    env = {"KVSTRATA_URL": served.url, "COLUMNS": "120"}
    result = CliRunner().invoke(app, ["cache", *arguments, "--json"], env=env)
    if isinstance(result.exception, KvstrataError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def stored(served: Served) -> tuple[int, int]:
    with served.http() as http:
        hot = http.get("/cache/usage").json()["tiers"]["hot"]
    return hot["tokens"], hot["bytes"]


@pytest.mark.parametrize(
    ("architecture", "flags"),
    [
        ("llama", {}),
        ("llama", {"cache_type_k": "planes:8", "cache_type_v": "planes:4", "kv_cache_min_quantize_tokens": 0}),
        ("gemma3_text", {}),
        ("qwen3_next", {}),
        ("falcon_h1", {}),
        ("llama", {"max_kv_size": 64}),
    ],
)
def test_the_next_turn_goes_on_at_the_other_server(architecture: str, flags: dict[str, Any], tmp_path: Path) -> None:
    loaded, file = tiny_loaded(architecture), tmp_path / "chat.kvstrata"
    with running(loaded, **flags) as here, running(loaded, **flags) as there:
        reply, _ = complete(here, PROMPT)
        told = run(here, "export", "chat-1", str(file))
        assert told["tokens"] == len(PROMPT) + len(reply) - 1
        assert file.stat().st_mode & 0o777 == 0o600
        taken = run(there, "import", str(file))
        assert (taken["session"], taken["tokens"], taken["new_tokens"]) == ("chat-1", told["tokens"], told["tokens"])
        # Again: nothing of it is new.
        assert run(there, "import", str(file))["new_tokens"] == 0
        turn = [*PROMPT, *reply, *QUESTION]
        expected, cached_here = complete(here, turn)
        got, cached_there = complete(there, turn)
        assert got == expected
        assert cached_there == cached_here == told["tokens"]
        with there.http() as http:
            assert [each["id"] for each in http.get("/cache/sessions").json()["sessions"]] == ["chat-1"]


def test_what_only_the_disk_has_is_exported_too(tmp_path: Path) -> None:
    loaded = tiny_loaded("qwen3_next")
    with running(loaded, disk_cache_dir=tmp_path, options={"disk": {"reserve_bytes": 0}}) as here:
        reply, _ = complete(here, PROMPT)
        here.server.state.engine.ask(lambda core: core.prefix_cache.flush(30)).result(60)
        here.ask("/cache/clear", tier="hot")
        assert stored(here)[0] == 0
        # A clear forgets the ids of sessions too: they are known again by the next request, of which nothing is kept.
        _adopt(here, [*PROMPT, *reply])
        content = exported(here).content
    with running(loaded) as there:
        assert imported(there, content).json()["tokens"] >= len(PROMPT)
        assert complete(there, [*PROMPT, *reply, *QUESTION])[1] >= len(PROMPT)


def _adopt(served: Served, tokens: list[int]) -> None:
    state, name = served.server.state, SessionName("prompt_cache_key", "chat-1", bytes(32))
    key, ids = state.sessions.adopt_session("", name).key, as_ids(tokens)
    state.engine.ask_cache(lambda cache: cache.adopt_conversation("", key, name.digest, ids, len(PROMPT))).result(60)


def test_keys_are_kept_apart() -> None:
    loaded = tiny_loaded("llama")
    with running(loaded, api_key=["one", "two"], admin_key=["all"]) as served:
        reply, _ = complete(served, PROMPT, "one")
        assert exported(served).status_code == 401
        assert exported(served, key="two").status_code == 404
        content = exported(served, key="one").content
        # An admin sees everyone's.
        assert exported(served, key="all").status_code == 200
        turn = [*PROMPT, *reply, *QUESTION]
        assert imported(served, content, "two", "?cache_salt=aside").json()["new_tokens"] == len(PROMPT) + 7
        assert complete(served, turn, "two")[1] == 0
        assert complete(served, turn, "two", cache_salt="aside")[1] == len(PROMPT) + 7
        salts = [key.salt.encode() for key in served.server.state.keys]
        roots = served.server.state.engine.ask(lambda core: core.prefix_cache.table.tree.root_keys).result(60)
        for secret in (*salts, *roots, *(root.hex().encode() for root in roots), b"Bearer"):
            assert secret not in content


def test_another_model_is_refused_with_what_differs() -> None:
    with running(tiny_loaded("llama")) as here:
        complete(here, PROMPT)
        content = exported(here).content
    other = replace(tiny_loaded("llama"), fingerprint="other weights")
    with running(other) as there:
        answer = imported(there, content)
        assert answer.status_code == 400
        assert "tiny-llama in the file, other weights here" in answer.json()["error"]["message"]
        assert stored(there) == (0, 0)


def test_what_cannot_be_exported_or_imported_is_said(tmp_path: Path) -> None:
    with running(tiny_loaded("llama", 4), hot_cache_size="1MiB") as served:
        assert exported(served, "nobody").json()["error"]["code"] == "session_not_found"
        complete(served, PROMPT)
        assert exported(served, query="?format=zip").status_code == 400
        with served.http() as http:
            assert http.post("/cache/import", content=b"x", headers={"content-type": "text/plain"}).status_code == 400
        served.ask("/cache/clear", tier="hot")
        limit = served.server.state.engine.transfer.limit_bytes
        told = imported(served, bytes(limit + 1))
        assert told.status_code == 413
        assert "--memory-limit" in told.json()["error"]["message"]
    with running(tiny_loaded("llama", 4)) as here:
        complete(here, [*PROMPT, *PROMPT])
        content = exported(here).content
    with running(tiny_loaded("llama", 4), hot_cache_size="512KiB") as small:
        answer = imported(small, content)
        assert answer.json()["error"]["code"] == "memory_limit_exceeded"
        assert "512KiB" in answer.json()["error"]["message"]
        assert stored(small) == (0, 0)
    kept = tmp_path / "kept"
    kept.write_text("mine")
    with running(tiny_loaded("llama", 4)) as served, pytest.raises(KvstrataError, match="--force"):
        run(served, "export", "chat-1", str(kept))
    assert kept.read_text() == "mine"


def test_streams_go_on_while_sessions_move() -> None:
    loaded = tiny_loaded("llama")
    with running(loaded) as served:
        complete(served, PROMPT * 10)
        with served.openai() as client:
            stream = client.completions.create(
                model=served.name, prompt=[3, 4, 5], max_tokens=300, stream=True, extra_body={"ignore_eos": True}
            )
            first = next(iter(stream))
            assert first.choices
            content = exported(served).content
            assert imported(served, content, query="?cache_salt=x").status_code == 200
            assert sum(1 for _ in stream) > 50


# mlx-lm.


def heads_of_64(architecture: str) -> LoadedModel:
    """Large enough for mlx-lm's groups of 64."""
    config = {"head_dim": 64}
    module = tiny_module(architecture, **config)
    loaded = tiny_loaded(architecture)
    return replace(loaded, module=module, config={**loaded.config, **config}, fingerprint=f"wide-{architecture}")


def greedy(model: Any, tokens: list[int], caches: list[Any], count: int = 8) -> list[int]:
    steps = generate_step(mx.array(tokens), model, max_tokens=count, prompt_cache=caches)
    return [int(token) for token, _ in steps]


def prompt_cache(model: Any, file: Path, **options: Any) -> list[Any]:
    """As `mlx_lm.cache_prompt` makes it."""
    caches = make_prompt_cache(model, options.pop("max_kv_size", None))
    for _ in generate_step(mx.array(PROMPT), model, max_tokens=0, prompt_cache=caches, **options):
        pass
    save_prompt_cache(str(file), caches, {"model": "tiny", "tokenizer_config": "{}"})
    return caches


CASES = [
    ("llama", {}, {}),
    ("llama", {"kv_bits": 8, "quantized_kv_start": 0}, {}),
    ("llama", {"kv_bits": 4, "quantized_kv_start": 0}, {}),
    ("qwen3", {"max_kv_size": 64}, {"max_kv_size": 64}),
    ("gemma3_text", {}, {}),
    ("qwen3_next", {}, {}),
    ("falcon_h1", {}, {}),
]


@pytest.mark.parametrize(("architecture", "options", "flags"), CASES)
def test_we_take_what_cache_prompt_wrote(
    architecture: str, options: dict[str, Any], flags: dict[str, Any], tmp_path: Path
) -> None:
    loaded = heads_of_64(architecture) if "kv_bits" in options else tiny_loaded(architecture, 4)
    file, tokens, wrong = tmp_path / "cache.safetensors", tmp_path / "tokens.json", tmp_path / "wrong.json"
    caches = prompt_cache(loaded.module, file, **options)
    tokens.write_text(json.dumps(PROMPT))
    with running(loaded, **flags) as served:
        with pytest.raises(KvstrataError, match="Give the prompt"):
            run(served, "import", str(file))
        # Where all layers are rings, a token that has left them all hardly tells in what they hold.
        for at in (0, len(PROMPT) - 30 if flags else 200, len(PROMPT) - 1):
            other = [*PROMPT[:at], (PROMPT[at] + 1) % VOCAB, *PROMPT[at + 1 :]]
            wrong.write_text(json.dumps(other))
            with pytest.raises(KvstrataError, match="not this model's for this prompt"):
                run(served, "import", str(file), "--tokens", str(wrong))
        wrong.write_text(json.dumps(PROMPT[:-1]))
        with pytest.raises(KvstrataError, match=r"holds|from what this model computes"):
            run(served, "import", str(file), "--tokens", str(wrong))
        assert stored(served) == (0, 0)
        assert run(served, "import", str(file), "--tokens", str(tokens))["new_tokens"] == len(PROMPT)
        got, cached = complete(served, [*PROMPT, *QUESTION])
        assert cached == len(PROMPT)
        assert got == greedy(loaded.module, QUESTION, caches)


@pytest.mark.parametrize(
    ("architecture", "flags"),
    [
        ("llama", {}),
        ("llama", {"cache_type_k": "affine:8", "cache_type_v": "affine:8", "kv_cache_min_quantize_tokens": 0}),
        ("llama", {"max_kv_size": 64}),
        ("gemma3_text", {}),
        ("qwen3_next", {}),
        ("falcon_h1", {}),
    ],
)
def test_mlx_lm_goes_on_from_what_we_wrote(architecture: str, flags: dict[str, Any], tmp_path: Path) -> None:
    loaded = heads_of_64(architecture) if "cache_type_k" in flags else tiny_loaded(architecture)
    file = tmp_path / "cache.safetensors"
    with running(loaded, **flags) as served:
        reply, _ = complete(served, PROMPT)
        told = run(served, "export", "chat-1", str(file), "--mlx")
        whole = [*PROMPT, *reply, *QUESTION]
        expected, cached = complete(served, whole)
        assert cached == told["tokens"]
        # And back, with the tokens that the file has beside it.
        assert run(served, "import", str(file), "--salt", "again")["new_tokens"] == told["tokens"]
        assert complete(served, whole, cache_salt="again") == (expected, told["tokens"])
    caches: Any = load_prompt_cache(str(file))
    assert greedy(loaded.module, whole[told["tokens"] :], caches) == expected


def test_a_prompt_is_rendered_as_cache_prompt_does(served: Served, default_model: LoadedModel, tmp_path: Path) -> None:
    text = "What grows in an orchard? " * 4
    tokenizer: Any = default_model.tokenizer
    messages = [{"role": "user", "content": text}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=False, continue_final_message=True)
    caches = make_prompt_cache(default_model.module)
    for _ in generate_step(mx.array(ids), default_model.module, max_tokens=0, prompt_cache=caches):
        pass
    file, prompt, chat = tmp_path / "cache.safetensors", tmp_path / "prompt.txt", tmp_path / "chat.json"
    save_prompt_cache(str(file), caches, {"model": "x", "tokenizer_config": "{}"})
    prompt.write_text(text)
    chat.write_text(json.dumps(messages))
    assert run(served, "import", str(file), "--prompt-file", str(prompt))["tokens"] == len(ids)
    assert run(served, "import", str(file), "--messages", str(chat))["new_tokens"] == 0


# Hostile files of mlx-lm's.


@pytest.fixture(scope="module")
def plain_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    file = tmp_path_factory.mktemp("mlx") / "cache.safetensors"
    prompt_cache(tiny_loaded("llama", 4).module, file)
    return file.read_bytes()


def test_prompt_caches_that_say_something_else_are_refused(plain_file: bytes) -> None:
    length = int.from_bytes(plain_file[:8], "little")
    fields = json.loads(plain_file[8 : 8 + length])
    payload = plain_file[8 + length :]
    first = fields["0.0"]
    changes: list[Any] = [
        lambda f: f["__metadata__"].update({"1.0": "os.system"}),
        lambda f: f["__metadata__"].update({"1.0": "BatchKVCache"}),
        lambda f: f["__metadata__"].pop("1.3"),
        lambda f: f["__metadata__"].pop("2.1.0"),
        lambda f: f.update({"0.0": {**first, "shape": [1, 2, 1 << 60, 16]}}),
        lambda f: f.update({"0.0": {**first, "shape": [1, -2, -512, 16]}}),
        lambda f: f.update({"0.0": {**first, "data_offsets": [first["data_offsets"][0], 1 << 62]}}),
        lambda f: f.update({"0.0": {**first, "dtype": "F64"}}),
        lambda f: f.update({"0.0": {**first, "dtype": ["F32"]}}),
        lambda f: f.update({"0.0": f["0.2"]}),
        lambda f: f.update({"0.0": None}),
        lambda f: f.pop("2.1"),
    ]
    with running(tiny_loaded("llama", 4)) as served:
        for change in changes:
            changed = json.loads(json.dumps(fields))
            change(changed)
            text = json.dumps(changed).encode()
            answer = imported(served, enveloped(len(text).to_bytes(8, "little") + text + payload))
            assert answer.status_code == 400, answer.text
        for header in (b"[" * 100_000, b'{"a":' * 50_000, b"{}", b"\xff" * 64):
            assert imported(served, len(header).to_bytes(8, "little") + header + payload).status_code == 400
        assert imported(served, (1 << 63).to_bytes(8, "little") + b"{" + payload).status_code == 400
        assert stored(served) == (0, 0)
        assert imported(served, enveloped(plain_file)).status_code == 200


def enveloped(content: bytes) -> bytes:
    from kvstrata.tiers.bundle import BundleHeader, BundleWriter

    writer = BundleWriter(BundleHeader("prompt_cache", prompt={"tokens": PROMPT}))
    pieces = itertools.chain(writer.begin(), writer.record([memoryview(content)], len(content)), writer.end())
    return b"".join(map(bytes, pieces))

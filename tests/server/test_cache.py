"""/cache through the front door: what is said of the cache is what requests then get."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from kvstrata.engine.cache_api import CacheApi
from kvstrata.engine.executor import EngineCore
from tests.server.test_ops import scrape
from tests.support.models import VOCAB, tiny_loaded
from tests.support.servers import Served, running

LONG = [5 + (i * 7 + i // 11) % (VOCAB - 10) for i in range(400)]


def post(served: Served, path: str, status: int = 200, key: str = "", **body: Any) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with served.http() as http:
        response = http.post(path, json=body, headers=headers)
    assert response.status_code == status, response.text
    return response.json()


def get(served: Served, path: str) -> dict[str, Any]:
    with served.http() as http:
        return http.get(path).raise_for_status().json()


def settle(served: Served) -> None:
    """What follows a request, such as trimming its buffers, is done."""

    def work(core: EngineCore) -> None:
        while core.pacer.has_work:
            core.pacer.run_slice(1.0)

    served.server.state.engine.ask(work).result(60)


def complete(served: Served, prompt: list[int], **fields: Any) -> int:
    """Tells how many tokens were cached."""
    response = served.ask("/v1/completions", prompt=prompt, max_tokens=2, temperature=0, **fields)
    assert response.status_code == 200, response.text
    settle(served)
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_usage_adds_up(fresh: Served) -> None:
    complete(fresh, LONG)
    usage = get(fresh, "/cache/usage")
    hot = usage["tiers"]["hot"]
    assert hot["tokens"] == len(LONG) + 1  # the last token of a reply is never fed
    assert hot["spans"] == 1
    assert hot["bytes"] == sum(hot["by_precision"].values()) == sum(hot["by_kind"].values()) > 0
    assert hot["bytes"] == sum(usage["held"]["k"].values()) + sum(usage["held"]["v"].values())
    assert usage["headroom_bytes"] == usage["budget_bytes"] - usage["running_bytes"] - hot["bytes"]
    assert usage["allocator_bytes"] >= hot["bytes"]
    assert usage["sequences"] == []


def test_explain_tells_what_a_request_then_gets(fresh: Served) -> None:
    for cut in (1, 137, 255, 399):
        for prompt in (LONG[:cut], [*LONG[:cut], 3], [*LONG[:cut], 3, *LONG]):
            said = post(fresh, "/cache/explain", tokens=prompt)
            assert said["prompt_tokens"] == len(prompt)
            assert said["cached_tokens"] == sum(said["by_tier"].values()) == complete(fresh, prompt)
    said = post(fresh, "/cache/explain", tokens=LONG[:399])
    assert (said["cached_tokens"], said["ends_because"]) == (398, "complete")


def test_explain_shows_where_prompts_part(fresh: Served) -> None:
    assert post(fresh, "/cache/explain", tokens=LONG)["ends_because"] == "empty"
    complete(fresh, LONG)
    other = [*LONG[:100], 1, *LONG[101:]]
    said = post(fresh, "/cache/explain", tokens=other)
    assert (said["ends_because"], said["at_token"], said["cached_tokens"]) == ("diverged", 100, 100)
    text = "".join(chr(32 + token) for token in other)
    assert said["before"] == text[88:100]
    assert said["after"] == text[100:112]
    assert said["around"] == text[88:112]
    assert said["instead"] == ["".join(chr(32 + token) for token in LONG[100:112])]
    assert said["num_instead"] == 1
    complete(fresh, other)
    third = post(fresh, "/cache/explain", tokens=[*LONG[:100], 2, 2])
    assert {text[0] for text in third["instead"]} == {chr(32 + LONG[100]), chr(32 + 1)}
    assert third["num_instead"] == 2


def test_explain_reads_a_chat_as_the_chat_endpoint_does(client: openai.OpenAI, served: Served) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "You are brief."},
        {"role": "user", "content": "Name a river in the north of Spain, and the sea that it flows to."},
    ]
    first = client.chat.completions.create(model=served.name, messages=messages, max_tokens=2, temperature=0)
    assert first.usage is not None
    said = post(served, "/cache/explain", messages=messages)
    assert said["prompt_tokens"] == first.usage.prompt_tokens
    assert said["cached_tokens"] == first.usage.prompt_tokens - 1
    messages[1]["content"] = "Name a river in the south of Spain, and the sea that it flows to."
    said = post(served, "/cache/explain", messages=messages)
    assert said["ends_because"] == "diverged"
    assert said["before"].endswith("Name a river in the")
    assert said["after"].startswith(" south of Spain")
    assert len(said["instead"]) == said["num_instead"] == 1
    assert said["instead"][0].startswith(" north of Spain")
    again = client.chat.completions.create(model=served.name, messages=messages, max_tokens=2, temperature=0)
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == said["cached_tokens"]


def test_plain_text_is_one_prompt(served: Served) -> None:
    text = "The largest lake of Finland is"
    served.ask("/v1/completions", prompt=text, max_tokens=1)
    said = post(served, "/cache/explain", prompt=text)
    assert said["cached_tokens"] == said["prompt_tokens"] - 1


def test_salts_are_apart(fresh: Served) -> None:
    complete(fresh, LONG)
    said = post(fresh, "/cache/explain", tokens=LONG, cache_salt="mine")
    assert (said["cached_tokens"], said["ends_because"]) == (0, "salt")
    complete(fresh, LONG, cache_salt="mine")
    assert post(fresh, "/cache/explain", tokens=LONG, cache_salt="mine")["cached_tokens"] == len(LONG) - 1
    assert post(fresh, "/cache/clear", tier="hot", salt="mine")["tokens"] == len(LONG) + 1
    assert post(fresh, "/cache/explain", tokens=LONG)["cached_tokens"] == len(LONG) - 1
    complete(fresh, LONG, cache_salt="mine")
    assert post(fresh, "/cache/clear", tier="hot")["bytes_left"] == 0


def test_what_is_pinned_stays(fresh: Served) -> None:
    complete(fresh, LONG)
    assert post(fresh, "/cache/pin", tokens=LONG) == {"prompt_tokens": 400, "tokens": 400}
    kept = post(fresh, "/cache/clear", tier="hot")
    assert kept["tokens"] == 0
    assert kept["bytes_left"] == get(fresh, "/cache/usage")["tiers"]["hot"]["bytes"] > 0
    assert post(fresh, "/cache/unpin", tokens=LONG)["tokens"] == 400
    assert post(fresh, "/cache/clear", tier="hot")["bytes_left"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_what_does_not_fit_beside_pins_is_refused_and_not_tried_again(stream: bool) -> None:
    with running(tiny_loaded("llama")) as served:
        complete(served, LONG)
        post(served, "/cache/pin", tokens=LONG)

        def leave_room(core: EngineCore) -> None:
            pinned_bytes = CacheApi(core).usage().tiers["hot"].nbytes
            core.memory.budget = replace(core.budget, total_bytes=pinned_bytes * 3 // 2)

        served.server.state.engine.ask(leave_room).result(60)
        with served.openai() as client, pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model=served.name, prompt=LONG[::-1], max_tokens=2, stream=stream)
        assert refused.value.code == "memory_pinned"
        assert "/cache/unpin" in refused.value.message
        post(served, "/cache/unpin", tokens=LONG)
        assert complete(served, LONG[::-1]) == 0


def test_a_dry_run_tells_what_a_change_then_frees(fresh: Served) -> None:
    complete(fresh, LONG)
    before = get(fresh, "/cache/usage")
    said = post(fresh, "/cache/requantize", k="planes:8", v="planes:4", dry_run=True)
    assert (said["dry_run"], said["spans"], said["bytes_before"]) == (True, 1, before["tiers"]["hot"]["bytes"])
    assert 0 < said["expected_error"] < 0.1
    assert said["tiers"] == {
        "hot": {
            "spans": 1,
            "bytes_before": said["bytes_before"],
            "bytes_after": said["bytes_after"],
            "bytes_freed": said["bytes_before"] - said["bytes_after"],
        }
    }
    unchanged = get(fresh, "/cache/usage")
    assert (unchanged["tiers"], unchanged["target"]) == (before["tiers"], before["target"])

    done = post(fresh, "/cache/requantize", ctk="q8_0", ctv="q4_0")
    assert done["target"] == {"k": "planes:8", "v": "planes:4"}
    assert (done["bytes_before"], done["bytes_after"]) == (said["bytes_before"], said["bytes_after"])
    wait_done(fresh)
    usage = get(fresh, "/cache/usage")
    assert usage["tiers"]["hot"]["bytes"] == said["bytes_after"]
    assert (set(usage["held"]["k"]), set(usage["held"]["v"])) == ({"planes:8"}, {"planes:4"})
    kv = get(fresh, "/props")["kv"]
    assert (kv["k"], kv["v"], kv["target"], kv["held"]) == ("planes:8", "planes:4", usage["target"], usage["held"])
    assert complete(fresh, LONG) == len(LONG) - 1

    up = post(fresh, "/cache/requantize", k="raw", v="raw")
    assert up["target"] == {"k": "raw", "v": "raw"}
    assert up["bytes_after"] == up["bytes_before"] == sum(left["bytes"] for left in up["left_alone"])


def wait_done(served: Served) -> dict[str, Any]:
    """Each question is answered between two pieces of work."""
    for _ in range(2000):
        progress = get(served, "/cache/requantize")
        if not progress["is_running"]:
            return progress
    raise AssertionError("the change does not end")


def test_progress_and_cancel(fresh: Served) -> None:
    for start in range(8):
        complete(fresh, LONG[start:])
    spans = get(fresh, "/cache/usage")["tiers"]["hot"]["spans"]
    post(fresh, "/cache/requantize", k="planes:4", v="planes:4")
    with fresh.http() as http:
        stopped = http.delete("/cache/requantize").json()
    assert stopped["spans_total"] == spans
    assert 0 <= stopped["spans_done"] <= spans
    assert get(fresh, "/cache/requantize")["is_running"] is False
    # Every span is whole, whatever it is stored as.
    for start in range(8):
        assert complete(fresh, LONG[start:]) == len(LONG) - start - 1


def test_a_running_request_is_seen_with_its_parts(fresh: Served) -> None:
    complete(fresh, LONG)
    with fresh.openai() as client:
        stream = client.completions.create(model=fresh.name, prompt=[*LONG, 9, 9], max_tokens=2000, stream=True)
        next(stream)
        [sequence] = get(fresh, "/cache/usage")["sequences"]
        assert sequence["tokens"] >= len(LONG) + 1
        shared, own = sequence["parts"]
        assert (shared["tokens"], shared["k"], shared["v"]) == (len(LONG), "raw", "raw")
        assert shared["bytes"] > 0
        assert sequence["tokens"] == shared["tokens"] + own["tokens"]
        said = post(fresh, "/cache/requantize", k="planes:8", scope="live", sequence=sequence["id"], dry_run=True)
        assert said["bytes_before"] > 0
        stream.close()
    fresh.wait_idle()


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/cache/clear", {}, "tier", "'hot' (memory), 'disk' or 'all', or a salt"),
        ("/cache/clear", {"tier": "cold"}, "tier", "'hot', 'disk' or 'all'"),
        ("/cache/clear", {"tier": "disk"}, "tier", "no disk tier"),
        ("/cache/clear", {"tier": "hot", "salt": 5}, "salt", "string"),
        ("/cache/explain", {}, None, "messages, prompt, tokens and session"),
        ("/cache/explain", {"tokens": [5], "prompt": "a"}, "tokens", "together"),
        ("/cache/explain", {"tokens": []}, "tokens", "at least 1"),
        ("/cache/explain", {"tokens": [VOCAB]}, "prompt", "not a token id"),
        ("/cache/explain", {"tokens": [-1]}, "tokens.0", "greater than"),
        ("/cache/explain", {"tokens": [5] * 9000}, "prompt", "9000"),
        ("/cache/explain", {"messages": [{"role": "user", "content": "x"}]}, None, "no chat template"),
        ("/cache/pin", {"prompt": ["a", "b"]}, "prompt.0", "integer"),
        ("/cache/unpin", {}, None, "messages, prompt, tokens and session"),
        ("/cache/requantize", {}, "k", "planes:4"),
        ("/cache/requantize", {"k": "planes:5"}, "k", "planes"),
        ("/cache/requantize", {"v": "q6_k"}, "v", "affine:8"),
        ("/cache/requantize", {"ctk": "wat"}, "ctk", "affine:8"),
        ("/cache/requantize", {"k": "raw", "ctk": "q8_0"}, "ctk", "different"),
        ("/cache/requantize", {"k": "affine:8:g128"}, None, "head_dim"),
        ("/cache/requantize", {"k": "raw", "scope": "everything"}, "scope", "'all'"),
        ("/cache/requantize", {"k": "raw", "scope": "disk"}, "scope", "no disk tier"),
        ("/cache/requantize", {"k": "raw", "sequence": "nobody"}, None, "nobody"),
    ],
)
def test_bad_input_gets_a_clear_answer(
    tiny: Served, path: str, body: dict[str, Any], param: str | None, words: str
) -> None:
    settle(tiny)
    before = get(tiny, "/cache/usage")
    error = post(tiny, path, 400, **body)["error"]
    assert words in error["message"]
    assert error["param"] == param
    after = get(tiny, "/cache/usage")
    assert (after["tiers"], after["target"]) == (before["tiers"], before["target"])


def test_unknown_model_and_other_bodies(tiny: Served) -> None:
    error = post(tiny, "/cache/explain", 404, model="other", tokens=[5])["error"]
    assert error["code"] == "model_not_found"
    with tiny.http() as http:
        for path in ("/cache/clear", "/cache/explain", "/cache/requantize", "/cache/pin", "/cache/unpin"):
            plain = http.post(path, content=b'{"tier": "all"}', headers={"content-type": "text/plain"})
            assert plain.status_code == 400, path
            assert "application/json" in plain.json()["error"]["message"]


def test_a_scope_that_matches_nothing_is_said(fresh: Served) -> None:
    complete(fresh, LONG)
    said = post(fresh, "/cache/requantize", k="planes:4", salt="nobody's")
    assert (said["spans"], said["bytes_before"], said["left_alone"]) == (0, 0, [])
    assert said["note"]
    assert get(fresh, "/cache/usage")["target"] == {"k": "raw", "v": "raw"}


def test_recurrent_state_is_left_alone_and_said() -> None:
    with running(tiny_loaded("qwen3_next")) as hybrid:
        assert complete(hybrid, LONG) == 0
        assert complete(hybrid, LONG) == len(LONG) - 1
        usage = get(hybrid, "/cache/usage")
        assert usage["tiers"]["hot"]["by_kind"].keys() == {"full", "recurrent"}
        said = post(hybrid, "/cache/requantize", k="planes:4", v="planes:4")
        assert "recurrent" in " ".join(left["reason"] for left in said["left_alone"])


def test_window_layers_are_counted_as_held() -> None:
    with running(tiny_loaded("gemma3_text")) as windowed:
        complete(windowed, LONG)
        usage = get(windowed, "/cache/usage")
        hot = usage["tiers"]["hot"]
        assert hot["by_kind"].keys() == {"full", "window"}
        assert hot["bytes"] == sum(usage["held"]["k"].values()) + sum(usage["held"]["v"].values())


def test_metrics_say_what_usage_says(fresh: Served) -> None:
    complete(fresh, LONG)
    complete(fresh, LONG)
    usage = get(fresh, "/cache/usage")
    seen = scrape(fresh)
    hot = usage["tiers"]["hot"]
    assert seen['kvstrata_cache_bytes{codec="raw",tier="hot"}'] == hot["by_precision"]["raw"]
    assert seen['kvstrata_cache_kind_bytes{kind="full",tier="hot"}'] == hot["by_kind"]["full"]
    assert seen['kvstrata_cache_spans{tier="hot"}'] == hot["spans"]
    assert seen['kvstrata_cache_tokens{tier="hot"}'] == hot["tokens"]
    assert seen["kvstrata_cache_hot_budget_bytes"] == usage["hot_budget_bytes"]
    for name, value in usage["counters"].items():
        if name.startswith("refused_"):
            assert seen[f'kvstrata_cache_refused_total{{reason="{name.removeprefix("refused_")}"}}'] == value
        else:
            assert seen[f"kvstrata_cache_{name}_total"] == value
    assert seen["kvstrata_cache_hit_tokens_total"] >= len(LONG) - 1


def test_a_prompt_larger_than_the_budget_is_counted_as_refused() -> None:
    with running(tiny_loaded("llama"), hot_cache_size="128KiB") as served:
        complete(served, LONG)
        assert complete(served, LONG) < len(LONG) - 1
        counters = get(served, "/cache/usage")["counters"]
        assert counters["refused_too_large"] >= 1
        assert scrape(served)['kvstrata_cache_refused_total{reason="too_large"}'] == counters["refused_too_large"]


def is_written(core: EngineCore) -> bool:
    return core.prefix_cache.disk.tier.flush(60).is_empty


def test_the_disk_is_a_tier_like_memory(tmp_path: Path) -> None:
    with running(tiny_loaded("llama"), disk_cache_dir=tmp_path) as served:
        complete(served, LONG)
        assert served.server.state.engine.ask(is_written).result(60)
        assert get(served, "/cache/usage")["tiers"]["disk"]["tokens"] >= len(LONG)
        said = post(served, "/cache/requantize", k="planes:4", v="planes:4", dry_run=True)
        # All of it is there already: nothing has to be put away.
        assert (said["tiers"]["hot"]["bytes_freed"] > 0, said["tiers"]["disk"]["bytes_freed"]) == (True, 0)
        assert [left["tier"] for left in said["left_alone"]] == ["disk"]
        assert post(served, "/cache/clear", tier="hot")["bytes_left"] == 0
        said = post(served, "/cache/explain", tokens=LONG)
        assert said["by_tier"] == {"hot": 0, "disk": len(LONG) - 1}
        seen = scrape(served)
        assert seen['kvstrata_cache_tokens{tier="disk"}'] == get(served, "/cache/usage")["tiers"]["disk"]["tokens"]
        assert seen["kvstrata_cache_disk_limit_bytes"] > 0
        assert seen["kvstrata_cache_disk_written_bytes_total"] > 0
        assert any(name.startswith('kvstrata_cache_disk_events_total{event="written"') for name in seen)
        assert post(served, "/cache/clear", tier="hot")["tokens"] == 0
        # A tiny model may compute a prompt faster than the disk reads it.
        assert complete(served, LONG) in (0, len(LONG) - 1)
        complete(served, LONG, cache_salt="other")
        assert post(served, "/cache/clear", salt="other")["tokens"] >= len(LONG)
        assert post(served, "/cache/explain", tokens=LONG, cache_salt="other")["by_tier"] == {"hot": 0, "disk": 0}
        cleared = post(served, "/cache/clear", tier="disk")
        assert (cleared["tier"], cleared["tokens"] >= len(LONG)) == ("disk", True)
        assert post(served, "/cache/explain", tokens=LONG)["by_tier"] == {"hot": len(LONG) - 1, "disk": 0}
        cleared = post(served, "/cache/clear", tier="all")
        assert cleared["tokens"] >= len(LONG)
        assert post(served, "/cache/explain", tokens=LONG)["cached_tokens"] == 0

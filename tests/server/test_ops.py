"""/health, /metrics, /props, /v1/models and the page."""

from __future__ import annotations

import json

import openai
import pytest

from kvstrata.cli.doctor import doctor
from kvstrata.models.load import LoadedModel
from tests.support.servers import Served, running

DASHBOARD_NAMES = [
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:time_to_first_token_seconds_count",
    "vllm:inter_token_latency_seconds_count",
    "vllm:e2e_request_latency_seconds_count",
]


def scrape(served: Served) -> dict[str, float]:
    with served.http() as http:
        text = http.get("/metrics").text
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def test_metrics_count_what_was_served(served: Served) -> None:
    before = scrape(served)
    assert [name for name in DASHBOARD_NAMES if name not in before] == []
    usage = served.ask("/v1/completions", prompt="One two three", max_tokens=3, temperature=0).json()["usage"]
    after = scrape(served)

    def events_between(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert events_between("vllm:prompt_tokens_total") == usage["prompt_tokens"]
    assert events_between("vllm:generation_tokens_total") == usage["completion_tokens"] == 3
    assert events_between("vllm:time_to_first_token_seconds_count") == 1
    assert events_between("vllm:inter_token_latency_seconds_count") == 2
    assert events_between("vllm:e2e_request_latency_seconds_count") == 1
    assert events_between('kvstrata_requests_total{outcome="length"}') == 1
    assert after["kvstrata_mlx_active_bytes"] >= served.server.state.loaded.weight_bytes


def test_models(client: openai.OpenAI, served: Served) -> None:
    [model] = client.models.list().data
    assert model.id == served.name == client.models.retrieve(served.name).id
    assert model.model_dump()["max_model_len"] == 8192
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_props_say_what_is_served(served: Served) -> None:
    with served.http() as http:
        props = http.get("/props").json()
    assert props["model"]["name"] == served.name
    assert props["model"]["thinking"] is False
    assert props["model"]["identity"] == served.server.state.loaded.fingerprint
    assert props["kv"]["k"] == props["kv"]["v"] == "raw"
    assert sum(props["layers"].values()) == 30
    assert props["attention"]["why"]
    assert props["key_means"] == {"rope_aware_layers": 30, "layers_without_rope": 0, "plain_because": {}}
    assert props["draining"] is False


def test_answers_do_not_tell_where_the_model_lies(default_model: LoadedModel) -> None:
    folder = str(default_model.path)
    with running(default_model, model=folder, served_model_name="mine") as served, served.http() as http:
        answers = [http.get(path).text for path in ("/props", "/v1/models", "/cache/usage", "/")]
        body = {"model": folder, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
    assert json.loads(answers[0])["model"]["names"] == sorted({"mine", default_model.name})
    assert not any(folder in answer for answer in answers)


def test_props_and_doctor_say_what_the_memory_limit_consists_of(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    with served.http() as http:
        memory = http.get("/props").json()["memory"]
        url = str(http.base_url)
    assert memory["weight_bytes"] == served.server.state.loaded.weight_bytes
    parts = ("weight_bytes", "scratch_bytes", "allocator_cache_bytes", "spare_bytes", "kv_bytes")
    assert all(memory[part] > 0 for part in parts)
    assert 0.99 * memory["limit_bytes"] <= sum(memory[part] for part in parts) <= memory["limit_bytes"]
    doctor(as_json=True, url=url)
    assert json.loads(capsys.readouterr().out)["served_memory"] == memory


def test_health_and_page(served: Served) -> None:
    with served.http() as http:
        assert http.get("/health").json() == {"status": "ok"}
        page = http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "/v1" in page.text

"""What Prometheus sees."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from kvstrata.metrics import Metrics


def test_counters_end_in_total_under_either_name() -> None:
    metrics = Metrics()
    metrics.prompt_tokens.inc(3)
    metrics.refused.labels(reason="queue_full").inc()
    text = metrics.render().decode()
    assert "\nvllm:prompt_tokens_total 3.0\n" in text
    assert '\nkvstrata_requests_refused_total{reason="queue_full"} 1.0\n' in text
    assert list(text_string_to_metric_families(text))


def test_load_sets_the_gauges() -> None:
    metrics = Metrics()
    metrics.set_load(running=2, waiting=3, kv_bytes=50, kv_budget_bytes=200, active_bytes=7, peak_bytes=8)
    text = metrics.render().decode()
    for line in ("vllm:num_requests_running 2.0", "vllm:num_requests_waiting 3.0", "vllm:kv_cache_usage_perc 0.25"):
        assert f"\n{line}\n" in text


def test_no_budget_is_no_division() -> None:
    metrics = Metrics()
    metrics.set_load(running=0, waiting=0, kv_bytes=0, kv_budget_bytes=0, active_bytes=0, peak_bytes=0)
    assert "\nvllm:kv_cache_usage_perc 0.0\n" in metrics.render().decode()


def test_two_servers_do_not_mix() -> None:
    one, other = Metrics(), Metrics()
    one.generation_tokens.inc(5)
    assert "vllm:generation_tokens_total 0.0" in other.render().decode()

"""docs/grafana.json asks for nothing that the server does not export, under the labels that it has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.servers import Served

DASHBOARD: dict[str, Any] = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
NAME = re.compile(r"\b(?:vllm:|kvstrata_)[a-z0-9_]+")
BY = re.compile(r"by \(([a-z, ]+)\)")
LEGEND = re.compile(r"\{\{(\w+)\}\}")
SUFFIXES = {
    "counter": ("_total", "_created"),
    "gauge": ("",),
    "histogram": ("_bucket", "_count", "_sum"),
}
ADDED = {"job", "instance", "le"}  # by Prometheus, and to histograms
LABELS = {
    "kvstrata_requests_total": {"outcome"},
    "kvstrata_requests_refused_total": {"reason"},
    "kvstrata_step_seconds_bucket": {"kind"},
    "kvstrata_prompt_hygiene_total": {"rule"},
    "kvstrata_cache_bytes": {"tier", "codec"},
    "kvstrata_cache_tokens": {"tier"},
    "kvstrata_cache_disk_events_total": {"event", "reason"},
    "kvstrata_cache_remote_events_total": {"event", "reason"},
    "kvstrata_cache_dropped_tokens_total": {"reason"},
    "kvstrata_cache_refused_total": {"reason"},
}


def panels() -> list[Mapping[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> Iterator[str]:
    for panel in panels():
        yield from (target["expr"] for target in panel["targets"])
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["definition"]


@pytest.fixture
def exported(tiny: Served) -> set[str]:
    """Every name that a query may have, also of what has not happened yet."""
    tiny.ask("/v1/completions", prompt=[5] * 20, max_tokens=2).raise_for_status()
    with tiny.http() as http:
        text = http.get("/metrics").text
    families = list(text_string_to_metric_families(text))
    for family in families:
        for sample in family.samples:
            # The labels that this test goes by are those that there are.
            if sample.name in LABELS:
                assert set(sample.labels) - ADDED == LABELS[sample.name]
    return {family.name + suffix for family in families for suffix in SUFFIXES[family.type]}


def test_every_metric_is_exported(exported: set[str]) -> None:
    asked = {name for query in queries() for name in NAME.findall(query)}
    assert len(asked) > 25
    assert asked - exported == set()


def test_the_check_can_fail(exported: set[str]) -> None:
    assert {"kvstrata_cache_hits_total", "vllm:prompt_tokens"} - exported == {
        "kvstrata_cache_hits_total",
        "vllm:prompt_tokens",
    }


def test_labels_are_those_that_there_are() -> None:
    for panel in panels():
        for target in panel["targets"]:
            known = {label for name in NAME.findall(target["expr"]) for label in LABELS.get(name, set())} | ADDED
            grouped = {label for by in BY.findall(target["expr"]) for label in by.replace(" ", "").split(",")}
            assert grouped <= known, target["expr"]
            assert set(LEGEND.findall(target["legendFormat"])) <= grouped


def test_every_panel_has_a_place_and_says_what_it_shows() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken
        taken |= cells
        assert panel["type"] == "row" or panel["description"].endswith(".")
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_parentheses_close() -> None:
    for query in queries():
        assert query.count("(") == query.count(")")
        assert query.count("{") == query.count("}")

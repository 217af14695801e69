"""docs/api.md lists the endpoints that a server has, and docs/metrics.md what it exports."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tests.docs.make import DOCS, endpoints_of
from tests.support.servers import Served


def test_every_endpoint_has_its_row(tiny: Served) -> None:
    with tiny.http() as http:
        served = set(endpoints_of(http.get("/openapi.json").json()).splitlines()[2:])
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    listed = {line for line in page.partition("<!-- end -->")[0].splitlines() if line.startswith("| `")}
    assert listed == served, "Run: python -m tests.docs.make"


def test_every_metric_has_its_row(tiny: Served) -> None:
    tiny.ask("/v1/completions", prompt=[5] * 20, max_tokens=2).raise_for_status()
    with tiny.http() as http:
        families = list(text_string_to_metric_families(http.get("/metrics").text))
    page = (DOCS / "metrics.md").read_text(encoding="utf-8")
    names = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    # Prometheus's library adds when each counter began.
    own = {name for name in names if name.startswith(("kvstrata_", "vllm:")) and not name.endswith("_created")}
    assert len(own) > 40
    assert not {name for name in own if f"| `{name}` |" not in page}, "Run: python -m tests.docs.make"

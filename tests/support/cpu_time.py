"""Pytest plugin: CPU seconds of each test, and a list of those that take more than they may.

A test above LIMIT_S of CPU time should be cheaper, or marked `slow` or `perf`.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

LIMIT_S = 2.0
SHOWN = 15
PROPERTY = "cpu_seconds"


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of the children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    began_s = _cpu_seconds()
    yield
    item.user_properties.append((PROPERTY, _cpu_seconds() - began_s))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    costly: list[tuple[float, str]] = []
    total_s = 0.0
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport) and report.when == "call":
                seconds = next((float(str(each)) for name, each in report.user_properties if name == PROPERTY), 0.0)
                total_s += seconds
                if seconds > LIMIT_S and not {"slow", "perf"} & set(report.keywords):
                    costly.append((seconds, report.nodeid))
    if not costly:
        return
    terminalreporter.section("CPU time")
    spent_s = sum(seconds for seconds, _ in costly)
    terminalreporter.write_line(f"{len(costly)} tests above {LIMIT_S:g} CPU s take {spent_s:.0f} of {total_s:.0f} s:")
    for seconds, name in sorted(costly, reverse=True)[:SHOWN]:
        terminalreporter.write_line(f"{seconds:7.1f} s  {name}")

"""The bar of a long measurement: rows appear above it on a terminal, and go where they are sent otherwise."""

from __future__ import annotations

import io

import pytest

from kvstrata.cli.bench_options import watched


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, stdout: io.StringIO, stderr: io.StringIO) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout", stdout)
    monkeypatch.setattr("sys.stderr", stderr)
    with watched(2) as watch:
        watch.under("a text").say("planes:4")
        print("a row")
        watch.passed(None)
        watch.passed(None)


def test_rows_appear_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout, stderr = Terminal(), Terminal()
    shown(monkeypatch, stdout, stderr)
    assert stdout.getvalue() == ""
    assert "a row" in stderr.getvalue()
    assert "a text: planes:4" in stderr.getvalue()
    assert "2/2" in stderr.getvalue()


def test_rows_that_go_to_a_file_do_not_touch_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout, stderr = io.StringIO(), Terminal()
    shown(monkeypatch, stdout, stderr)
    assert stdout.getvalue() == "a row\n"
    assert "2/2" in stderr.getvalue()


def test_without_a_terminal_there_are_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    shown(monkeypatch, stdout, stderr)
    assert stdout.getvalue() == "a row\n"
    assert stderr.getvalue() == "measuring a text: planes:4 ...\n"

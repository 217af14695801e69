"""The stages that a GPU is asked: one that fails or hangs costs no other. No GPU is needed to see that."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.main import get_command

from kvstrata.cli import load_command
from tests.gpu import all as gpu
from tests.gpu import step
from tests.gpu.all import Stage, run_all, stages
from tests.support.eventually import eventually


def stage(name: str, text: str, limit_s: float = 60.0, *settings: tuple[str, str]) -> Stage:
    return Stage(name, limit_s, (sys.executable, "-u", "-c", text), settings)


def has_ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_stage_that_fails_or_hangs_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "LEAST_S", 0.1)
    monkeypatch.setattr(gpu, "END_S", 1.0)
    hangs = (
        "import signal, subprocess, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid); time.sleep(600)"
    )
    dies = (
        "import os, subprocess, time; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid);"
        "time.sleep(3); os.kill(os.getpid(), 9)"
    )
    chosen = [
        stage("right", "import os; print('said', os.environ['ASKED'])", 60.0, ("ASKED", "so")),
        stage("fails", "print('half'); raise SystemExit(3)"),
        stage("hangs", hangs, 5.0),
        stage("dies", dies),
        stage("after", "print('still')"),
    ]
    results = run_all(chosen, tmp_path, minutes=5)
    assert [result.said for result in results] == [
        *("passed", "failed (3)", "was ended after 5 s", "failed (-9)", "passed")
    ]
    assert (tmp_path / "right.log").read_text() == "said so\n"
    assert (tmp_path / "fails.log").read_text() == "half\n"
    assert [row["name"] for row in json.loads((tmp_path / "summary.json").read_text())] == [s.name for s in chosen]
    # What a stage has started ends with it, in whatever session.
    for name in ("hangs", "dies"):
        child = int((tmp_path / f"{name}.log").read_text())
        eventually(partial(has_ended, child))


def test_a_stage_that_makes_a_folder_finds_none(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    again = stage("makes", f"import os; os.mkdir({str(folder)!r})")
    for _ in range(2):
        (result,) = run_all([replace(again, makes=folder)], tmp_path, minutes=1)
        assert result.passed


def test_cases_that_are_wrong_or_fail_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the exit status of the module that most stages run."""

    def fails() -> str:
        raise RuntimeError("no such kernel")

    cases = {"right": lambda: "ok 1e-4", "wrong": lambda: "WRONG 3.1", "fails": fails}
    monkeypatch.setattr(
        step, "PARTS", {name: lambda _, name=name, work=work: iter([(name, work)]) for name, work in cases.items()}
    )
    for only, status in (("right", 0), ("right,wrong,right", 1), ("fails,right", 1)):
        monkeypatch.setattr(sys, "argv", ["step", "--only", only])
        with pytest.raises(SystemExit) as ended:
            step.main()
        assert ended.value.code == status, only
        assert "right: ok" in capsys.readouterr().out


def test_what_there_is_no_time_for_is_said(tmp_path: Path) -> None:
    (result,) = run_all([stage("late", "print(1)")], tmp_path, minutes=0)
    assert result.said == "no time was left"
    assert not (tmp_path / "late.log").exists()


def test_each_stage_is_a_command_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "random-qwen3").mkdir()  # as an earlier stage writes it
    kinds = set()
    for each in stages(tmp_path):
        module, *arguments = each.command[3:]
        kinds.add(module)
        if module == "kvstrata":
            understood(arguments)
        elif module.startswith("benchmarks."):
            parse_arguments(get_command(import_module(module).app), arguments)
        elif module == "pytest":
            assert all(Path(test.partition("::")[0]).exists() for test in arguments if test.startswith("tests/"))
        else:
            assert find_spec(module) is not None
    programs = {f"benchmarks.{name}" for name in ("stream_gaps", "random_model", "step", "codecs")}
    assert kinds == {"kvstrata", "pytest", "tests.gpu.step", "tests.gpu.portable", *programs}


def understood(arguments: list[str]) -> None:
    """By kvstrata's own commands; raises otherwise."""
    name, *arguments = arguments
    parse_arguments(load_command(name), arguments)


def parse_arguments(command: Any, arguments: list[str]) -> None:
    """Parse the arguments of a command. Raises when they are wrong."""
    if hasattr(command, "commands"):
        name, *arguments = arguments
        command = command.commands[name]
    command.make_context(command.name, arguments)

"""`kvstrata launch` with a real server and agents that only write down what they were told.

The real agents are started through it in tests/agents.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

import kvstrata
from kvstrata.cli import app
from kvstrata.cli.agents import AGENTS, KEY_VARIABLE, AgentServer, AgentStart, toml_text
from kvstrata.cli.launch import SHOWN_KEY, shell_word
from kvstrata.errors import KvstrataError
from tests.support.models import tiny_loaded
from tests.support.servers import Served, running

KEY = "walrus-\"quoted'-$HOME-key"
HOSTILE = "a \"quoted\" 'name' \\ {env:HOME} {file:/etc/passwd} $(touch x)\n-c y=1 \x1b[31m\u2028 \U0001f9ad"
KVSTRATA = (sys.executable, "-c", "from kvstrata.cli import main; main()")
SOURCE = str(Path(kvstrata.__file__).parents[1])
# Writes down its arguments, its variables and the files that its arguments name.
FAKE = """#!{python}
import json, os, pathlib, sys
files = {{word: pathlib.Path(word).read_text() for word in sys.argv[1:] if os.path.isfile(word)}}
told = {{"arguments": sys.argv[1:], "variables": dict(os.environ), "files": files}}
pathlib.Path({report!r}).write_text(json.dumps(told))
{rest}
"""
NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1)

every_agent = pytest.mark.parametrize("agent", AGENTS)


@pytest.fixture(scope="module")
def tiny() -> Iterator[Served]:
    with running(tiny_loaded("llama"), api_key=[KEY]) as one:
        yield one


@pytest.fixture(scope="module")
def hostile() -> Iterator[Served]:
    with running(tiny_loaded("llama"), served_model_name=HOSTILE) as one:
        yield one


@dataclass(frozen=True)
class Place:
    """An empty home, a folder for what is temporary, and agents of our own on the path."""

    root: Path

    def __post_init__(self) -> None:
        for name in ("home", "tmp", "bin", "work", "cache"):
            (self.root / name).mkdir()

    @property
    def variables(self) -> dict[str, str]:
        # kvstrata keeps its BLAS in the cache.
        folders = {"HOME": "home", "TMPDIR": "tmp", "PATH": "bin", "XDG_CACHE_HOME": "cache"}
        return {name: str(self.root / folder) for name, folder in folders.items()}

    def install(self, agent: str, rest: str = "") -> None:
        file = self.root / "bin" / agent
        file.write_text(FAKE.format(python=sys.executable, report=str(self.root / "report"), rest=rest))
        file.chmod(0o755)

    def told(self) -> dict[str, Any]:
        return json.loads((self.root / "report").read_text())

    def written(self) -> list[Path]:
        return [path for name in ("home", "tmp", "work") for path in (self.root / name).rglob("*")]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    place = Place(tmp_path)
    for name in ("KVSTRATA_API_KEY", "KVSTRATA_ADMIN_KEY", "KVSTRATA_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in place.variables.items():
        monkeypatch.setenv(name, value)
    # Where Python remembers it from before.
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.chdir(tmp_path / "work")
    return place


def invoke(served: Served, *words: str, key: str | None = KEY) -> Result:
    variables = {"KVSTRATA_URL": served.url, "KVSTRATA_API_KEY": key, "COLUMNS": "200"}
    return CliRunner().invoke(app, ["launch", *words], env=variables)


def printed(served: Served, *words: str) -> str:
    result = invoke(served, "--print", *words)
    assert result.exit_code == 0, result.output
    return result.stdout


@every_agent
def test_print_shows_everything_and_starts_nothing(agent: str, tiny: Served, place: Place) -> None:
    place.install(agent)
    text = printed(tiny, agent, "--", "--own", "a word")
    assert tiny.url in text
    assert tiny.name in text
    assert str(tiny.server.state.limits.context_tokens) in text
    assert f"={SHOWN_KEY}\n" in text
    assert "walrus" not in text
    *_, command = text.splitlines()
    words = shlex.split(command)
    assert words[0] == agent
    assert words[-2:] == ["--own", "a word"]
    for word in words:
        if word.startswith("TEMPORARY/"):
            assert f"# {word}\n" in text
    assert not (place.root / "report").exists()
    assert not place.written()


@every_agent
def test_an_agent_is_told_the_server_and_nothing_stays(agent: str, tiny: Served, place: Place) -> None:
    place.install(agent)
    result = invoke(tiny, agent, "--", "--own", "a word", "--", "-x")
    assert result.exit_code == 0, result.output
    told = place.told()
    assert told["arguments"][-4:] == ["--own", "a word", "--", "-x"]
    assert told["variables"]["HOME"] == str(place.root / "home")
    # The key goes into one variable of the child: not where others of the machine see it.
    assert [name for name, value in told["variables"].items() if KEY in value and name != "KVSTRATA_API_KEY"] == [
        AGENTS[agent].start(AgentServer("", "", 1), Path()).key_variable
    ]
    assert KEY not in json.dumps([told["arguments"], told["files"]])
    everything = json.dumps(told)
    assert tiny.url in everything
    assert tiny.name in everything
    assert str(tiny.server.state.limits.context_tokens) in everything
    assert not place.written()


def test_nothing_of_ours_writes_into_the_home_of_a_process(tiny: Served, place: Place) -> None:
    place.install("pi")
    with launch_process(tiny, place, "pi") as process:
        assert process.wait(60) == 0
    assert place.told()["files"]
    assert not place.written()


def launch_process(served: Served, place: Place, agent: str) -> subprocess.Popen[str]:
    keys = {"KVSTRATA_URL": served.url, "KVSTRATA_API_KEY": KEY}
    variables = {**os.environ, **place.variables, **keys, "PYTHONPATH": SOURCE, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.Popen([*KVSTRATA, "launch", agent], env=variables, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("rest", "code"), [("sys.exit(0)", 0), ("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137)], ids=["0", "7", "kill"]
)
def test_the_exit_code_is_the_agents(rest: str, code: int, tiny: Served, place: Place) -> None:
    place.install("claude", rest)
    assert invoke(tiny, "claude").exit_code == code
    assert not place.written()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_the_client_and_its_folder_goes(number: signal.Signals, tiny: Served, place: Place) -> None:
    rest = "import signal\nsignal.signal({0}, lambda *_: sys.exit(9))\nprint('ready', flush=True)\nsignal.pause()"
    place.install("pi", rest.format(int(number)))
    with launch_process(tiny, place, "pi") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert place.written()
        process.send_signal(number)
        assert process.wait(30) == 9
    assert not place.written()


def test_ctrl_c_is_the_clients_to_read(tiny: Served, place: Place) -> None:
    """A terminal sends it to both. An agent stops an answer by it, and goes on."""
    rest = "import signal\nsignal.signal(2, lambda *_: None)\nos.kill(os.getppid(), 2)\nsys.exit(5)"
    place.install("claude", rest)
    with launch_process(tiny, place, "claude") as process:
        assert process.wait(30) == 5


def test_a_client_that_is_not_there_is_named_with_its_installation(tiny: Served, place: Place) -> None:
    assert not place.written()
    for name, agent in AGENTS.items():
        error = invoke(tiny, name).exception
        assert isinstance(error, KvstrataError)
        assert agent.title in str(error)
        assert agent.install in str(error)


def test_a_client_that_does_not_start_is_one_line(tiny: Served, place: Place) -> None:
    file = place.root / "bin" / "codex"
    file.write_text("#!/nowhere/python\n")
    file.chmod(0o755)
    error = invoke(tiny, "codex").exception
    assert isinstance(error, KvstrataError)
    assert "does not start" in str(error)


@pytest.mark.parametrize("words", [(), ("--print",)], ids=["start", "print"])
def test_no_server_and_a_wrong_key_are_told(words: tuple[str, ...], tiny: Served, place: Place) -> None:
    place.install("claude")
    nowhere = CliRunner().invoke(app, ["launch", "claude", "--url", "http://127.0.0.1:9", *words])
    assert isinstance(nowhere.exception, KvstrataError)
    assert "No server answers at http://127.0.0.1:9" in str(nowhere.exception)
    assert "kvstrata serve" in str(nowhere.exception)
    refused = invoke(tiny, "claude", *words, key="wrong")
    assert isinstance(refused.exception, KvstrataError)
    assert "wants a key" in str(refused.exception)
    assert not (place.root / "report").exists()


def test_an_unknown_client_and_a_flag_without_dashes_are_wrong_usage(tiny: Served) -> None:
    unknown = invoke(tiny, "emacs")
    assert unknown.exit_code == 2
    assert "opencode" in unknown.output
    assert invoke(tiny, "claude", "--continue").exit_code == 2


def test_variables_that_lead_elsewhere_are_not_the_agents(
    tiny: Served, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "theirs")
    monkeypatch.setenv("CLAUDE_CODE_USE_BEDROCK", "1")
    monkeypatch.setenv("OWN", "stays")
    place.install("claude")
    assert invoke(tiny, "claude").exit_code == 0
    variables = place.told()["variables"]
    assert "ANTHROPIC_API_KEY" not in variables
    assert "CLAUDE_CODE_USE_BEDROCK" not in variables
    assert variables["OWN"] == "stays"


@every_agent
def test_a_hostile_name_stays_a_name(agent: str, hostile: Served, place: Place) -> None:
    place.install(agent)
    assert invoke(hostile, agent, key=None).exit_code == 0
    told = place.told()
    files = {Path(name).name: text for name, text in told["files"].items()}
    start = AgentStart(tuple(told["arguments"]), told["variables"], files=files)
    assert name_in(agent, start) == HOSTILE
    text = printed(hostile, agent)
    assert all(line.isprintable() for line in text.splitlines())
    assert not place.written()


def name_in(agent: str, start: AgentStart) -> str:
    """The model's name, as the agent reads it."""
    if agent == "claude":
        return start.variables["ANTHROPIC_MODEL"]
    if agent == "codex":
        settings = dict(word.split("=", 1) for word in start.arguments[1::2])
        return tomllib.loads(f"name = {settings['model']}")["name"]
    if agent == "opencode":
        text = start.variables["OPENCODE_CONFIG_CONTENT"]
        assert "{env:" not in text
        assert "{file:" not in text
        [name] = json.loads(text)["provider"]["kvstrata"]["models"]
        assert json.loads(text)["model"] == f"kvstrata/{name}"
        return name
    if agent == "pi":
        assert start.arguments[-1] == start.arguments[start.arguments.index("--model") + 1]
        provider = start.files["kvstrata.js"].partition(", ")[2].rpartition(")")[0]
        [model] = json.loads(provider)["models"]
        assert model["id"] == start.arguments[-1]
        return model["id"]
    [name] = json.loads(start.files["metadata.json"])
    assert start.arguments[start.arguments.index("--model") + 1] == name
    return name.removeprefix("openai/")


@given(NAMES)
def test_any_name_stays_a_name(name: str) -> None:
    server = AgentServer("http://127.0.0.1:8000", name, 4096)
    for agent, known in AGENTS.items():
        assert name_in(agent, known.start(server, Path("x"))) == name


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_text_in_toml_is_the_text(text: str) -> None:
    assert tomllib.loads(f"text = {toml_text(text)}") == {"text": text}
    assert toml_text(text).isprintable()


def test_a_word_for_a_shell_is_the_word() -> None:
    words = [HOSTILE, "plain", "", "it's", "a\tb", "\\n'\x07"]
    script = "printf '%s\\0' " + " ".join(map(shell_word, words))
    ran = subprocess.run(["bash", "-c", script], env={"LC_ALL": "C.UTF-8"}, capture_output=True, check=True)
    assert ran.stdout.decode().split("\0")[:-1] == words
    assert script.isprintable()


@pytest.mark.parametrize("context_tokens", [1, 100, 8192, 1 << 17])
def test_the_longest_reply_leaves_room_for_a_prompt(context_tokens: int) -> None:
    longest = AgentServer("", "m", context_tokens).output_tokens
    assert 1 <= longest <= 8192
    assert longest <= max(1, context_tokens // 4)


def test_a_server_that_an_agent_starts_does_not_take_the_key_for_its_own() -> None:
    assert KEY_VARIABLE not in ("KVSTRATA_API_KEY", "KVSTRATA_ADMIN_KEY")

"""Models of the hub: fetched at a commit that is remembered, from a hub that answers as the real one does."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import huggingface_hub.constants
import pytest

from kvstrata.errors import ModelError
from kvstrata.models.find import HubModel, fetch_hub_model, find_local_model, find_model

REPO = "some-one/a-model"

FIRST, SECOND = "1" * 40, "2" * 40


class Hub(ThreadingHTTPServer):
    """One repository with commits of one file each. `asked`: the paths of all requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.branches = {"main": FIRST, "old": FIRST}
        self.files = {FIRST: b'{"model_type": "first"}', SECOND: b'{"model_type": "second"}'}
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    server: Hub  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.server, urlsplit(self.path).path
        hub.asked.append(path)
        match path.strip("/").split("/"):
            case ["api", "models", _, _] if path.endswith(REPO):
                self._say_commit("main")
            case ["api", "models", _, _, "revision", revision]:
                self._say_commit(revision)
            case ["api", "models", _, _, "tree", commit] if commit in hub.files:
                content = hub.files[commit]
                entry = {"type": "file", "path": "config.json", "size": len(content), "oid": _oid(content)}
                self._say(json.dumps([entry]).encode(), "application/json")
            case [_, _, "resolve", commit, "config.json"] if commit in hub.files:
                content = hub.files[commit]
                self._say(content, "text/plain", headers={"X-Repo-Commit": commit, "ETag": f'"{_oid(content)}"'})
            case _:
                self._say(b"{}", "application/json", 404, {"X-Error-Code": "RepoNotFound"})

    def _say_commit(self, revision: str) -> None:
        commit = self.server.branches.get(revision, revision)
        if commit in self.server.files:
            self._say(json.dumps({"id": REPO, "modelId": REPO, "sha": commit}).encode(), "application/json")
        else:
            self._say(b"{}", "application/json", 404, {"X-Error-Code": "RevisionNotFound"})

    def _say(self, content: bytes, kind: str, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        del format, args


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """The library reads its environment once, at import."""
    monkeypatch.setenv("KVSTRATA_HOME", str(tmp_path / "home"))
    constants = huggingface_hub.constants
    with Hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


def served(name: str) -> str:
    """What the one file of the model that is served says."""
    return json.loads((find_model(name).folder / "config.json").read_bytes())["model_type"]


def test_model_without_revision_stays_at_the_commit_that_was_fetched_first(hub: Hub) -> None:
    assert served(REPO) == "first"
    hub.branches["main"] = SECOND
    hub.asked.clear()
    assert served(REPO) == "first"
    assert hub.asked == []
    assert find_local_model(REPO).folder == find_model(REPO).folder


def test_commit_is_fetched_again_when_the_hubs_cache_was_deleted(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert served(REPO) == "first"
    hub.branches["main"] = SECOND
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "another"))
    assert served(REPO) == "first"


def test_renewed_model_is_served_at_the_newest_commit(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert served(REPO) == "first"
    hub.branches["main"] = SECOND
    fetch_hub_model(HubModel.parse(REPO), renew=True)
    assert f"{REPO} is served at commit {SECOND}" in capsys.readouterr().err
    assert served(REPO) == "second"


def test_revision_in_the_name_is_served_under_the_name_of_the_model(hub: Hub) -> None:
    hub.branches["main"] = SECOND
    assert served(f"{REPO}@old") == "first"
    assert served(f"{REPO}@{FIRST}") == "first"
    assert served(REPO) == "second"
    assert find_model(f"{REPO}@old").name == REPO


def test_unknown_revision_is_told_by_its_name(hub: Hub) -> None:
    del hub
    with pytest.raises(ModelError, match=f"{REPO} has no revision none-such on the hub"):
        find_model(f"{REPO}@none-such")


def test_unreachable_hub_fails_a_renewal_and_nothing_else(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    del hub
    assert served(REPO) == "first"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    assert served(REPO) == "first"
    with pytest.raises(ModelError, match="could not be got from the hub"):
        fetch_hub_model(HubModel.parse(REPO), renew=True)

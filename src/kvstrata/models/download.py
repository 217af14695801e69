"""Download of one file of a package index: found, resumed and checked, with its progress on stderr.

Knows the simple API (JSON and HTML), pip's and uv's variables and pip's configuration files; pip itself is not needed.
A file is published only when it is whole and its checksum is right.
"""

from __future__ import annotations

import configparser
import fcntl
import hashlib
import json
import os
import ssl
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import IO, TYPE_CHECKING
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

if TYPE_CHECKING:
    import httpx

PUBLIC_INDEX = "https://pypi.org/simple"
ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
TIMEOUT_S = 30.0
MAX_PAGE_BYTES = 16 << 20
SECTIONS = ("global", "download", "install")  # of pip's configuration files
PIECE_BYTES = 1 << 20
NOTHING_THERE = 416  # HTTP status: the range begins after the end
MAX_TRIES = 3  # of one call; received bytes stay for the next call

Advance = Callable[[int], None]


class WrongChecksum(Exception):
    """Raised when the received file has another checksum. It is not kept."""

    def __init__(self, sha256: str) -> None:
        super().__init__(sha256)
        self.sha256 = sha256


def download(
    client: httpx.Client, url: str, target: Path, part: Path, sha256: str, size_bytes: int, advance: Advance
) -> None:
    """Download a file and publish it as `target` by rename once it is whole and its checksum is right.

    Received bytes stay in `part`, which must be on the same file system, and at most `size_bytes` are kept. Raises
    httpx.HTTPError, OSError and WrongChecksum."""
    part.parent.mkdir(parents=True, exist_ok=True)
    with part.open("a+b") as file:
        if _is_ours(file, part):
            _fill(client, url, _Part(file, size_bytes, advance), sha256)
            os.replace(part, target)
            return
    # Another process is filling it.
    own = target.with_name(f"{target.name}.part")
    with own.open("a+b") as file:
        _fill(client, url, _Part(file, size_bytes, advance), sha256)
    os.replace(own, target)


def _is_ours(file: IO[bytes], part: Path) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between opening and locking, another process may have published it.
        return os.path.samestat(os.fstat(file.fileno()), part.stat())
    except OSError:
        return False


class _Part:
    """Received part of a file, and its checksum so far."""

    def __init__(self, file: IO[bytes], size_bytes: int, advance: Advance) -> None:
        self._file = file
        self._size_bytes = size_bytes  # of the whole file
        self._advance = advance
        self._digest = hashlib.sha256()
        self.num_bytes = 0
        file.seek(0)
        while piece := file.read(PIECE_BYTES):
            self._count(piece)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def add(self, piece: bytes) -> None:
        """Append received bytes. Raises WrongChecksum for more bytes than the whole file has."""
        if self.num_bytes + len(piece) > self._size_bytes:
            found = self.sha256
            self.restart()
            raise WrongChecksum(found)
        self._file.write(piece)
        self._count(piece)

    def restart(self) -> None:
        self._file.truncate(0)
        self._advance(-self.num_bytes)
        self._digest, self.num_bytes = hashlib.sha256(), 0

    def sync(self) -> None:
        self._file.flush()
        with suppress(OSError):  # some file systems have none
            os.fsync(self._file.fileno())

    def _count(self, piece: bytes) -> None:
        self._digest.update(piece)
        self.num_bytes += len(piece)
        self._advance(len(piece))


def _fill(client: httpx.Client, url: str, part: _Part, sha256: str) -> None:
    is_resumed = part.num_bytes > 0
    if part.sha256 != sha256:
        _receive_all(client, url, part)
    if part.sha256 != sha256 and is_resumed:
        # What was there may have been damaged, or of another file.
        part.restart()
        _receive_all(client, url, part)
    if part.sha256 != sha256:
        found = part.sha256
        part.restart()
        raise WrongChecksum(found)
    part.sync()


def _receive_all(client: httpx.Client, url: str, part: _Part) -> None:
    import httpx

    for tries_left in reversed(range(MAX_TRIES)):
        try:
            _receive(client, url, part)
            break
        except httpx.TransportError:
            if not tries_left:
                raise


def _receive(client: httpx.Client, url: str, part: _Part) -> None:
    """Append the missing bytes, or all bytes when the server supports no ranges."""
    have = part.num_bytes
    # As it is: a checksum is of the file, not of how it travels.
    headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={have}-"} if have else {})}
    with client.stream("GET", url, headers=headers) as response:
        if have and response.status_code == NOTHING_THERE:
            return
        response.raise_for_status()
        if have and not response.headers.get("content-range", "").startswith(f"bytes {have}-"):
            part.restart()
        for piece in response.iter_raw():
            part.add(piece)


if TYPE_CHECKING:
    import httpx


@dataclass(frozen=True)
class Sources:
    """Sources of packages, in the order in which they are asked."""

    folders: tuple[Path, ...] = ()  # of files as they are: pip's find-links
    indexes: tuple[str, ...] = (PUBLIC_INDEX,)
    certificates: str | None = None  # a file of authorities; None: the usual ones

    def client(self) -> httpx.Client:
        """Return an HTTP client. Its proxies come from the environment."""
        import httpx

        verify = ssl.create_default_context(cafile=self.certificates) if self.certificates else True
        return httpx.Client(verify=verify, follow_redirects=True, timeout=TIMEOUT_S)


def sources(environment: Mapping[str, str] = os.environ) -> Sources:
    """Return the sources that pip and uv are configured to use."""
    configured = _pip_configuration(environment)

    def values_of(*names: str, option: str = "") -> list[str]:
        values = [environment[name] for name in names if environment.get(name)]
        return (values or [configured.get(option, "")])[0].split()

    certificates = values_of("PIP_CERT", "REQUESTS_CA_BUNDLE", option="cert")
    indexes: list[str] = []
    if values_of("PIP_NO_INDEX", option="no-index")[:1] in ([], ["0"], ["false"]):
        indexes += values_of("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL", option="index-url") or [PUBLIC_INDEX]
        indexes += values_of("PIP_EXTRA_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL", option="extra-index-url")
    # uv may put a name before an address.
    urls = [url.partition("=")[2] if "=" in url.partition("://")[0] else url for url in indexes]
    links = [Path(text).expanduser() for text in values_of("PIP_FIND_LINKS", "UV_FIND_LINKS", option="find-links")]
    return Sources(
        tuple(folder for folder in links if folder.is_dir()),
        tuple(dict.fromkeys(url for url in urls if url.startswith(("http://", "https://")))),
        " ".join(certificates) or None,
    )


def find_file(client: httpx.Client, index: str, project: str, filename: str) -> str | None:
    """Return the URL of a file; None: this index does not have it.

    Raises httpx.HTTPError, and ValueError for a page that is not a list of files."""
    with client.stream("GET", f"{index.rstrip('/')}/{project}/", headers={"Accept": ACCEPT}) as page:
        if page.status_code == 404:
            return None
        page.raise_for_status()
        content = _bounded(page)
    is_json = "json" in page.headers.get("content-type", "")
    addresses = _of_json(json.loads(content)) if is_json else _of_html(content.decode(errors="replace"))
    for address in addresses:
        url = urldefrag(urljoin(str(page.url), address)).url
        if unquote(urlsplit(url).path).rpartition("/")[2] == filename:
            return url
    return None


def _bounded(page: httpx.Response) -> bytes:
    content = bytearray()
    for piece in page.iter_bytes():
        content += piece
        if len(content) > MAX_PAGE_BYTES:
            raise ValueError("the page is too large for a list of files")
    return bytes(content)


def _of_json(page: object) -> Iterator[str]:
    files = page.get("files") if isinstance(page, dict) else None
    if not isinstance(files, list):
        raise ValueError("the page has no list of files")
    return (str(file["url"]) for file in files if isinstance(file, dict) and "url" in file)


def _of_html(page: str) -> Iterator[str]:
    links = _Links()
    links.feed(page)
    return iter(links.found)


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found += [value for name, value in attrs if name == "href" and value]


def _pip_configuration(environment: Mapping[str, str]) -> dict[str, str]:
    """Return pip's options. Later files and later sections win."""
    options: dict[str, str] = {}
    for path in _pip_files(environment):
        parser = configparser.RawConfigParser()
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, OSError, UnicodeDecodeError):
            continue  # pip will tell its user
        for section in SECTIONS:
            if parser.has_section(section):
                options |= {name.replace("_", "-"): value for name, value in parser.items(section)}
    return options


def _pip_files(environment: Mapping[str, str]) -> list[Path]:
    from platformdirs import user_config_path

    named = environment.get("PIP_CONFIG_FILE")
    if named == os.devnull:
        return []
    home = Path.home() / ".pip"
    folders = [Path("/etc"), home, user_config_path("pip", appauthor=False), Path(sys.prefix)]
    return [*(folder / "pip.conf" for folder in folders), *([Path(named)] if named else [])]


def say(line: str) -> None:
    """Print a line on stderr: stdout is for results."""
    print(line, file=sys.stderr, flush=True)


def on_terminal() -> bool:
    return sys.stderr.isatty()


@contextmanager
def bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show progress: a bar on a terminal, one line otherwise. Yields a function that adds to the amount done."""
    if not on_terminal():
        say(f"{title} ...")
        yield lambda _amount: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=total)
        yield lambda amount: progress.advance(task, amount)

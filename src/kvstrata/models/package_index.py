"""Where a file of a package index is: the public index, or what the user's pip and uv were told to use instead.

Knows the simple API (JSON and HTML), pip's and uv's variables and pip's configuration files. No pip has to be there.
"""

from __future__ import annotations

import configparser
import json
import os
import ssl
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

if TYPE_CHECKING:
    import httpx

PUBLIC_INDEX = "https://pypi.org/simple"
ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
TIMEOUT_S = 30.0
MAX_PAGE_BYTES = 16 << 20
SECTIONS = ("global", "download", "install")
ON = {"1", "true", "yes", "on"}


@dataclass(frozen=True)
class Sources:
    """In the order in which they are asked."""

    folders: tuple[Path, ...] = ()  # of files as they are: pip's find-links
    indexes: tuple[str, ...] = (PUBLIC_INDEX,)
    certificates: str | None = None  # a file of authorities; None: the usual ones

    def client(self) -> httpx.Client:
        """Proxies come from the environment, as everywhere."""
        import httpx

        verify = ssl.create_default_context(cafile=self.certificates) if self.certificates else True
        return httpx.Client(verify=verify, follow_redirects=True, timeout=TIMEOUT_S)


def sources(environment: Mapping[str, str] = os.environ) -> Sources:
    configured = _pip_configuration(environment)

    def told(*names: str, option: str = "") -> list[str]:
        values = [environment[name] for name in names if environment.get(name)]
        return (values or [configured.get(option, "")])[0].split()

    certificates = told("PIP_CERT", "REQUESTS_CA_BUNDLE", option="cert")
    indexes: list[str] = []
    if told("PIP_NO_INDEX", option="no-index")[:1] in ([], ["0"], ["false"]):
        indexes += told("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL", option="index-url") or [PUBLIC_INDEX]
        indexes += told("PIP_EXTRA_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL", option="extra-index-url")
    # uv may put a name before an address.
    urls = [url.partition("=")[2] if "=" in url.partition("://")[0] else url for url in indexes]
    links = [Path(text).expanduser() for text in told("PIP_FIND_LINKS", "UV_FIND_LINKS", option="find-links")]
    return Sources(
        tuple(folder for folder in links if folder.is_dir()),
        tuple(dict.fromkeys(url for url in urls if url.startswith(("http://", "https://")))),
        " ".join(certificates) or None,
    )


def find_file(client: httpx.Client, index: str, project: str, filename: str) -> str | None:
    """Its address; None: this index does not have it. Raises httpx.HTTPError, and ValueError for a page that is none
    of an index."""
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
    """By option. Later files, and later sections, win."""
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

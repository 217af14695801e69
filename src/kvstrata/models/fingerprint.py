"""Fingerprint of a model: blake3 over the content of everything that determines the KV of a prompt.

Weights, tokenizer, chat template, config, adapter. Names and paths do not count, so a moved model stays the same and
other weights under an old name do not.

Hashing gigabytes at each start would be felt, so each file's digest is remembered under its path, size, inode and both
times. That is safe enough: a rewrite changes mtime or, where a tool puts mtime back, ctime, which no tool can set; what
remains is damage below the file system, against which a checksum at start does not help for long either.
"""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3

from kvstrata.platform.files import read_notes, write_notes

CONTENT_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
# Defaults of sampling, and our own marker: neither changes what is computed for a prompt.
OTHER_FILES = {"generation_config.json", "kvstrata.json"}
BIG_FILE_BYTES = 1 << 20
NOTES = "fingerprints"

Digests = dict[str, str]


def fingerprint(folder: Path, adapter: Path | None = None, form: str = "") -> str:
    """Return the fingerprint. `form`: the form of the weights, where that changes results."""
    remembered = _remembered()
    digests = dict(remembered)
    identity = blake3(b"kvstrata model 1")
    for place in (folder, adapter) if adapter else (folder,):
        identity.update(b"\0folder\0")
        for path in content_files(place):
            identity.update(f"{path.name}\0{_digest(path, digests)}\0".encode())
    if form:
        identity.update(f"\0form\0{form}".encode())
    if digests != remembered:
        write_notes(NOTES, digests)
    return identity.hexdigest()


def content_files(folder: Path) -> list[Path]:
    found = {path for pattern in CONTENT_PATTERNS for path in folder.glob(pattern)}
    return sorted(path for path in found if path.is_file() and path.name not in OTHER_FILES)


def _digest(path: Path, digests: Digests) -> str:
    status = path.stat()
    if status.st_size < BIG_FILE_BYTES:
        return blake3(path.read_bytes()).hexdigest()
    key = f"{path.resolve()}:{status.st_size}:{status.st_ino}:{status.st_mtime_ns}:{status.st_ctime_ns}"
    if key not in digests:
        digests[key] = blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()
    return digests[key]


def _remembered() -> Digests:
    return {key: digest for key, digest in read_notes(NOTES).items() if isinstance(digest, str)}

"""Which messages of ours a server's log has, and in which format."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from kvstrata.platform.logging import JsonFormatter, TextFormatter
from tests.models.conftest import write_model
from tests.server.test_process import serving
from tests.support.models import tiny_config, tiny_loaded, tiny_module
from tests.support.servers import running

LEVELS = ["debug", "info", "warning", "error", "critical"]

# As in a server: uvicorn sets up its own loggers, and a library says something through the root logger.
PROGRAM = """
import logging, sys, uvicorn
from kvstrata.platform.logging import show_messages
show_messages(sys.argv[1])
uvicorn.Config(None, log_level=sys.argv[1])
logging.error("a library")
for level in sys.argv[2:]:
    getattr(logging.getLogger("kvstrata.tiers.disk.writer"), level)("it is %s", level)
"""


@pytest.mark.parametrize("level", ["debug", "error"])
def test_the_level_decides_and_no_line_comes_twice(level: str) -> None:
    command = [sys.executable, "-c", PROGRAM, level, *LEVELS]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stderr.splitlines()
    ours = [line.split() for line in said if "a library" not in line]
    assert ours == [[f"{name.upper()}:", "it", "is", name] for name in LEVELS[LEVELS.index(level) :]]


def test_a_server_says_what_it_finds_when_it_starts(tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny", tiny_module("llama"), tiny_config("llama"))
    disk = tmp_path / "disk"
    with running(tiny_loaded("llama"), disk_cache_dir=disk):
        pass
    (catalogue,) = disk.glob("catalogue*")
    catalogue.write_bytes(b"no database" * 1000)
    log = tmp_path / "log"
    with serving(log, str(model), "--disk-cache-dir", str(disk)):
        lines = [line for line in log.read_text().splitlines() if "catalogue is damaged" in line]
    assert len(lines) == 1
    assert lines[0].startswith("WARNING:  ")


JSON_PROGRAM = """
import logging, sys, uvicorn
from kvstrata.platform.logging import show_messages
show_messages("info", "json")
uvicorn.Config(None, log_level="info", log_config=None)
logging.getLogger("kvstrata.tiers.disk.writer").warning("one\\nline %s", "Größe", extra={"fields": {"status": 7}})
logging.getLogger("uvicorn.error").info("of uvicorn")
logging.getLogger("kvstrata").debug("too fine")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("kvstrata.engine").exception("a step failed")
"""


def test_as_json_each_line_is_one_object() -> None:
    done = subprocess.run([sys.executable, "-c", JSON_PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    first, second, third = (json.loads(line) for line in done.stderr.splitlines())
    assert (first["message"], first["level"], first["status"]) == ("one\nline Größe", "warning", 7)
    assert (second["logger"], second["message"]) == ("uvicorn.error", "of uvicorn")
    assert "ZeroDivisionError" in third["exception"]


SENT = "a\nINFO:     forged \x1b[2J\u2028 \x9b2J"


def _record(error: Exception | None = None) -> logging.LogRecord:
    caught = (type(error), error, None) if error else None
    return logging.LogRecord("kvstrata.server", logging.INFO, __file__, 1, "%s is unknown", (SENT,), caught)


def test_client_text_stays_within_its_line_of_the_log() -> None:
    line = TextFormatter().format(_record())
    assert line.endswith("a\\nINFO:     forged \\x1b[2J\\u2028 \\x9b2J is unknown")


def test_client_text_in_an_exception_does_not_steer_a_terminal() -> None:
    said = TextFormatter().format(_record(ValueError("\x1b[2J")))
    assert said.splitlines()[-1] == "ValueError: \\x1b[2J"


def test_json_line_has_no_control_characters_and_the_whole_text() -> None:
    line = JsonFormatter().format(_record())
    assert not any(character < " " or "\x7f" <= character < "\xa0" for character in line)
    assert json.loads(line)["message"] == f"{SENT} is unknown"

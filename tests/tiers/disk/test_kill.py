"""kill -9 at any moment: no damage, no leftovers, and no loss of blocks that were reported as written.

Some kills are at random moments, and one is at each of the first steps. For a long run:

    KVSTRATA_KILLS=200 pytest tests/tiers/disk/test_kill.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

NUM_KILLS = int(os.environ.get("KVSTRATA_KILLS", "20"))
NUM_STEPS = 120
WRONG = (
    "temporaries",
    "over the limit",
    "not settled",
    "reported and lost",
    "removed and back",
    "half removed",
    "markers left",
    "wrong",
    "quarantined",
    "miscounted",
    "damaged",
    "uncounted files",
)


def run(directory: Path, mode: str, count: int, seed: int) -> Counter[str]:
    """Return what was found, by name. What no kill could show, such as a removal that none interrupted, is 0."""
    command = [sys.executable, "-m", "tests.tiers.disk.kill_runs", str(directory), mode, str(count), str(seed)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, cwd=Path(__file__).parents[3], check=False
    )
    assert done.returncode == 0, done.stderr
    return Counter(json.loads(done.stdout))


@pytest.mark.parametrize(("mode", "count"), [("random", NUM_KILLS), ("steps", NUM_STEPS)])
def test_kill_while_writing_loses_nothing_reported_as_written(tmp_path: Path, mode: str, count: int) -> None:
    found = run(tmp_path / "cache", mode, count, seed=20)
    assert {name: found[name] for name in WRONG} == dict.fromkeys(WRONG, 0)
    assert found["kills"] == count
    assert found["reported"] > count
    assert found["removed"] > 0

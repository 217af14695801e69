"""The cache folder; the limits of open files, each in a process of its own: a hard limit that was lowered stays low."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvstrata.platform.files import cache_root

SAY_LIMITS = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
import kvstrata
{then}
print(json.dumps(resource.getrlimit(resource.RLIMIT_NOFILE)))
"""
IMPORT = "import mlx_lm.utils"
RAISE = "from kvstrata.platform.files import raise_open_files; raise_open_files()"


def limits_after(then: str, soft: int, hard: int) -> tuple[int, int]:
    code = SAY_LIMITS.format(soft=soft, hard=hard, then=then)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return tuple(json.loads(done.stdout))


# The first is what systemd's LimitNOFILE=1024 gives: mlx-lm's own 4096 would be refused.
@pytest.mark.parametrize("limits", [(512, 1024), (3000, 5000)])
def test_importing_mlx_lm_changes_no_limit(limits: tuple[int, int]) -> None:
    assert limits_after(IMPORT, *limits) == limits


@pytest.mark.parametrize(("before", "after"), [((256, 1024), (1024, 1024)), ((5000, 6000), (5000, 6000))])
def test_the_soft_limit_is_raised_as_far_as_the_hard_one_allows_and_never_lowered(
    before: tuple[int, int], after: tuple[int, int]
) -> None:
    assert limits_after(RAISE, *before) == after


def test_the_cache_folder_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTRATA_HOME", str(tmp_path / "elsewhere"))
    assert cache_root() == tmp_path / "elsewhere"
    monkeypatch.delenv("KVSTRATA_HOME")
    assert cache_root().name == "kvstrata"

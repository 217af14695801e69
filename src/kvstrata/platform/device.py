"""The MLX back-end, its device, cores and memory of this process; how to install a missing back-end.

Cores and memory respect cgroups. MLX's wheel for Linux has no back-end of its own: `missing_backend` gives the command
that adds one, for pip, uv or pipx.
"""

from __future__ import annotations

import functools
import math
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

MlxBackend = Literal["metal", "cuda", "cpu", "none"]

CGROUPS = Path("/sys/fs/cgroup")

OWN_CGROUP = Path("/proc/self/cgroup")

METAL_ARRAYS = 499_000  # where MLX does not say


@dataclass(frozen=True)
class Device:
    backend: MlxBackend  # what MLX computes on
    name: str
    memory_bytes: int  # the GPU's own, or what this process may use of the machine's
    num_cores: int
    working_set_bytes: int  # most of it that a process should take: Metal recommends less than all


@functools.cache
def mlx_backend() -> MlxBackend:
    """Return the installed back-end, known by its distribution: importing mlx.core would choose the BLAS."""
    spec = find_spec("mlx")
    if spec is None:
        return "none"
    if sys.platform == "darwin":
        return "metal"
    sites = {Path(folder).parent for folder in spec.submodule_search_locations or ()}
    if any(next(site.glob("mlx_cuda*.dist-info"), None) for site in sites):
        return "cuda"
    # The package alone has no library: mlx-cpu brings it, and a build from source is a whole one.
    has_library = any(next(site.glob("mlx/lib*/libmlx.*"), None) for site in sites)
    return "cpu" if has_library else "none"


def device() -> Device:
    """Return the device on which MLX computes in this process. Imports mlx.core."""
    import mlx.core as mx

    facts = mx.device_info()
    if mx.default_device() == mx.gpu:
        backend: MlxBackend = "metal" if mx.metal.is_available() else "cuda"
        size = int(facts.get("memory_size") or facts.get("total_memory") or memory_bytes())
        recommended = int(facts.get("max_recommended_working_set_size") or size)
        return Device(backend, str(facts.get("device_name", backend)), size, usable_cores(), min(size, recommended))
    size = memory_bytes()
    return Device("cpu", _cpu_name(), size, usable_cores(), size)


def max_arrays() -> int | None:
    """Return the most arrays that MLX can have allocated at once; None: any number. Only Metal counts them."""
    import mlx.core as mx

    if not mx.metal.is_available():
        return None
    return int(mx.device_info().get("resource_limit", METAL_ARRAYS))


def usable_cores(cgroups: Path = CGROUPS, own_cgroup: Path = OWN_CGROUP) -> int:
    """Return the cores of this process: its affinity, or less where a cgroup grants a smaller share of time."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    shares = [share for share in _cpu_shares(cgroups, own_cgroup) if share > 0]
    return max(1, min([cores, *(math.ceil(share) for share in shares)]))


def memory_bytes(cgroups: Path = CGROUPS, own_cgroup: Path = OWN_CGROUP) -> int:
    """Return the machine's memory, or the smallest cgroup limit above this process."""
    import psutil

    # Version 1 writes "no limit" as a number near 2**63, which the minimum takes care of.
    limits = [
        int(text)
        for name in (("memory", "memory.limit_in_bytes"), ("", "memory.max"))
        for text in _cgroup_texts(cgroups, own_cgroup, *name)
        if text.isdecimal()
    ]
    return min([psutil.virtual_memory().total, *limits])


def free_memory_bytes(cgroups: Path = CGROUPS, own_cgroup: Path = OWN_CGROUP) -> int:
    """Return the memory that this process can still take, of the machine's and under each cgroup limit above it."""
    import psutil

    left = [
        int(most) - max(0, int(used) - _reclaimable_bytes(folder))
        for controller, limit, current in (
            ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
            ("", "memory.max", "memory.current"),
        )
        for folder in _cgroup_folders(cgroups, own_cgroup, controller)
        if (most := _text(folder / limit)).isdecimal() and (used := _text(folder / current)).isdecimal()
    ]
    return max(0, min([psutil.virtual_memory().available, *left]))


def _reclaimable_bytes(cgroup: Path) -> int:
    """Return the size of cached files, which the kernel drops when memory runs short."""
    fields = dict(line.split(" ", 1) for line in _text(cgroup / "memory.stat").splitlines() if " " in line)
    text = fields.get("total_inactive_file") or fields.get("inactive_file") or "0"
    return int(text) if text.isdecimal() else 0


def _cpu_shares(cgroups: Path, own_cgroup: Path) -> Iterator[float]:
    for text in _cgroup_texts(cgroups, own_cgroup, "", "cpu.max"):
        quota, _, period = text.partition(" ")
        if quota.isdecimal() and period.isdecimal():
            yield int(quota) / int(period)
    quotas = _cgroup_texts(cgroups, own_cgroup, "cpu", "cpu.cfs_quota_us")
    periods = _cgroup_texts(cgroups, own_cgroup, "cpu", "cpu.cfs_period_us")
    for quota, period in zip(quotas, periods, strict=False):
        if quota.isdecimal() and period.isdecimal():
            yield int(quota) / int(period)


def _cgroup_texts(cgroups: Path, own_cgroup: Path, controller: str, name: str) -> Iterator[str]:
    """Yield the file `name` of this process's cgroup and of each above it."""
    for folder in _cgroup_folders(cgroups, own_cgroup, controller):
        if text := _text(folder / name):
            yield text


def _cgroup_folders(cgroups: Path, own_cgroup: Path, controller: str) -> Iterator[Path]:
    """Yield this process's cgroup and each above it. Controller "" is version 2."""
    root = cgroups / controller
    for line in _text(own_cgroup).splitlines():
        _, controllers, path = line.split(":", 2)
        if controller not in controllers.split(","):
            continue
        # Inside a container the path may be the host's: then only the root of the mount exists, which is ours.
        folder = root / path.lstrip("/")
        for place in (folder, *folder.parents):
            if not place.is_relative_to(root):
                break
            yield place


def _cpu_name() -> str:
    """Return the model name, or the architecture where /proc/cpuinfo has no name, as on ARM."""
    for line in _text(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def missing_backend() -> str | None:
    """Return a message with the command that installs a back-end; None: MLX has one here."""
    if mlx_backend() != "none":
        return None
    extra, other = "kvstrata[cpu]", "kvstrata[cuda13] if there is an NVIDIA GPU"
    if shutil.which("nvidia-smi"):
        extra, other = "kvstrata[cuda13]", "kvstrata[cuda12] for an older driver, kvstrata[cpu] for no GPU"
    return f"MLX has no back-end on this machine yet. Install one: {install_command(extra)}   ({other})"


def install_command(requirement: str, prefix: Path | None = None) -> str:
    """Return the command that installs a package beside this one: of an extra, only what it names."""
    prefix = prefix or Path(sys.prefix)
    quoted = shlex.quote(requirement)
    if (prefix / "pipx_metadata.json").is_file():
        return f"pipx inject {prefix.name} {quoted}"
    if (prefix / "uv-receipt.toml").is_file() or not any(prefix.glob("lib/python*/site-packages/pip")):
        return f"uv pip install --python {shlex.quote(str(prefix))} {quoted}"
    return f"{shlex.quote(sys.executable)} -m pip install {quoted}"

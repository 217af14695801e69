"""`kvstrata doctor`: the capabilities of this machine, causes of slowness, and advice."""

from __future__ import annotations

import json
import platform
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstrata.cli.cache_folder import RemoteUrl, measure_remote
from kvstrata.cli.http_client import Key, connect
from kvstrata.errors import ConfigError
from kvstrata.platform.blas import Blas, blas
from kvstrata.platform.device import Device, free_memory_bytes
from kvstrata.platform.files import OpenFiles, cache_root, open_files
from kvstrata.platform.memory import Heap, heap
from kvstrata.sizes import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

PACKAGES = ("kvstrata", "mlx", "mlx-lm", "numpy", "transformers", "huggingface_hub")
ENOUGH_OF_NUMPY = 0.5  # share of numpy's rate below which MLX's matrix products are reported as slow
LOW_MEMORY_BYTES = 2 << 30
LOW_DISK_BYTES = 5 << 30
# At planes:8, the default of remote blocks: bytes of a token of Qwen3-8B, and bytes per value of K and V for any model.
TYPICAL_TOKEN_BYTES = 75_000.0
PLANES_SHARE = 1.02
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
LOW_OPEN_FILES = 1024  # clients, blocks of the disk cache and files of the weights, with room for some hundred of each
# 512x1024 @ 1024x1024 in float32 is about the work of one layer for a prefill chunk. Its speed through MLX and through
# numpy tells whether the BLAS in use is a good one.
ROWS, INNER, COLUMNS = 512, 1024, 1024
PRODUCT_FLOP = 2 * ROWS * INNER * COLUMNS


@dataclass(frozen=True)
class Finding:
    what: str
    why: str
    next_step: str


@dataclass(frozen=True)
class MachineReport:
    device: Device
    blas: Blas
    mlx_gflops: float
    numpy_gflops: float
    memory_available_bytes: int
    cache_folder: Path
    disk_free_bytes: int
    default_model: bool
    versions: dict[str, str]
    heap: Heap
    open_files: OpenFiles
    kernels: tuple[
        dict[str, str], ...
    ]  # back-end of each operation on KV and the reason, for a typical or the served model
    weights: str = ""  # form of quantized weights on a CPU
    served_memory: dict[str, int] | None = None  # parts of a running server's memory limit
    remote: dict[str, float] | None = None  # speed of the remote store


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON value on stdout and nothing else.")] = False,
    url: Annotated[
        str | None,
        typer.Option(
            help="A running server: show the parts of its memory limit, and its kernels.",
            metavar="url",
            show_default="none",
        ),
    ] = None,
    api_key: Key = None,
    remote: RemoteUrl = None,
    report_file: Annotated[
        Path | None,
        typer.Option(
            "--report",
            help="Also check and time the cache's operations, for up to two minutes, and write everything to this "
            "file: JSON that can be attached to an issue.",
            metavar="file",
            show_default="none",
        ),
    ] = None,
) -> None:
    """Show back-end, device, BLAS, memory and disk; causes of slowness, each with the next step."""
    report = examine()
    token_bytes, prefill_tokens_s = TYPICAL_TOKEN_BYTES, 0.0
    if url is not None:
        with connect(url, api_key) as server:
            props = server.ask("GET", "/props")
            report = replace(report, served_memory=props["memory"], kernels=tuple(props["attention"]["kernels"]))
            token_bytes = PLANES_SHARE * props["kv_bytes_per_token"] / ITEM_BYTES.get(props["kv"]["dtype"], 2)
            prefill_tokens_s = props["state"]["prefill_tokens_s"]
    if remote is not None:
        report = replace(report, remote=_remote(remote, token_bytes, prefill_tokens_s))
    findings = judge(report)
    failed = [] if report_file is None else _write_report(report_file, report, findings)
    findings += failed
    _show(report, findings, as_json=as_json)
    if failed:
        raise typer.Exit(1)


def _remote(url: str, token_bytes: float, prefill_tokens_s: float) -> dict[str, float]:
    """Measure a remote store. `prefill_tokens_s` is that of a running server, or 0 if none is known."""
    found = measure_remote(url)
    even = {"token_bytes": token_bytes, "break_even_tokens_s": found.break_even(token_bytes)}
    return {**asdict(found), **even, "prefill_tokens_s": prefill_tokens_s}


def _show(report: MachineReport, findings: list[Finding], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(_plain(report, findings), indent=2))
        return
    from rich.console import Console

    # No markup: `kvstrata[cpu]` would be taken for a style.
    console = Console(markup=False, highlight=False)
    console.print(_table(report))
    for finding in findings:
        console.print(f"{finding.what}:", style="bold yellow")
        console.print(f"  {finding.why}\n  Next: {finding.next_step}")
    if not findings:
        console.print("Nothing to mend.", style="bold green")


def _write_report(file: Path, report: MachineReport, findings: list[Finding]) -> list[Finding]:
    """Write the report and return findings for failed checks."""
    from kvstrata.cli.selftest import checks, kernels, timings

    try:
        file.write_text("")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}. Give --report another file.") from error
    typer.echo("Checking and timing the cache's operations, up to two minutes ...", err=True)
    tried = checks()
    failed = [
        Finding(
            f"Wrong on this machine: {check.what}",
            check.reason or f"off by {check.error:.2g}, at most {check.allowed:.2g} is rounding",
            f"open an issue and attach {file}",
        )
        for check in tried
        if not check.passed
    ]
    contents = {
        **_plain(report, [*findings, *failed]),
        "system": platform.platform(),
        "kernels": kernels(),
        "checks": [{**asdict(check), "passed": check.passed} for check in tried],
        "timings": [asdict(timing) for timing in timings()],
    }
    # Users publish reports: remove whatever identifies the machine's owner.
    home = Path.home()
    text = json.dumps(contents, indent=2)
    file.write_text((text.replace(str(home), "~") if home != home.parent else text) + "\n")
    typer.echo(f"{file} has {len(tried)} checks, {len(failed)} of them failed.", err=True)
    return failed


def examine() -> MachineReport:
    from kvstrata.cli.selftest import typical_choices
    from kvstrata.models.default_model import has_default_model
    from kvstrata.models.placement import describe_cpu_weights
    from kvstrata.platform.device import device

    here = device()
    return MachineReport(
        device=here,
        blas=blas(),
        mlx_gflops=mlx_gflops(),
        numpy_gflops=numpy_gflops(),
        memory_available_bytes=min(free_memory_bytes(), here.memory_bytes),
        cache_folder=cache_root(),
        disk_free_bytes=_disk_free(cache_root()),
        default_model=has_default_model(),
        versions={"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        heap=heap(),
        open_files=open_files(),
        kernels=tuple(asdict(choice) for choice in typical_choices("float32" if here.backend == "cpu" else "bfloat16")),
        weights=describe_cpu_weights() if here.backend == "cpu" else "",
    )


def judge(report: MachineReport) -> list[Finding]:
    """Return the findings of a report. Pure."""
    return [*_judge_speed(report), *_judge_weights(report), *_judge_room(report), *_judge_model(report)]


def _judge_speed(report: MachineReport) -> list[Finding]:
    if report.device.backend != "cpu":
        return []
    if report.mlx_gflops >= ENOUGH_OF_NUMPY * report.numpy_gflops:
        return [
            Finding(
                "The model runs on the CPU",
                "no GPU back-end of MLX is in use, so decoding is bound by memory bandwidth and cores",
                "with an NVIDIA GPU: pip install 'kvstrata[cuda13]'; on Apple silicon MLX uses Metal by itself",
            )
        ]
    return [
        Finding(
            "Matrix products are slow",
            f"{report.mlx_gflops:.0f} GFLOP/s through MLX, {report.numpy_gflops:.0f} in numpy: "
            f"BLAS is {report.blas.name} ({report.blas.reason})",
            "pip install 'kvstrata[cpu]', or set KVSTRATA_BLAS to an OpenBLAS that exports cblas_sgemm",
        )
    ]


def _judge_weights(report: MachineReport) -> list[Finding]:
    if not report.weights.startswith("become float32"):
        return []
    why = "numba is not installed: a model of 4 bits takes seven times its file, and decodes at half the speed"
    return [Finding("Weights become float32", why, "pip install 'kvstrata[cpu]'")]


def _judge_room(report: MachineReport) -> list[Finding]:
    findings = []
    if report.memory_available_bytes < LOW_MEMORY_BYTES:
        available, memory = report.memory_available_bytes, report.device.memory_bytes
        why = f"{format_bytes(available, 1)} of {format_bytes(memory, 1)} available"
        findings.append(Finding("Little memory", why, "end other programs, or serve a smaller model"))
    if report.disk_free_bytes < LOW_DISK_BYTES:
        why = f"{format_bytes(report.disk_free_bytes, 1)} free in {report.cache_folder}"
        findings.append(Finding("Little disk space", why, "free some, or set KVSTRATA_HOME to another folder"))
    if report.open_files.hard < LOW_OPEN_FILES:
        why = f"this process may have {report.open_files.hard} files open, connections included"
        next_step = f"raise the hard limit to {LOW_OPEN_FILES} or more (ulimit -Hn; LimitNOFILE= of systemd)"
        findings.append(Finding("Few open files", why, next_step))
    if report.heap.library == "other" and report.device.backend == "cpu":
        why = f"freed memory goes back {report.heap.gives_back}"
        findings.append(Finding("Freed memory may stay with the process", why, "use a Python that is built on glibc"))
    return findings


def _judge_model(report: MachineReport) -> list[Finding]:
    if report.default_model:
        return []
    return [Finding("The default model is not here", "it was never got, or its folder is damaged", "kvstrata pull")]


def _plain(report: MachineReport, findings: list[Finding]) -> dict[str, Any]:
    facts = asdict(report)
    facts["cache_folder"] = str(report.cache_folder)
    facts["blas"]["path"] = str(report.blas.path) if report.blas.path else None
    return {**facts, "findings": [asdict(finding) for finding in findings]}


def _table(report: MachineReport) -> Table:
    from rich.table import Table

    library = " ".join(word for word in (report.blas.name, report.blas.version) if word)
    rate = f"{report.mlx_gflops:.0f} GFLOP/s through MLX, {report.numpy_gflops:.0f} in numpy on the CPU"
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("back-end", f"{report.device.backend} ({report.device.name}, {report.device.num_cores} cores)")
    table.add_row("BLAS", f"{library}, {report.blas.num_threads} threads: {report.blas.reason}")
    table.add_row("speed", f"{rate} (float32)")
    if report.weights:
        table.add_row("weights", f"quantized ones {report.weights}")
    for number, line in enumerate(_kernel_lines(report.kernels)):
        table.add_row("" if number else "kernels", line)
    table.add_row(
        "memory",
        f"{format_bytes(report.device.memory_bytes, 1)}, {format_bytes(report.memory_available_bytes, 1)} available",
    )
    table.add_row("freed memory", f"goes back {report.heap.gives_back}")
    if report.served_memory is not None:
        table.add_row("memory limit", _shares(report.served_memory))
    if report.remote is not None:
        table.add_row("remote cache", _remote_words(report.remote))
    table.add_row("open files", f"at most {report.open_files.soft}, can be raised to {report.open_files.hard}")
    table.add_row("cache", f"{report.cache_folder}, {format_bytes(report.disk_free_bytes, 1)} free")
    table.add_row("default model", "here" if report.default_model else "not here")
    table.add_row("versions", ", ".join(f"{name} {number}" for name, number in report.versions.items()))
    return table


def _kernel_lines(choices: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a line for each back-end and reason, with the operations that it computes."""
    labels = {label for choice in choices if (label := choice["operation"].partition(" (")[2])}
    operations: dict[str, list[str]] = {}
    for choice in choices:
        # A label that all operations share goes into the title.
        name = choice["operation"] if len(labels) > 1 else choice["operation"].partition(" (")[0]
        operations.setdefault(f"{choice['backend']} ({choice['reason']})", []).append(name)
    title = [f"for {labels.pop().rstrip(')')}:"] if len(labels) == 1 else []
    return [*title, *(f"{', '.join(names)}: {path}" for path, names in operations.items())]


def _remote_words(remote: dict[str, float]) -> str:
    rates = f"{remote['read_bytes_per_s'] / 1e6:.0f} MB/s read, {remote['write_bytes_per_s'] / 1e6:.0f} written"
    pays = f"loading {remote['token_bytes'] / 1e3:.0f} kB a token beats computing below"
    text = f"{1000 * remote['latency_s']:.1f} ms, {rates}; {pays} {remote['break_even_tokens_s']:.0f} tokens/s"
    if not remote["prefill_tokens_s"]:
        return text
    word = "pays" if remote["prefill_tokens_s"] < remote["break_even_tokens_s"] else "does not pay"
    return f"{text}; the server computes {remote['prefill_tokens_s']:.0f}: it {word}"


def _shares(memory: dict[str, int]) -> str:
    words = {
        "weight_bytes": "weights",
        "kv_bytes": "KV",
        "scratch_bytes": "scratch of passes",
        "allocator_cache_bytes": "MLX's cache of freed buffers",
        "spare_bytes": "spare",
    }
    parts = ", ".join(f"{format_bytes(memory[name], 1)} {word}" for name, word in words.items())
    return f"{format_bytes(memory['limit_bytes'], 1)}: {parts}"


def mlx_gflops(repeats: int = 5) -> float:
    import mlx.core as mx

    a, b = mx.random.normal((ROWS, INNER)), mx.random.normal((INNER, COLUMNS))
    mx.eval(a, b)
    return PRODUCT_FLOP / _best_s(lambda: mx.eval(a @ b), repeats) / 1e9


def numpy_gflops(repeats: int = 5) -> float:
    import numpy as np

    random = np.random.default_rng(0)
    a = random.standard_normal((ROWS, INNER), dtype=np.float32)
    b = random.standard_normal((INNER, COLUMNS), dtype=np.float32)
    return PRODUCT_FLOP / _best_s(lambda: a @ b, repeats) / 1e9


def _best_s(action: Callable[[], object], repeats: int) -> float:
    """Return the shortest of several durations: threads that another library left spinning slow the first ones down."""
    action()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def _disk_free(folder: Path) -> int:
    """Return the free bytes at the nearest existing parent: the cache folder may not exist yet."""
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    return shutil.disk_usage(existing).free


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"

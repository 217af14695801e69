"""Settings as plain option values, with the refusals that need the machine or a file system."""

from __future__ import annotations

import logging
import resource
import shutil
from dataclasses import dataclass

from kvstrata.codecs.base import Codec
from kvstrata.codecs.registry import parse
from kvstrata.config import Settings
from kvstrata.engine.config import EngineLimits, KvConfig, TierConfig
from kvstrata.errors import ConfigError
from kvstrata.kv.precision_plan import choose_codecs
from kvstrata.platform.device import Device
from kvstrata.prefix_cache.ladder import parse_lengths
from kvstrata.server.http.access import ApiKey
from kvstrata.server.http.body_limit import HttpLimits
from kvstrata.sizes import format_bytes
from kvstrata.tiers.options import DiskOptions, RemoteOptions
from kvstrata.tiers.remote.sealing import keys_for
from kvstrata.tiers.remote.url import parse_url

logger = logging.getLogger(__name__)

MIN_DISK_BYTES = 16 << 20
# Files of the model, the disk cache and libraries, and connections that are being refused.
OTHER_FILES = 192
# For pending disk writes at shutdown, even if the drain timeout of running replies is shorter.
MIN_FLUSH_S = 30.0


@dataclass(frozen=True)
class ServerOptions:
    """Options of everything behind a server. Defaults of their fields are the constants that no setting changes."""

    engine: EngineLimits
    cache: KvConfig
    tiers: TierConfig
    http: HttpLimits
    keys: tuple[ApiKey, ...]


def server_options(settings: Settings, device: Device) -> ServerOptions:
    """Return the options of these settings on this machine. Makes the folder of the disk cache. Raises ConfigError."""
    return ServerOptions(
        engine=_engine_options(settings, device),
        cache=_cache_options(settings, device.memory_bytes),
        tiers=TierConfig(disk=_disk_options(settings), remote=_remote_options(settings)),
        http=http_limits(settings),
        keys=api_keys(settings),
    )


def api_keys(settings: Settings) -> tuple[ApiKey, ...]:
    plain = (ApiKey.of(key) for key in settings.plain_keys)
    return (*plain, *(ApiKey.of(key, is_admin=True) for key in settings.admin_keys))


def http_limits(settings: Settings) -> HttpLimits:
    return HttpLimits(max_connections=_max_connections(), body_memory_bytes=settings.body_memory)


def _max_connections() -> int:
    """Return the maximum number of connections: the default, reduced to what the open-file limit leaves."""
    wanted = HttpLimits.max_connections
    max_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if max_files == resource.RLIM_INFINITY or wanted <= max_files - OTHER_FILES:
        return wanted
    possible = max(1, max_files - OTHER_FILES)
    logger.warning(
        "At most %d connections instead of %d: this process may have %d files open. Raise that with: ulimit -n %d",
        possible, wanted, max_files, wanted + OTHER_FILES,
    )  # fmt: skip
    return possible


def memory_limit_bytes(settings: Settings, device: Device) -> int:
    return settings.memory_limit.of(device.memory_bytes, device.working_set_bytes)


def _engine_options(settings: Settings, device: Device) -> EngineLimits:
    return EngineLimits(
        max_running=settings.max_num_seqs,
        max_waiting=settings.max_waiting,
        shares_queue=len(settings.keys) > 1,
        context_tokens=settings.max_model_len,
        prefill_share=settings.prefill_share,
        max_kv_size=settings.max_kv_size,
        memory_bytes=memory_limit_bytes(settings, device),
    )


def _cache_options(settings: Settings, total_memory_bytes: int) -> KvConfig:
    k, v = choose_codecs(
        quantization=settings.kv_cache_quantization,
        bits=settings.kv_cache_bits,
        k=settings.cache_type_k,
        v=settings.cache_type_v,
    )
    return KvConfig(
        k=k,
        v=v,
        min_quantize_tokens=settings.kv_cache_min_quantize_tokens,
        encodes_running=settings.kv_cache_live,
        dynamic=settings.dynamic_cache,
        floor_bits=settings.dynamic_cache_floor,
        dynamic_at=_lengths(settings.dynamic_cache_at),
        hot_bytes=_hot_bytes(settings, total_memory_bytes),
        disk_write=settings.disk_write,
        ttl_s=settings.cache_ttl_s,
    )


def _disk_options(settings: Settings) -> DiskOptions | None:
    if settings.disk_cache_dir is None or settings.hot_cache_only:
        return None
    directory = settings.disk_cache_dir.expanduser()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        volume_bytes = shutil.disk_usage(directory).total
    except OSError as error:
        raise ConfigError(f"--disk-cache-dir {directory} cannot be used: {error}. Choose another folder.") from error
    limit_bytes = settings.disk_cache_size.of(volume_bytes)
    if limit_bytes < MIN_DISK_BYTES:
        raise ConfigError(
            f"--disk-cache-size {settings.disk_cache_size} is too small to be of use: give it at least "
            f"{format_bytes(MIN_DISK_BYTES)}, or use --hot-cache-only."
        )
    return DiskOptions(
        directory=directory,
        limit_bytes=limit_bytes,
        daily_write_bytes=settings.disk_daily_writes,
        flush_s=max(settings.drain_timeout_s, MIN_FLUSH_S),
    )


def _remote_options(settings: Settings) -> RemoteOptions | None:
    if settings.remote_cache is None:
        if settings.remote_secret_file is not None:
            raise ConfigError(
                "--remote-secret-file is for a --remote-cache, and none is named. Name one, or leave both."
            )
        return None
    url = parse_url(settings.remote_cache)
    # Checked before the model is loaded, so that a mistake is reported at once.
    keys_for(url, settings.remote_secret_file)
    return RemoteOptions(
        url=url,
        secret_file=settings.remote_secret_file,
        precision=parse(settings.remote_precision).name,
        ttl_s=settings.remote_ttl_s,
        daily_write_bytes=settings.remote_daily_writes,
    )


def _lengths(text: str) -> tuple[tuple[int, Codec], ...]:
    try:
        return parse_lengths(text)
    except ConfigError as error:
        raise ConfigError(f"--dynamic-cache-at: {str(error).rstrip('.')}.") from None


def _hot_bytes(settings: Settings, total_memory_bytes: int) -> int | None:
    if settings.hot_cache_size is None:
        return None
    asked = settings.hot_cache_size.of(total_memory_bytes)
    if not 0 < asked <= total_memory_bytes:
        raise ConfigError(
            f"--hot-cache-size {settings.hot_cache_size} is not possible: this machine has "
            f"{format_bytes(total_memory_bytes)} of memory. Leave it out to use what running requests leave."
        )
    return asked

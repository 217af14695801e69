"""Settings: defaults < TOML file < environment < flags.

Every setting is declared once, in `Settings`: its TOML key is its name, its environment variable KVSTRATA_ and the name
in capitals, its flag the name with dashes. A default that a room has too is the room's. Knows nothing of what a setting
does: the code that puts the pieces together reads it and hands plain values down.
"""

from __future__ import annotations

import logging
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings.sources import InitSettingsSource

from kvstrata.backend.addresses import is_loopback
from kvstrata.disk.options import DiskOptions
from kvstrata.engine.limits import MARK_EVERY_TOKENS, Limits
from kvstrata.errors import ConfigError
from kvstrata.models.cpu_options import CpuOptions, CpuWeights
from kvstrata.remote.options import RemoteOptions
from kvstrata.remote.url import parse as parse_url
from kvstrata.server.wire.bounds import Bounds
from kvstrata.setting import (
    ActivationBits,
    Bits,
    ByteCount,
    GroupSize,
    HostNames,
    LogLevel,
    SizeSetting,
    Texts,
    setting,
)
from kvstrata.sizes import Size, human_bytes
from kvstrata.store.options import Floors, LadderOptions, PrecisionOptions, StoreOptions

logger = logging.getLogger(__name__)

ENV_PREFIX = "KVSTRATA_"
LINK_PATTERN = re.compile(r"(?:tcp|udp|sctp)://", re.IGNORECASE)
NOT_A_KEY = "an API key must be printable ASCII without spaces"
KEY_SETTINGS = ("api_key", "api_key_file", "admin_key", "admin_key_file")


def _store_url(text: str) -> str:
    try:
        parse_url(text)
    except ConfigError as error:
        raise PydanticCustomError("url", "{reason}", {"reason": str(error).removeprefix("--remote-cache: ")}) from None
    return text


class Settings(BaseSettings):
    """Everything that can be set. See `load`."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True, arbitrary_types_allowed=True
    )

    model: str | None = setting(None, "Folder or Hugging Face id; without it the default model", panel="Model")
    adapter: Path | None = setting(None, "LoRA adapter to put on the model", panel="Model", unit="folder")
    served_name: str | None = setting(None, "Another name that clients may call the model by", panel="Model")
    any_model_name: bool = setting(
        False, "Answer whatever model a client names; without it: its own names, and claude-*", panel="Model"
    )
    context_tokens: int | None = setting(
        None, "Longest prompt and reply together; without it what the model was made for", panel="Model", unit="tokens",
        ge=1,
    )  # fmt: skip
    generation_config: Literal["model", "none"] = setting(
        "model", "Sampling of requests that leave it out: 'model' is by its generation_config.json, 'none' by OpenAI's "
        "defaults", panel="Model", unit="source",
    )  # fmt: skip

    cpu_weights: CpuWeights = setting(
        CpuOptions.weights, "On a CPU: plain 16-bit weights are quantized to '8' or '4' bits, quantized ones stay as "
        "they are; 'raw' makes all of them float32; 'auto' is 8, or 4 where 8 do not fit", panel="Model", unit="bits",
    )  # fmt: skip
    cpu_activations: ActivationBits = setting(
        CpuOptions.activations, "On a CPU: bits of what packed weights are multiplied by. 8 is fastest and loses "
        "something, 32 is exact and slow", panel="Model", unit="bits",
    )  # fmt: skip

    host: str = setting("127.0.0.1", "Address to listen on", panel="Address and keys", unit="address")
    port: int = setting(8000, "Port to listen on; 0 takes a free one", panel="Address and keys", unit="port",
                         ge=0, le=65535)  # fmt: skip
    api_key: Texts = setting(
        (), "Key that clients must send; may be repeated (environment: commas between)", panel="Address and keys",
        unit="key", repr=False,
    )  # fmt: skip
    api_key_file: Path | None = setting(
        None, "File with one key on each line; # begins a comment", panel="Address and keys", unit="file"
    )
    admin_key: Texts = setting(
        (), "Key that may see and change what is cached under every key, and the precision of what is to come; may be "
        "repeated (environment: commas between)", panel="Address and keys", unit="key", repr=False,
    )  # fmt: skip
    admin_key_file: Path | None = setting(
        None, "File with such keys, one on each line; # begins a comment", panel="Address and keys", unit="file"
    )
    pin_quota: SizeSetting = setting(
        Size(percent=25.0), "Most that each key may pin; % is of the memory for stored KV. Admin keys, and servers "
        "without keys, have none but for what a ttl of cache_control pins", panel="Address and keys", unit="size",
    )  # fmt: skip
    allow_public: bool = setting(False, "Listen on a public address without any key", panel="Address and keys")
    allowed_host: HostNames = setting(
        (), "Name that clients may call a server without keys by, beside addresses, this machine's and private ones; "
        "may be repeated (environment: commas between)", panel="Address and keys", unit="name",
    )  # fmt: skip

    memory_limit: SizeSetting = setting(
        Size(percent=75.0), "Weights, KV and scratch together; % is of the GPU's or the machine's memory, on a Mac at "
        "most what Metal recommends", panel="Engine", unit="size",
    )  # fmt: skip
    wired_limit: ByteCount = setting(
        Limits.wired_bytes,
        "On a Mac: memory that macOS must not page out. Without it macOS decides; with it, kernel panics were "
        "reported (https://github.com/ml-explore/mlx/issues/3186)", panel="Engine", unit="size", ge=0,
    )  # fmt: skip
    max_running: int = setting(
        Limits.max_running, "Most requests in one batch", panel="Engine", unit="requests", ge=1, le=4096
    )
    max_waiting: int = setting(
        Limits.max_waiting,
        "Most requests in the queue; past it 429",
        panel="Engine",
        unit="requests",
        ge=0,
        le=1_000_000,
    )
    prefill_share: float = setting(
        Limits.prefill_share,
        "Of the time, what prompts may take while streams run: at 0.5 a stream's tokens come half as fast while a "
        "prompt is computed; 1 gives prompts all they can use", panel="Engine", unit="share", gt=0, le=1,
    )  # fmt: skip
    prefill_chunk_tokens: int | None = setting(
        Limits.prefill_chunk_tokens,
        "Prompt tokens computed at a time, whatever --prefill-share says; without it from the speeds that are "
        "measured", panel="Engine", unit="tokens", ge=1,
    )  # fmt: skip
    max_kv_size: int | None = setting(
        Limits.max_kv_size,
        "Most tokens that a sequence keeps in each layer, the first 4 and the newest; without it all",
        panel="Engine", unit="tokens", ge=16,
    )  # fmt: skip
    tail_step_tokens: int = setting(
        Limits.tail_step_tokens,
        "Tokens of reply that memory is reserved for at a time",
        panel="Engine",
        unit="tokens",
        ge=1,
    )

    cache_slice_ms: float = setting(
        1000 * Limits.slice_s,
        "Work on stored KV between two decode steps, at a time; what a client waits for (a change of precision, "
        "room for a request) takes as long as a step where that is longer", panel="KV cache", unit="milliseconds",
        gt=0, le=10_000,
    )  # fmt: skip
    hot_cache_size: SizeSetting | None = setting(
        None, "Most memory for stored KV; % is of the machine's memory; without it what running requests leave",
        panel="KV cache", unit="size",
    )  # fmt: skip
    cache_ttl_s: float | None = setting(
        StoreOptions.ttl_s, "Stored KV that no request used for so long goes; without it it stays while there is room",
        panel="KV cache", unit="seconds", gt=0,
    )  # fmt: skip
    disk_cache_dir: Path | None = setting(
        None, "Folder for KV that memory has no room for; it outlives the server", panel="Disk cache", unit="folder"
    )
    disk_cache_size: SizeSetting = setting(
        Size(num_bytes=50 * 1024**3), "Most that it takes on the disk; % is of the volume", panel="Disk cache",
        unit="size",
    )  # fmt: skip
    disk_reserve: ByteCount = setting(
        DiskOptions.reserve_bytes, "Free space of the volume that is left to others", panel="Disk cache",
        unit="size", ge=0,
    )  # fmt: skip
    disk_queue: ByteCount = setting(
        DiskOptions.queue_bytes, "Bytes that may wait to be written; a block that is larger goes alone",
        panel="Disk cache", unit="size", ge=1024**2,
    )  # fmt: skip
    disk_wait_s: float = setting(
        DiskOptions.wait_s, "Longest that a new request waits while what memory must let go is written to a disk that "
        "works; then that is dropped. Running replies never wait", panel="Disk cache", unit="seconds", ge=0, le=3600,
    )  # fmt: skip
    disk_write_through: bool = setting(
        StoreOptions.write_through,
        "Write at the end of every request, not only when memory runs short",
        panel="Disk cache",
    )
    disk_put_away: bool = setting(
        PrecisionOptions.put_away,
        "Write what stepping down takes away, so that precision can come back",
        panel="Disk cache",
    )
    disk_second_touch: bool = setting(
        DiskOptions.second_touch, "Write only what was asked for twice", panel="Disk cache"
    )
    disk_daily_writes: ByteCount = setting(
        DiskOptions.daily_write_bytes, "Most that is written in a day; 0: no limit", panel="Disk cache",
        unit="size", ge=0,
    )  # fmt: skip
    hot_cache_only: bool = setting(False, "Never write to a disk, whatever the other settings say", panel="Disk cache")

    remote_cache: Annotated[str, AfterValidator(_store_url)] | None = setting(
        None, "Store that servers share KV through: redis://host:6379/0, rediss://, s3://bucket/prefix, gs://, az://, "
        "file:///folder. A password is better given in the environment", panel="Remote cache", unit="url", repr=False,
    )  # fmt: skip
    remote_secret_file: Path | None = setting(
        None, "File with the secret that names and seals blocks there, 32 bytes or more, the same for all servers; "
        "needed unless the address is a loopback one or the folder is this user's alone", panel="Remote cache",
        unit="file",
    )  # fmt: skip
    remote_precision: str = setting(
        RemoteOptions.precision, "Precision of all blocks there, the same for all servers", panel="Remote cache",
        unit="precision",
    )  # fmt: skip
    remote_ttl_s: float = setting(
        RemoteOptions.ttl_s, "A block that no server used for so long goes; 0: it stays while there is room",
        panel="Remote cache", unit="seconds", ge=0,
    )  # fmt: skip
    remote_daily_writes: ByteCount = setting(
        RemoteOptions.daily_write_bytes, "Most that this server writes there in a day; 0: no limit",
        panel="Remote cache", unit="size", ge=0,
    )  # fmt: skip
    remote_second_touch: bool = setting(
        RemoteOptions.second_touch, "Write only what was asked for twice", panel="Remote cache"
    )

    kv_events: str | None = setting(
        None, "Publish which blocks of tokens memory holds, in vLLM's form, for routers: tcp://127.0.0.1:5557. Other "
        "than loopback addresses need a key to be set", panel="Routers", unit="address",
    )  # fmt: skip
    kv_events_replay: str | None = setting(
        None, "Where routers ask for events that they missed; without it the next port", panel="Routers", unit="address"
    )
    kv_events_topic: str = setting("", "Topic of these events; llm-d wants kv@HOST:PORT@MODEL", panel="Routers",
                                   unit="topic")  # fmt: skip

    exact_replay: bool = setting(
        True, "Put earlier replies that a client sends back unchanged into the prompt as they were sampled, so that "
        "nothing of them is computed again", panel="KV cache",
    )  # fmt: skip
    drop_nonces: bool = setting(
        True, "Leave lines out of system messages that change with every request and mean nothing to a model",
        panel="KV cache",
    )  # fmt: skip
    system_in_place: bool = setting(
        True, "Show a system message in the middle of a chat where it stands, as marked text where the template does "
        "not take it there. Without it the template decides", panel="KV cache",
    )  # fmt: skip
    kv_cache_quantization: bool = setting(False, "Store KV as planes:8", panel="KV cache")
    kv_cache_bits: Bits | None = setting(
        None, "Store KV as planes of so many bits: 8, 4 or 2", panel="KV cache", unit="bits"
    )
    kv_cache_k: str | None = setting(
        None, "Precision of stored keys: raw, planes:8|4|2, affine:8|6|5|4|3|2[:gGROUP], rotated:4|3|2",
        panel="KV cache", unit="precision",
    )  # fmt: skip
    kv_cache_v: str | None = setting(None, "Precision of stored values, likewise", panel="KV cache", unit="precision")
    kv_cache_group_size: GroupSize | None = setting(
        None, "Group size of affine precisions: 32, 64 or 128", panel="KV cache", unit="values"
    )
    kv_cache_min_quantize_tokens: int = setting(
        PrecisionOptions.min_quantize_tokens,
        "Shorter conversations are stored at full precision",
        panel="KV cache",
        unit="tokens",
        ge=0,
    )
    kv_cache_live: bool = setting(
        PrecisionOptions.live,
        "Encode the KV of running requests too, not only what they leave behind",
        panel="KV cache",
    )
    kv_cache_first_raw: int = setting(
        PrecisionOptions.first_raw_tokens,
        "First tokens of a running request that stay at full precision",
        panel="KV cache",
        unit="tokens",
        ge=0,
    )
    kv_cache_recent_raw: int = setting(
        PrecisionOptions.recent_raw_tokens,
        "Newest tokens of a running request that stay at full precision",
        panel="KV cache",
        unit="tokens",
        ge=0,
    )
    kv_cache_edge_layers: int = setting(
        0, "First and last attention layers that are stored in another precision", panel="KV cache", unit="layers", ge=0
    )
    kv_cache_edge: str = setting("planes:8", "That precision", panel="KV cache", unit="precision")
    kv_cache_marks: int = setting(
        StoreOptions.max_marks,
        "Resume points that a stored conversation keeps, in models with window or recurrent layers",
        panel="KV cache", unit="points", ge=1,
    )  # fmt: skip
    kv_cache_mark_every: int = setting(
        MARK_EVERY_TOKENS, "Prompt tokens between two such points", panel="KV cache", unit="tokens", ge=64
    )

    dynamic_cache: bool = setting(
        LadderOptions.by_pressure,
        "Let precision step down by itself as memory fills up, before anything is evicted",
        panel="KV cache",
    )
    dynamic_cache_at: str = setting(
        "", "Step longer conversations down, as in 16k=planes:8,64k=planes:4", panel="KV cache", unit="steps"
    )
    kv_floor_k: Bits = setting(Floors.k_bits, "Fewest bits of keys that --dynamic-cache goes to", panel="KV cache",
                                            unit="bits")  # fmt: skip
    kv_floor_v: Bits = setting(Floors.v_bits, "Fewest bits of values, likewise", panel="KV cache", unit="bits")

    max_body_bytes: ByteCount = setting(
        Bounds.max_body_bytes, "Largest request body", panel="Process", unit="size", ge=1024
    )
    body_timeout_s: float = setting(
        Bounds.body_timeout_s,
        "How long a request body may take to arrive; each KiB that has arrived adds a second", panel="Process",
        unit="seconds", gt=0, le=86400,
    )  # fmt: skip
    max_header_bytes: ByteCount = setting(
        Bounds.max_header_bytes, "Largest headers of a request", panel="Process", unit="size", ge=1024, le=1024**2
    )
    header_timeout_s: float = setting(
        Bounds.header_timeout_s,
        "How long the headers of a request may take to arrive",
        panel="Process",
        unit="seconds",
        gt=0,
        le=86400,
    )
    send_timeout_s: float = setting(
        Bounds.send_timeout_s,
        "How long a client may read less than 1 KiB a second of an answer that waits for it", panel="Process",
        unit="seconds", gt=0, le=86400,
    )  # fmt: skip
    max_connections: int = setting(
        Bounds.max_connections,
        "Most connections at once; past it idle ones close, and if there are none 503", panel="Process",
        unit="connections", ge=1, le=100_000,
    )  # fmt: skip
    drain_timeout_s: float = setting(
        30.0, "How long the first Ctrl-C lets running replies go on; a disk cache gets as long again to be written, "
        "and no less than 30", panel="Process", unit="seconds", ge=0, le=86400
    )  # fmt: skip
    log_level: LogLevel = setting("warning", "Least severe message that is logged", panel="Process", unit="level")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        del dotenv_settings, file_secret_settings
        assert isinstance(init_settings, InitSettingsSource)
        assert isinstance(env_settings, EnvSettingsSource)
        env_settings.env_vars = {
            name: value for name, value in env_settings.env_vars.items() if not is_service_link(name, value)
        }
        file_values = init_settings.init_kwargs.pop("_file", {})
        return init_settings, env_settings, InitSettingsSource(settings_cls, init_kwargs=file_values)

    @model_validator(mode="after")
    def _check_together(self) -> Settings:
        if not self.keys and not self.allow_public and not is_loopback(self.host):
            raise PydanticCustomError(
                "public",
                "the address {host} can be reached from other machines and there is no key. Set one with --api-key "
                "(KVSTRATA_API_KEY) or --api-key-file, listen on 127.0.0.1, or accept the risk with --allow-public",
                {"host": self.host},
            )
        if not all(is_key(key) for key in self.keys):
            raise PydanticCustomError("key", NOT_A_KEY)
        return self

    @property
    def plain_keys(self) -> tuple[str, ...]:
        """Of flags and file."""
        return self.api_key + (read_key_file(self.api_key_file, "api_key_file") if self.api_key_file else ())

    @property
    def admin_keys(self) -> tuple[str, ...]:
        """Likewise."""
        return self.admin_key + (read_key_file(self.admin_key_file, "admin_key_file") if self.admin_key_file else ())

    @property
    def keys(self) -> tuple[str, ...]:
        """Every key that opens the door."""
        return self.plain_keys + self.admin_keys


def load(config: Path | None = None, flags: Mapping[str, Any] | None = None) -> Settings:
    """Settings from all four places. `flags` that are None were not given. Raises ConfigError with every problem."""
    # pydantic takes a blank variable as not set; but who sets one of these wants a locked server.
    given: dict[str, Any] = {name: "" for name in KEY_SETTINGS if os.environ.get(env_name(name)) == ""}
    given |= {name: value for name, value in (flags or {}).items() if value is not None}
    port_name = env_name("port")
    if is_service_link(port_name, port := os.environ.get(port_name)):
        logger.warning("%s=%s is a link to a service of that name, not a port: ignored.", port_name, port)
    path = config or default_config_path()
    file_values = read_toml(path) if config or path.is_file() else {}
    try:
        return Settings(_file=file_values, **given)  # pyright: ignore[reportCallIssue]
    except ValidationError as error:
        problems = [_problem(detail) for detail in error.errors(include_url=False)]
        raise ConfigError("\n".join(problems)) from None


def is_service_link(name: str, value: str | None) -> bool:
    """For a service called kvstrata Kubernetes sets KVSTRATA_PORT=tcp://10.0.0.1:8000 in every container, as Docker did
    for links. The other names that they set (KVSTRATA_SERVICE_HOST, KVSTRATA_PORT_8000_TCP) are no settings."""
    return name.upper() == env_name("port") and LINK_PATTERN.match(value or "") is not None


def default_config_path() -> Path:
    """Where a TOML file is looked for without --config."""
    if path := os.environ.get(f"{ENV_PREFIX}CONFIG"):
        return Path(path)
    import platformdirs

    return Path(platformdirs.user_config_dir("kvstrata", appauthor=False)) / "config.toml"


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"There is no file {path}. Check --config (KVSTRATA_CONFIG).") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}.") from None


def read_key_file(path: Path, setting: str) -> tuple[str, ...]:
    name = f"{flag_name(setting)} ({env_name(setting)})"
    try:
        lines = path.expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: {path} cannot be read: {error}.") from None
    keys = tuple(line.strip() for line in lines if line.strip() and not line.strip().startswith("#"))
    if not keys:
        raise ConfigError(f"{name}: {path} has no key. Write one on each line.")
    return keys


def is_key(text: str) -> bool:
    return bool(text) and text.isascii() and text.isprintable() and " " not in text


def flag_name(setting: str) -> str:
    return "--" + setting.replace("_", "-")


def env_name(setting: str) -> str:
    return ENV_PREFIX + setting.upper()


def default_text(field: FieldInfo) -> str:
    """The default as --help shows it."""
    value = field.default
    if value is None or value == ():
        return "none"
    if _unit(field) == "size" and isinstance(value, int) and value:
        return human_bytes(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _unit(field: FieldInfo) -> object:
    extra = field.json_schema_extra
    return extra.get("unit") if isinstance(extra, dict) else None


def _problem(detail: ErrorDetails) -> str:
    """One line. The value itself is never shown: it may be a key."""
    where = detail["loc"]
    if not where:
        return f"{detail['msg']}."
    name = str(where[0])
    if detail["type"] == "extra_forbidden":
        return f"{name}: there is no such setting. See: kvstrata serve --help"
    return f"{flag_name(name)} ({env_name(name)}): {detail['msg'].rstrip('.')}."

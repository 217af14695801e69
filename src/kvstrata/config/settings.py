"""Declarations of all settings. The TOML key of a setting is its name, the environment variable is KVSTRATA_ and the
name in capitals, the flag is the name with dashes. A default that a package also has is taken from that package. Each
description must be clear on its own in --help-all."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, model_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings.sources import InitSettingsSource

from kvstrata.config.fields import (
    ENV_PREFIX,
    NOT_A_KEY,
    ActivationBits,
    Bits,
    ByteCount,
    HostNames,
    LogFormat,
    LogLevel,
    Origins,
    SizeSetting,
    Texts,
    is_key,
    is_service_link,
    setting,
)
from kvstrata.config.sources import read_key_file
from kvstrata.engine.config import WAITING_PER_SEQUENCE, EngineLimits
from kvstrata.errors import ConfigError
from kvstrata.models.cpu_options import CpuOptions, CpuWeights
from kvstrata.platform.network import is_loopback
from kvstrata.prefix_cache.config import CacheConfig, DiskWrite
from kvstrata.sizes import Size
from kvstrata.tiers.options import DiskOptions, RemoteOptions
from kvstrata.tiers.remote.url import parse_url


def _store_url(text: str) -> str:
    try:
        parse_url(text)
    except ConfigError as error:
        raise PydanticCustomError("url", "{reason}", {"reason": str(error).removeprefix("--remote-cache: ")}) from None
    return text


class Settings(BaseSettings):
    """All settings of a server. See `load`."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True, arbitrary_types_allowed=True
    )

    model: str | None = setting(
        None, "Folder or Hugging Face id of a model that mlx-lm can load, or a GGUF file. Without one the server loads "
        "SmolLM2-135M-Instruct", panel="Model", is_common=True,
    )  # fmt: skip
    adapter_path: Path | None = setting(
        None, "Folder of a LoRA adapter to put on the model", panel="Model", unit="folder"
    )  # fmt: skip
    served_model_name: str | None = setting(
        None, "Another name that clients may call the model by, beside its own", panel="Model", unit="name"
    )
    allow_special_tokens: bool = setting(
        False, "Read the text of a special token inside messages, tools and template variables as that token. Without "
        "it only the chat template and the prompt of /v1/completions can write control tokens", panel="Model",
    )  # fmt: skip
    any_model_name: bool = setting(
        False, "Answer whatever model a client names. Otherwise the server answers to the model's own names and to "
        "claude-*", panel="Model",
    )  # fmt: skip
    max_model_len: int | None = setting(
        None, "Most tokens of a prompt and its reply together. Without a number: what the model was made for",
        panel="Model", unit="tokens", is_common=True, ge=1,
    )  # fmt: skip
    generation_config: Literal["model", "none"] = setting(
        "model", "Where sampling values come from that a request leaves out: 'model' reads the model's "
        "generation_config.json, 'none' takes OpenAI's defaults", panel="Model", unit="source",
    )  # fmt: skip

    cpu_weights: CpuWeights = setting(
        CpuOptions.weights, "Bits of plain 16-bit weights on a CPU: '8' or '4' quantizes them, 'raw' makes all weights "
        "float32, 'auto' takes 8, or 4 where 8 do not fit. Quantized models stay as they are, but for 'raw'",
        panel="Model", unit="bits",
    )  # fmt: skip
    cpu_activations: ActivationBits = setting(
        CpuOptions.activations, "Bits of the values that packed weights are multiplied by on a CPU. 8 is fastest and "
        "loses something, 32 is exact and slow", panel="Model", unit="bits",
    )  # fmt: skip

    host: str = setting(
        "127.0.0.1", "Address to listen on. 0.0.0.0 is all of the machine's, and needs --api-key",
        panel="Address and keys", unit="address", is_common=True,
    )  # fmt: skip
    port: int = setting(
        8000, "Port to listen on; 0 takes a free one", panel="Address and keys", unit="port", is_common=True,
        ge=0, le=65535,
    )  # fmt: skip
    api_key: Texts = setting(
        (), "Key that clients must send. Repeat the flag for several keys, or put commas between keys in the "
        "environment", panel="Address and keys", unit="key", is_common=True, repr=False,
    )  # fmt: skip
    api_key_file: Path | None = setting(
        None, "File with API keys, one on each line; # begins a comment", panel="Address and keys", unit="file"
    )
    admin_key: Texts = setting(
        (), "Key that may see and change what is cached under every key, and the precision of KV to come. Repeat the "
        "flag for several keys, or put commas between keys in the environment", panel="Address and keys", unit="key",
        repr=False,
    )  # fmt: skip
    admin_key_file: Path | None = setting(
        None, "File with admin keys, one on each line; # begins a comment", panel="Address and keys", unit="file"
    )
    pin_quota: SizeSetting = setting(
        Size(percent=25.0), "Most that each API key may pin; % is of the memory for cached KV. Admin keys, and servers "
        "without keys, are held to it only for pins by a ttl of cache_control", panel="Address and keys", unit="size",
    )  # fmt: skip
    allow_public: bool = setting(
        False, "Listen on a public address without any key, so that everyone who can reach it may use the server",
        panel="Address and keys",
    )  # fmt: skip
    allowed_hosts: HostNames = setting(
        (), "Host name by which clients may call a server without keys, beside addresses, the machine's own name and "
        "private names. Repeat the flag for several, or put commas between names in the environment",
        panel="Address and keys", unit="name",
    )  # fmt: skip
    allowed_origins: Origins = setting(
        (), "Origin of web pages that may use the server from a browser, like https://chat.example.org; * allows every "
        "page. Repeat the flag for several origins, or put commas between", panel="Address and keys", unit="origin",
        is_common=True,
    )  # fmt: skip

    memory_limit: SizeSetting = setting(
        Size(percent=75.0), "Memory for weights, KV and scratch together, like 24GiB; % is of the GPU's or the "
        "machine's memory, on a Mac at most what Metal recommends", panel="Engine", unit="size", is_common=True,
    )  # fmt: skip
    max_num_seqs: int = setting(
        EngineLimits.max_running, "Most requests that run at once, in one batch", panel="Engine", unit="requests",
        is_common=True, ge=1, le=4096,
    )  # fmt: skip
    prefill_share: float = setting(
        EngineLimits.prefill_share,
        "Share of the time that prompts may take while streams run: at 0.5 a stream's tokens come half as fast while a "
        "prompt is computed; 1 gives prompts all they can use", panel="Engine", unit="share", gt=0, le=1,
    )  # fmt: skip
    max_kv_size: int | None = setting(
        EngineLimits.max_kv_size,
        "Most tokens that a sequence keeps in each layer: the first 4 and the newest. Without a number all are kept",
        panel="Engine", unit="tokens", ge=16,
    )  # fmt: skip

    hot_cache_size: SizeSetting | None = setting(
        None, "Most memory for cached KV; % is of the machine's memory. Without a size: what running requests leave",
        panel="KV cache", unit="size",
    )  # fmt: skip
    cache_ttl_s: float | None = setting(
        CacheConfig.ttl_s, "Seconds after which cached KV expires that no request has used, and what is remembered of "
        "its texts. Without a number both stay while there is room", panel="KV cache", unit="seconds", gt=0,
    )  # fmt: skip
    disk_cache_dir: Path | None = setting(
        None, "Folder for KV that memory has no room for. KV in it outlives the server. Without a folder nothing is "
        "written to a disk", panel="Disk cache", unit="folder", is_common=True,
    )  # fmt: skip
    disk_cache_size: SizeSetting = setting(
        Size(num_bytes=50 * 1024**3), "Most that the disk cache takes; % is of the volume", panel="Disk cache",
        unit="size", is_common=True,
    )  # fmt: skip
    disk_write: DiskWrite = setting(
        CacheConfig.disk_write, "When KV is written to the disk: 'after_reply' some seconds after each reply has "
        "ended, so that a crash or a power cut loses only the turns that run; 'on_evict' when memory runs short and "
        "when the server ends", panel="Disk cache", unit="mode",
    )  # fmt: skip
    disk_daily_writes: ByteCount = setting(
        DiskOptions.daily_write_bytes, "Most bytes that are written to the disk in a day; 0 sets no limit",
        panel="Disk cache", unit="size", ge=0,
    )  # fmt: skip
    hot_cache_only: bool = setting(
        False, "Never write KV to a disk, whatever the other settings say", panel="Disk cache"
    )

    remote_cache: Annotated[str, AfterValidator(_store_url)] | None = setting(
        None, "Address of a store through which servers share KV: redis://host:6379/0, rediss://, s3://bucket/prefix, "
        "gs://, az://, file:///folder. A password is safer in a variable: 'redis://:${STORE_PASSWORD}@host'",
        panel="Remote cache", unit="url", repr=False,
    )  # fmt: skip
    remote_secret_file: Path | None = setting(
        None, "File with the secret that names and seals blocks in the shared store: 32 bytes or more, the same for "
        "all servers. Needed unless the store is a folder that is this user's alone",
        panel="Remote cache", unit="file",
    )  # fmt: skip
    remote_precision: str = setting(
        RemoteOptions.precision, "Precision of all blocks in the shared store, the same for all servers",
        panel="Remote cache", unit="precision",
    )  # fmt: skip
    remote_ttl_s: float = setting(
        RemoteOptions.ttl_s, "Seconds after which a block in the shared store expires that no server has used; 0 keeps "
        "blocks while there is room", panel="Remote cache", unit="seconds", ge=0,
    )  # fmt: skip
    remote_daily_writes: ByteCount = setting(
        RemoteOptions.daily_write_bytes, "Most bytes that the server writes to the shared store in a day; 0 sets no "
        "limit", panel="Remote cache", unit="size", ge=0,
    )  # fmt: skip

    kv_events: str | None = setting(
        None, "Publish which blocks of tokens memory holds, in vLLM's form, for routers: tcp://127.0.0.1:5557. Other "
        "than loopback addresses need a key to be set", panel="Routers", unit="address",
    )  # fmt: skip
    kv_events_topic: str = setting(
        "", "Topic of the messages of --kv-events; llm-d wants kv@HOST:PORT@MODEL", panel="Routers", unit="topic"
    )

    stable_prompts: bool = setting(
        True, "Keep the beginning of a chat the same from turn to turn: earlier replies stay as they were sampled, "
        "lines that change with every request and mean nothing to a model go, and system messages keep their place",
        panel="KV cache",
    )  # fmt: skip
    kv_cache_quantization: bool = setting(False, "Store KV in 8 bits; the same as --kv-cache-bits 8", panel="KV cache")
    kv_cache_bits: Bits | None = setting(
        None, "Bits in which KV is stored: 8, 4 or 2. Without a number KV is stored as the model computes it",
        panel="KV cache", unit="bits", is_common=True,
    )  # fmt: skip
    cache_type_k: str | None = setting(
        None, "Precision of stored keys: raw, planes:8|4|2, affine:8|6|5|4|3|2[:gGROUP]",
        panel="KV cache", unit="precision",
    )  # fmt: skip
    cache_type_v: str | None = setting(
        None, "Precision of stored values: raw, planes:8|4|2, affine:8|6|5|4|3|2[:gGROUP]",
        panel="KV cache", unit="precision",
    )  # fmt: skip
    kv_cache_min_quantize_tokens: int = setting(
        CacheConfig.min_quantize_tokens, "Length from which on a conversation is stored in fewer bits. Shorter "
        "ones stay at full precision", panel="KV cache", unit="tokens", ge=0,
    )  # fmt: skip
    kv_cache_live: bool = setting(
        CacheConfig.encodes_running, "Encode the KV of running requests too, not only what they leave behind",
        panel="KV cache",
    )  # fmt: skip

    dynamic_cache: bool = setting(
        CacheConfig.dynamic, "Store KV in fewer and fewer bits as memory fills up, before anything is evicted",
        panel="KV cache", is_common=True,
    )  # fmt: skip
    dynamic_cache_floor: Bits = setting(
        CacheConfig.floor_bits, "Fewest bits of keys and values that --dynamic-cache goes down to: 8, 4 or 2",
        panel="KV cache", unit="bits",
    )  # fmt: skip
    dynamic_cache_at: str = setting(
        "", "Lengths from which on conversations are stored in fewer bits, as in 16k=planes:8,64k=planes:4",
        panel="KV cache", unit="steps",
    )  # fmt: skip

    body_memory: ByteCount = setting(
        256 * 1024**2, "Most bytes of request bodies that the server holds at once, and no less than "
        "the 32 MiB of one body. Past the limit clients are answered 503", panel="Process", unit="size", ge=1024,
    )  # fmt: skip
    drain_timeout_s: float = setting(
        30.0, "Seconds for which running replies go on after the first Ctrl-C. A disk cache gets as long again to be "
        "written, and no less than 30", panel="Process", unit="seconds", ge=0, le=86400,
    )  # fmt: skip
    log_level: LogLevel = setting(
        "info", "Least severe message that is logged: critical, error, warning, info (a line for each request) or "
        "debug", panel="Process", unit="level", is_common=True,
    )  # fmt: skip
    log_format: LogFormat = setting(
        "text", "Form of the log: 'text' for people, 'json' for programs, one object on each line", panel="Process",
        unit="form", is_common=True,
    )  # fmt: skip

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
    def max_waiting(self) -> int:
        """Most requests that wait in the queue. When it is full, clients are answered 429."""
        return WAITING_PER_SEQUENCE * self.max_num_seqs

    @property
    def plain_keys(self) -> tuple[str, ...]:
        """Return the API keys from flags and file."""
        return self.api_key + (read_key_file(self.api_key_file, "api_key_file") if self.api_key_file else ())

    @property
    def admin_keys(self) -> tuple[str, ...]:
        """Return the admin keys from flags and file."""
        return self.admin_key + (read_key_file(self.admin_key_file, "admin_key_file") if self.admin_key_file else ())

    @property
    def keys(self) -> tuple[str, ...]:
        """Return every key that gives access."""
        return self.plain_keys + self.admin_keys

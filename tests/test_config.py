"""Settings: where they come from, which wins, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.config import Settings, env_name, flag_name, is_loopback, load
from kvstrata.errors import ConfigError
from kvstrata.sizes import Size, format_bytes


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(env_name(name), raising=False)
    # Whatever the person who runs this has in their own configuration folder.
    monkeypatch.setenv("KVSTRATA_CONFIG", str(tmp_path / "none.toml"))


def toml(folder: Path, text: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text)
    return path


def test_order_of_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = toml(tmp_path, "port = 1\nmax_num_seqs = 2\ndrain_timeout_s = 3\n")
    monkeypatch.setenv("KVSTRATA_PORT", "10")
    monkeypatch.setenv("KVSTRATA_MAX_NUM_SEQS", "20")
    settings = load(file, {"port": "100", "max_num_seqs": None})
    assert (settings.port, settings.max_num_seqs, settings.drain_timeout_s) == (100, 20, 3)
    assert settings.cache_ttl_s is None


def test_file_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTRATA_CONFIG", str(toml(tmp_path, "port = 7")))
    assert load().port == 7


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("8GiB", 8 * 1024**3),
        ("500MB", 500_000_000),
        ("500 mb", 500_000_000),
        ("1.5KiB", 1536),
        ("17", 17),
        ("17B", 17),
        ("20%", 200),
        ("0.5%", 5),
        ("100%", 1000),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert Size.parse(text).of(1000) == num_bytes


@pytest.mark.parametrize("text", ["20 percents", "", "GiB", "-1GB", "1e9", "0%", "101%", "8 GiB RAM", "nan", "٣GB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="20%"):
        Size.parse(text)


@given(st.integers(0, 2**50))
def test_printed_sizes_can_be_read(num_bytes: int) -> None:
    assert Size.parse(format_bytes(num_bytes)).of(0) == pytest.approx(num_bytes, rel=1e-3)
    assert Size.parse(format_bytes(num_bytes, 3)).of(0) == pytest.approx(num_bytes, rel=1e-3)


@pytest.mark.parametrize(
    ("num_bytes", "short", "long"),
    [
        (0, "0B", "0 B"),
        (1023, "1023B", "1023 B"),
        (1536, "1.5KiB", "1.5 KiB"),
        (150 << 20, "150MiB", "150.0 MiB"),
        (50 << 30, "50GiB", "50.0 GiB"),
        (3 << 50, "3072TiB", "3072.0 TiB"),
        (-2048, "-2KiB", "-2.0 KiB"),
    ],
)
def test_format_bytes_takes_the_largest_unit(num_bytes: int, short: str, long: str) -> None:
    assert (format_bytes(num_bytes), format_bytes(num_bytes, 1)) == (short, long)


def test_format_bytes_drops_decimals_of_large_numbers() -> None:
    sizes = (99.5 * 1024, 100 * 1024, 120 << 20)
    assert [format_bytes(size, 1, whole_from=100) for size in sizes] == ["99.5 KiB", "100 KiB", "120 MiB"]


def test_size_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTRATA_MEMORY_LIMIT", "25%")
    settings = load(flags={"body_memory": "1MiB"})
    assert settings.memory_limit.of(4000) == 1000
    assert settings.body_memory == 1024**2
    with pytest.raises(ConfigError, match="percentage"):
        load(flags={"body_memory": "5%"})


def test_every_problem_is_told_with_flag_and_environment() -> None:
    with pytest.raises(ConfigError) as caught:
        load(flags={"port": "99999", "memory_limit": "20 percents", "max_num_seqs": "0", "log_level": "loud"})
    for name in ("port", "memory_limit", "max_num_seqs", "log_level"):
        assert flag_name(name) in str(caught.value)
        assert env_name(name) in str(caught.value)
    assert "20%" in str(caught.value)


@pytest.mark.parametrize("text", ["prot = 1", "port = ", "[server]\nport = 1"])
def test_file_that_is_wrong(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        load(toml(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("port = 1\nmax_num_seq = 3", 2, "there is no setting 'max_num_seq'. Did you mean 'max_num_seqs'?"),
        ("[server]\nport = 1", 1, "there is no setting 'server'."),
        ("# port\n\nport = 'abc'", 3, "port: "),
        ("max-num-seqs = 3", 1, "there is no setting 'max-num-seqs'. Did you mean 'max_num_seqs'?"),
    ],
)
def test_a_problem_of_a_file_names_file_line_and_setting(tmp_path: Path, text: str, line: int, said: str) -> None:
    path = toml(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}, line {line}: {said}")
    assert "--port" not in str(caught.value)


def test_a_wrong_flag_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--port \(KVSTRATA_PORT\): "):
        load(toml(tmp_path, "port = 1"), {"port": "abc"})


def test_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="There is no file"):
        load(tmp_path / "missing.toml")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", ""])
def test_public_address_needs_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match="--allow-public"):
        load(flags={"host": host})
    assert load(flags={"host": host, "api_key": ["k"]}).host == host
    assert load(flags={"host": host, "allow_public": True}).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_local_addresses_need_none(host: str) -> None:
    assert is_loopback(host)
    assert load(flags={"host": host}).keys == ()


def test_keys_of_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("# comment\n c \n\n")
    file.chmod(0o600)
    monkeypatch.setenv("KVSTRATA_API_KEY", "a, b")
    assert load(flags={"api_key_file": file}).keys == ("a", "b", "c")
    assert load(toml(tmp_path, 'api_key = ["z"]')).keys == ("a", "b")


@pytest.mark.parametrize(
    "given", [{"api_key": [""]}, {"api_key": ["a", " "]}, {"api_key_file": ""}, {"admin_key": [""]}]
)
def test_a_key_that_is_given_but_empty_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"--(api|admin)-key"):
        load(flags=given)


@pytest.mark.parametrize("text", ["", " ", "a,", ",a"])
def test_a_variable_for_keys_that_is_blank_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTRATA_API_KEY", text)
    with pytest.raises(ConfigError, match=r"KVSTRATA_API_KEY.*empty"):
        load()
    assert load(flags={"api_key": ["b"]}).keys == ("b",)


def test_a_variable_for_the_key_file_that_is_blank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTRATA_API_KEY_FILE", "")
    with pytest.raises(ConfigError, match="KVSTRATA_API_KEY_FILE"):
        load()


@pytest.mark.parametrize("name", ["http://models.example.org", "models.example.org:8000", "a b", "bücher.example"])
def test_hosts_are_names_alone(name: str) -> None:
    assert load(flags={"allowed_hosts": ["models.example.org"]}).allowed_hosts == ("models.example.org",)
    with pytest.raises(ConfigError, match=r"--allowed-hosts.*only the name"):
        load(flags={"allowed_hosts": [name]})


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        (["https://Chat.Example.org/"], ("https://chat.example.org",)),
        (["https://a.example:443", "http://b.example:80"], ("https://a.example", "http://b.example")),
        (["http://localhost:3000,http://[::1]:5173"], ("http://localhost:3000", "http://[::1]:5173")),
        (["app://obsidian.md"], ("app://obsidian.md",)),
        (["*"], ("*",)),
    ],
)
def test_origins_are_as_browsers_write_them(given: list[str], plain: tuple[str, ...]) -> None:
    assert load(flags={"allowed_origins": given}).allowed_origins == plain


@pytest.mark.parametrize("text", ["chat.example.org", "null", "https://*.example.org", "https://a.example/path", "**"])
def test_what_is_no_origin(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--allowed-origins.*https://chat\.example\.org"):
        load(flags={"allowed_origins": [text]})


def test_keys_are_not_printed() -> None:
    assert "hush" not in repr(load(flags={"api_key": ["hush"]}))
    with pytest.raises(ConfigError) as caught:
        load(flags={"api_key": ["hush hush"]})
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("text", [None, "", "# nothing\n"])
def test_key_file_without_keys(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
        file.chmod(0o600)
    with pytest.raises(ConfigError, match=r"--api-key-file.*(has no key|cannot be read)"):
        load(flags={"api_key_file": file})


@pytest.mark.parametrize("mode", [0o644, 0o602])
@pytest.mark.parametrize("name", ["api_key_file", "admin_key_file"])
def test_key_file_open_to_every_user_is_refused(tmp_path: Path, name: str, mode: int) -> None:
    file = tmp_path / "keys"
    file.write_text("hush\n")
    file.chmod(mode)
    with pytest.raises(ConfigError, match=rf"{flag_name(name)}.*every user\. Run: chmod 600 {file}") as caught:
        load(flags={name: file})
    assert "hush" not in str(caught.value)


def test_every_setting_says_what_it_is() -> None:
    for name, field in Settings.model_fields.items():
        assert field.description, name
        assert isinstance(field.json_schema_extra, dict), name
        assert field.json_schema_extra["panel"], name


# For settings without a default; the others of these take numbers.
EXAMPLES = {
    "allowed_hosts": "models.example.org,other",
    "admin_key": "one,two",
    "api_key": "one,two",
    "allowed_origins": "https://chat.example.org,http://localhost:3000",
    "dynamic_cache_at": "16k=planes:8",
    "kv_cache_bits": "8",
    "cache_type_k": "planes:4",
    "cache_type_v": "affine:4:g64",
    "remote_cache": "redis://127.0.0.1:6379/0",
}


@pytest.mark.parametrize("name", [name for name in Settings.model_fields if not name.endswith("_key_file")])
def test_every_setting_can_be_given_as_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As flags and the environment have it."""
    default = Settings.model_fields[name].get_default(call_default_factory=True)
    has_default = default not in (None, (), "")
    text = str(default) if has_default else EXAMPLES.get(name, "1024")
    by_flag = getattr(load(flags={name: text}), name)
    assert by_flag == default if has_default else by_flag not in (None, (), "")
    monkeypatch.setenv(env_name(name), text)
    assert getattr(load(), name) == by_flag


def test_bits_are_numbers_however_they_are_given() -> None:
    flags = {"kv_cache_bits": "4", "dynamic_cache_floor": "8"}
    settings = load(flags=flags)
    assert [getattr(settings, name) for name in flags] == [4, 8]
    with pytest.raises(ConfigError, match=r"--kv-cache-bits.*8, 4 or 2"):
        load(flags={"kv_cache_bits": "7"})


def test_a_service_link_is_no_port(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """What Kubernetes sets in every container for a service that is called kvstrata."""
    for name, value in {
        "PORT": "tcp://10.0.0.1:9000",
        "SERVICE_HOST": "10.0.0.1",
        "SERVICE_PORT": "9000",
        "SERVICE_PORT_HTTP": "9000",
        "PORT_9000_TCP": "tcp://10.0.0.1:9000",
        "PORT_9000_TCP_PROTO": "tcp",
        "PORT_9000_TCP_PORT": "9000",
        "PORT_9000_TCP_ADDR": "10.0.0.1",
    }.items():
        monkeypatch.setenv(f"KVSTRATA_{name}", value)
    with caplog.at_level("WARNING", "kvstrata.config"):
        settings = load()
    assert (settings.host, settings.port) == ("127.0.0.1", 8000)
    (line,) = caplog.messages
    assert "KVSTRATA_PORT=tcp://10.0.0.1:9000" in line
    assert load(flags={"port": "7000"}).port == 7000


def test_other_wrong_ports_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVSTRATA_PORT", "10.0.0.1:8000")
    with pytest.raises(ConfigError, match="KVSTRATA_PORT"):
        load()
    monkeypatch.delenv("KVSTRATA_PORT")
    for flags, config in (({"port": "tcp://a:1"}, None), ({}, toml(tmp_path, 'port = "tcp://a:1"'))):
        with pytest.raises(ConfigError, match=r"port.*valid integer"):
            load(config, flags)

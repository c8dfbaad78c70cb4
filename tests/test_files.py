"""files.py: from what a user calls a model to a directory, or to one line that says what to do."""

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants, errors, utils

from command.checks import UserError
from more.loading import files
from more.loading.files import DEMO, HUB_FILES, find
from nano_sarathi import LLM

ID = "somebody/some-model-0.5B"


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's client without a network, and its cache, which is empty."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def complaint(model: str) -> str:
    with pytest.raises(UserError) as caught:
        find(model)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_name_a_directory_or_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(ID).mkdir(parents=True)
    assert find("demo") == DEMO and find("llama-0.2b") is None and find(str(tmp_path)) == tmp_path
    assert find(ID) == Path(ID), "a directory goes before the hub"
    monkeypatch.setattr(files, "_download", Path)
    assert find("gpt2") == Path("openai-community/gpt2") and find("gpt2-124m") is None
    assert find("gpt2-medium") == Path("openai-community/gpt2-medium")
    Path("gpt2").mkdir()
    assert find("gpt2") == Path("gpt2")


def test_a_hub_id_offline(offline: Path) -> None:
    said = complaint(ID)
    assert "the hub cannot be reached" in said and f"hf download {ID} --local-dir" in said


def test_a_hub_id_that_was_downloaded_before(offline: Path) -> None:
    folder = offline / "models--somebody--some-model-0.5B"
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    assert find(ID) == folder / "snapshots" / "abc"
    for file in filter(Path.is_file, DEMO.iterdir()):
        (folder / "snapshots" / "abc" / file.name).write_bytes(file.read_bytes())
    assert LLM(ID, device="cpu", max_length=8).config.name == "some-model-0.5B", (
        "not the hash that its directory is called"
    )


def test_the_upper_folder_of_the_hubs_cache(tmp_path: Path) -> None:
    """By a path, as by an id: refs/main names the snapshot. Without it, there may be only one."""
    folder = tmp_path / "models--somebody--some-model"
    for name in ("abc", "def"):
        (folder / "snapshots" / name).mkdir(parents=True)
    assert find(str(folder)) == folder, "it has nothing to read"
    (folder / "snapshots" / "def" / "config.json").write_text("{}")
    assert find(str(folder)) == folder / "snapshots" / "def"
    (folder / "snapshots" / "abc" / "config.json").write_text("{}")
    said = complaint(str(folder))
    assert said.startswith(f"{folder} has 2 snapshots, and no refs/main that names one: give the")
    assert str(folder / "snapshots" / "abc") in said
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc\n")
    assert find(str(folder)) == folder / "snapshots" / "abc"
    for file in ("ckpt.pt", "config.json"):  # a folder of one's own with snapshots in it
        (folder / file).write_text("{}")
        assert find(str(folder)) == folder


def test_what_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda model, **options: asked.update(options, model=model) or str(tmp_path),
    )
    assert find(ID) == tmp_path and asked == {"model": ID, "allow_patterns": HUB_FILES}
    files = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    files += ["generation_config.json", "tokenizer.json", "added_tokens.json"]
    rest = ["consolidated.safetensors", "pytorch_model.bin", "onnx/model.onnx", "README.md"]
    assert list(utils.filter_repo_objects(files + rest, allow_patterns=HUB_FILES)) == files


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (errors.GatedRepoError, "accept a licence on https://huggingface.co/"),
        (errors.RepositoryNotFoundError, "the hub has no such model"),
        (OSError, "cannot be downloaded as a hub id: disk full"),
    ],
)
def test_what_the_hub_says_becomes_one_line(
    error: type[Exception], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        problem = error.__new__(error)  # some of these want a whole HTTP response
        problem.args = ("disk full\nand more",)
        raise problem

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    assert expected in complaint(ID)

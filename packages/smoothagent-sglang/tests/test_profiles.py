"""A profile is what it was when it is read again, and says what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from smoothagent_sglang.errors import ProfileError
from smoothagent_sglang.latency import BatchLatency, Residuals
from smoothagent_sglang.physics import QWEN3_8B, Device
from smoothagent_sglang.profiles import Profile, read_profile

LATENCY = BatchLatency(
    ((1, 0.006), (512, 0.03), (4096, 0.2)),
    2.5e-7,
    1e-8,
    Residuals(0.01, 0.05, 0.1, ((0.5, 1.0), (0.95, 1.05)), 400),
)
PROFILE = Profile(
    *(LATENCY, "/models/Qwen3-8B/", "NVIDIA H100 80GB HBM3", "bfloat16"),
    tensor_parallel=1,
    date="2026-12-01",
    engine="0.5.23",
    limits=Device("H100 SXM", 989e12, 3.35e12),
    shape=QWEN3_8B,
)


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    for profile in (PROFILE, Profile(LATENCY, "m", "cpu", "float32", 2, "2026-12-01")):
        profile.save(tmp_path / "p.json")
        assert read_profile(tmp_path / "p.json") == profile
    assert [p.name for p in tmp_path.iterdir()] == ["p.json"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 2}, "no latency profile"),
        ({"gemm_seconds": []}, "no entries"),
        ({"gemm_seconds": [[1, 0.006], [4096, 0.01]]}, r"entry \(4096 tokens, 0.01 s\)"),
        ({"gemm_seconds": [[1, "soon"]]}, "another kind"),
        ({"decode_seconds_per_token": None}, "another kind"),
        ({"shape": {"name": "x"}}, "another kind"),
        ({"prefill_seconds_per_pair": -1}, "'prefill'"),
    ],
)
def test_what_is_wrong_with_it_is_said(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    path = tmp_path / "p.json"
    PROFILE.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ProfileError, match=says):
        read_profile(path)


def test_what_is_no_profile_is_said(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    for text in ("", "[]", "{", "nonsense"):
        path.write_text(text)
        with pytest.raises(ProfileError, match=r"p\.json"):
            read_profile(path)
    path.unlink()
    with pytest.raises(ProfileError, match="cannot be read"):
        read_profile(path)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"model": "Qwen/Qwen3-32B"}, "qwen3-32b"),
        ({"dtype": "float16"}, "float16"),
        ({"tensor_parallel": 2}, "tensor_parallel"),
    ],
)
def test_another_servers_is_refused(asked: dict[str, Any], says: str) -> None:
    served: dict[str, Any] = {"model": "Qwen/Qwen3-8B", "dtype": "bfloat16", "tensor_parallel": 1}
    PROFILE.require(**served)
    with pytest.raises(ProfileError, match=says):
        PROFILE.require(**{**served, **asked})

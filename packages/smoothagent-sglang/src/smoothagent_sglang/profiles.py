"""A latency profile as a file: what was measured, where, and how well it fits."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

from smoothagent_sglang.errors import ProfileError
from smoothagent_sglang.latency import BatchLatency, Residuals
from smoothagent_sglang.physics import Device, Shape, check

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Profile:
    """The batch latency of one model on one device.

    Attributes:
        latency: the model of it.
        model: the served model's name or path, as the server has it.
        device: as the driver calls it.
        dtype: of weights, as ``bfloat16``.
        tensor_parallel: ranks.
        date: ISO date on which it was measured.
        engine: SGLang's version; empty for a profile of kernels alone.
        limits: what the device can do at most, where that is known.
        shape: the model's, where that is known.
    """

    latency: BatchLatency
    model: str
    device: str
    dtype: str
    tensor_parallel: int
    date: str
    engine: str = ""
    limits: Device | None = None
    shape: Shape | None = None

    def __post_init__(self) -> None:
        if self.limits is not None and self.shape is not None:
            check(self.latency, self.limits, self.shape)

    def require(self, *, model: str, dtype: str, tensor_parallel: int) -> None:
        """Refuse another server's.

        Raises:
            ProfileError: it is of another model, data type or number of ranks.
        """
        for name, mine, asked in (
            ("model", _short(self.model), _short(model)),
            ("dtype", self.dtype, dtype),
            ("tensor_parallel", self.tensor_parallel, tensor_parallel),
        ):
            if mine != asked:
                raise ProfileError(
                    f"the latency profile is of {name} {mine!r}, and this server has {asked!r}: pass its own profile, "
                    "or none, so that it is learned from the server's batches"
                )

    def save(self, path: Path) -> None:
        """Write it, whole or not at all."""
        latency = self.latency
        told: dict[str, Any] = {
            "format": _FORMAT,
            "model": self.model,
            "device": self.device,
            "dtype": self.dtype,
            "tensor_parallel": self.tensor_parallel,
            "date": self.date,
            "engine": self.engine,
            "gemm_seconds": [list(entry) for entry in latency.table],
            "decode_seconds_per_token": latency.decode,
            "prefill_seconds_per_pair": latency.prefill,
            "residuals": asdict(latency.residuals),
            "limits": None if self.limits is None else self.limits._asdict(),
            "shape": None if self.shape is None else self.shape._asdict(),
        }
        written = path.with_name(f".{path.name}.{os.getpid()}")
        written.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
        written.replace(path)


def read_profile(path: Path) -> Profile:
    """A profile from its file.

    Raises:
        ProfileError: it cannot be read, is none, or cannot be true.
    """
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ProfileError(f"the latency profile {path} cannot be read: {error}") from error
    if not isinstance(told, dict) or cast("dict[str, Any]", told).get("format") != _FORMAT:
        raise ProfileError(
            f"{path} is no latency profile of format {_FORMAT}: make one with smoothagent sglang profile"
        )
    try:
        return _read(cast("dict[str, Any]", told))
    except ProfileError as error:
        raise ProfileError(f"the latency profile {path}: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ProfileError(f"the latency profile {path} lacks a field or has one of another kind: {error!r}") from error


def _read(told: Mapping[str, Any]) -> Profile:
    table = tuple((int(m), float(t)) for m, t in told["gemm_seconds"])
    latency = BatchLatency(
        table, float(told["decode_seconds_per_token"]), float(told["prefill_seconds_per_pair"]), _residuals(told)
    )
    limits, shape = told.get("limits"), told.get("shape")
    return Profile(
        latency,
        *(str(told["model"]), str(told["device"]), str(told["dtype"])),
        tensor_parallel=int(told["tensor_parallel"]),
        date=str(told["date"]),
        engine=str(told.get("engine", "")),
        limits=None if limits is None else Device(**limits),
        shape=None if shape is None else Shape(**shape),
    )


def _residuals(told: Mapping[str, Any]) -> Residuals:
    given = dict(told.get("residuals") or {})
    known = {f.name: given[f.name] for f in fields(Residuals) if f.name in given}
    return replace(Residuals(**known), upper=tuple((float(s), float(f)) for s, f in known.get("upper", ())))


def _short(model: str) -> str:
    return Path(model.rstrip("/")).name.lower()

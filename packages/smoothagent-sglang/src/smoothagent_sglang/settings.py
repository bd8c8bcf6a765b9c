"""What an operator may set, in a TOML file or on the command line."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from smoothagent_sglang.errors import SettingError

FILE = "SMOOTHAGENT_SGLANG_CONFIG"
"""Environment variable with the file's path: what a server reads that is started as always."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How lookahead work is scheduled.

    Attributes:
        enabled: False: SGLang schedules all requests as it does without, lookahead requests among them.
        tbt: δ, the longest time between tokens that BE work may cause, seconds; None: four decode steps.
        be_step: w, the longest step with BE work, seconds; None: six decode steps.
        ttft: SLO of an LC request's first token, seconds: within its slack BE work may join its prefill; None: it never
            does.
        piece: tokens of a piece at most; None: SGLang's chunked prefill size.
        share: of the KV pool that BE prefixes may hold, in 0–1.
        lease: seconds that a warmed prefix is kept after its request has ended.
        be_decodes: lookahead requests that may decode at a time.
        aging: seconds of laxity that a second of waiting is worth.
        profile: a latency profile; None: learned from the server's batches.
        strict: a server that this cannot be used with does not start; else it serves without.
    """

    enabled: bool = True
    tbt: float | None = None
    be_step: float | None = None
    ttft: float | None = None
    piece: int | None = None
    share: float = 0.3
    lease: float = 60.0
    be_decodes: int = 1
    aging: float = 0.0
    profile: Path | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        for name, least in (("tbt", 0.0), ("be_step", 0.0), ("ttft", 0.0), ("piece", 0)):
            value = getattr(self, name)
            if value is not None and value <= least:
                raise SettingError(f"{name} is {value}: it must be above {least:g}")
        for name in ("lease", "aging"):
            if getattr(self, name) < 0:
                raise SettingError(f"{name} is {getattr(self, name)} s: it must be 0 or more")
        if not 0 < self.share <= 1:
            raise SettingError(f"share is {self.share}: it is a share of the KV pool, above 0 and at most 1")
        if self.be_decodes < 0:
            raise SettingError(f"be_decodes is {self.be_decodes}: it must be 0 or more")


_NUMBERS = ("tbt", "be_step", "ttft", "share", "lease", "aging")
_WHOLE = ("piece", "be_decodes")


def read_settings(path: Path) -> Settings:
    """Settings from a TOML file.

    Raises:
        SettingError: it cannot be read, or has an unknown or impossible value.
    """
    try:
        told = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingError(f"the configuration {path} cannot be read: {error}") from error
    return settings_of(told, folder=path.parent)


def settings_of(told: Mapping[str, Any], *, folder: Path | None = None) -> Settings:
    """Settings from their values; paths are relative to ``folder``.

    Raises:
        SettingError: there is an unknown or impossible value.
    """
    known = [f.name for f in fields(Settings)]
    values = dict[str, Any]()
    for name, value in told.items():
        if name not in known:
            raise SettingError(f"{name!r} is no setting of the scheduler: use {', '.join(known)}")
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if (name in _NUMBERS and not number) or (name in _WHOLE and not (number and isinstance(value, int))):
            raise SettingError(f"{name} is {value!r}: it must be a number")
        switch = name in ("enabled", "strict")
        if (switch and not isinstance(value, bool)) or (name == "profile" and not isinstance(value, str)):
            wanted = "true or false" if switch else "a path"
            raise SettingError(f"{name} is {value!r}: it must be {wanted}")
        values[name] = (folder or Path()) / str(value) if name == "profile" else value
    return replace(Settings(), **values)

"""What a gateway is told: by its command line, a TOML file, or the program that makes one."""

from __future__ import annotations

import dataclasses
import ipaddress
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from smoothagent import ConfigurationError, LookaheadStrategy, OffloadStore
from smoothagent.serving.dialects.detect import DIALECTS
from smoothagent_gateway.strategies import strategy_of

SESSION_HEADERS = ("x-smoothagent-session", "x-session-id")
"""Request headers that name a conversation, the first that is there."""
_PLACES = ("state", "store")


@dataclass(frozen=True, slots=True)
class Settings:
    """One gateway's settings.

    Attributes:
        upstream: URL of the model server's API, ending in ``/v1`` for all servers we know.
        strategy: makes a conversation's strategy.
        host: address to bind to.
        port: port to bind to; 0 lets the system choose.
        token: what clients authorize themselves with (``Authorization: Bearer …``); None asks for nothing.
        api_key: what the gateway authorizes itself with upstream; None passes the client's own ``Authorization`` on.
        lookahead: False transforms at the trigger only, on the critical path.
        warm: send prefill-only requests; None: yes, except to hosted endpoints, where they cost money.
        dialect: of the server; ``auto`` asks it.
        slots: llama.cpp slots that the gateway may use, three a conversation; None for all.
        lookahead_url: a second llama.cpp server with the same model, for the lookahead work.
        volatile_tail: how many of the last messages a harness rewrites on every call; None finds out (0 or 1).
        session_headers: request headers that name a conversation, in lower case.
        state: SQLite file with what a restart needs; None keeps nothing.
        store: where `Offload` puts outputs, and where they are read from at ``/smoothagent/offloaded/``.
        conversations: most conversations in memory.
        idle_seconds: how long an unused one is kept there.
        memory_bytes: most bytes of requests whose conversations are kept there.
        max_body_bytes: a request's body may have.
        ask_usage: ask for token counts where a streaming client does not; the extra chunk is taken out again.

    Raises:
        ConfigurationError: a value that is impossible.
    """

    upstream: str
    strategy: Callable[[], LookaheadStrategy]
    host: str = "127.0.0.1"
    port: int = 8090
    token: str | None = field(default=None, repr=False)
    api_key: str | None = field(default=None, repr=False)
    lookahead: bool = True
    warm: bool | None = None
    dialect: str = "auto"
    slots: tuple[int, ...] | None = None
    lookahead_url: str | None = None
    volatile_tail: int | None = None
    session_headers: tuple[str, ...] = SESSION_HEADERS
    state: Path | None = None
    store: OffloadStore | None = None
    conversations: int = 256
    idle_seconds: float = 900.0
    memory_bytes: int = 512 * 2**20
    max_body_bytes: int = 32 * 2**20
    ask_usage: bool = True

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        _check_upstream(self.upstream)
        if not 0 <= self.port <= 65535:
            raise ConfigurationError(f"port={self.port}: ports are 1 to 65535, or 0 for any that is free")
        for name in ("conversations", "idle_seconds", "memory_bytes", "max_body_bytes"):
            if getattr(self, name) <= 0:
                raise ConfigurationError(f"{name}={getattr(self, name)}: it must be positive")
        if self.volatile_tail is not None and self.volatile_tail < 0:
            raise ConfigurationError(f"volatile_tail={self.volatile_tail}: it must not be negative")
        if self.token == "" or self.api_key == "":
            raise ConfigurationError("a token or api_key is empty: leave it out, or set one")
        if self.dialect != "auto" and self.dialect not in DIALECTS:
            raise ConfigurationError(f"dialect={self.dialect!r}: use auto, or one of {', '.join(sorted(DIALECTS))}")
        if any(not isinstance(slot, int) or slot < 0 for slot in cast("Sequence[object]", self.slots or ())):
            raise ConfigurationError(f"slots={list(self.slots or ())}: they are numbers from 0 on")
        if not self.token and not is_loopback(self.host):
            raise ConfigurationError(
                f"host={self.host!r} is not this machine alone: pass a token, so that not everybody who reaches it can "
                "use the model"
            )

    @property
    def base(self) -> str:
        """``upstream`` without a slash at its end."""
        return self.upstream.rstrip("/")

    @property
    def root(self) -> str:
        """Where what is outside of the API lies."""
        return self.base.removesuffix("/v1")


def _check_upstream(upstream: str) -> None:
    wrong = f"upstream={upstream!r}: it must be the URL of an API, as http://127.0.0.1:8080/v1"
    try:
        parts = urlsplit(upstream)
        port = parts.port
    except ValueError as error:
        raise ConfigurationError(f"{wrong} ({error})") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or parts.query or parts.fragment:
        raise ConfigurationError(wrong)
    if parts.username is not None or parts.password is not None:  # not to be shown, either
        raise ConfigurationError(
            f"upstream: a user in the URL of {parts.hostname} is not taken; set SMOOTHAGENT_UPSTREAM_API_KEY instead"
        )


def is_loopback(host: str) -> bool:
    """Whether an address, or a name of one, is this machine alone."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_settings(path: Path | None, given: Mapping[str, Any]) -> Settings:
    """The settings of a TOML file, and what was ``given`` beside it (`read_values`).

    Raises:
        ConfigurationError: a file that cannot be read, an unknown name, or an impossible value.
    """
    return settings_of_values(read_values(path, given))


def read_values(path: Path | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a TOML file, and what was ``given`` beside it, which comes first.

    The file has the names of `Settings`; ``[strategy]`` is a table, or an array of them for a pipeline
    (`smoothagent_gateway.strategies`), ``store`` and ``state`` are paths or URLs. A ``strategy`` that is given without
    a kind changes the file's one table.

    Raises:
        ConfigurationError: a file that cannot be read, an unknown name, or a value of another type.
    """
    values = _read(path)
    strategy = given.get("strategy")
    if isinstance(strategy, Mapping) and "kind" not in strategy and "strategy" in values:
        table = values["strategy"]
        if not isinstance(table, Mapping):
            raise ConfigurationError(f"{path} has several strategies: give their limits there")
        given = {**given, "strategy": {**cast("Mapping[str, Any]", table), **cast("Mapping[str, Any]", strategy)}}
    values |= given
    known = {f.name: f for f in dataclasses.fields(Settings)}
    unknown = sorted(values.keys() - known.keys())
    if unknown:
        raise ConfigurationError(f"{path}: unknown settings {', '.join(unknown)}: use {', '.join(sorted(known))}")
    if "upstream" not in values:
        raise ConfigurationError("no upstream: pass --upstream http://host:port/v1, the API of your model server")
    return {name: _checked(path, name, value) for name, value in values.items()}


def settings_of_values(values: Mapping[str, Any]) -> Settings:
    """The settings of what `read_values` has read.

    Raises:
        ConfigurationError: an impossible value.
    """
    told = dict(values)
    store = OffloadStore(told["store"]) if told.get("store") is not None else None
    strategy = told.pop("strategy", None)
    if strategy is None:
        raise ConfigurationError(
            "no strategy: pass --strategy summarize --hard TOKENS, or a table [strategy] in a file"
        )
    tables = cast("Sequence[Mapping[str, Any]]", [strategy] if isinstance(strategy, Mapping) else strategy)
    make, told["store"] = strategy_of(tables, store)
    return Settings(strategy=make, **told)


def _read(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is not TOML: {error}") from error


_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("upstream", "host", "token", "api_key", "dialect", "lookahead_url"), (str,)),
    **dict.fromkeys(("port", "volatile_tail", "conversations", "memory_bytes", "max_body_bytes"), (int,)),
    **dict.fromkeys(("lookahead", "warm", "ask_usage"), (bool,)),
    "idle_seconds": (int, float),
    "slots": (list, tuple),
    "session_headers": (list, tuple),
    "strategy": (Mapping, list),
    **dict.fromkeys(_PLACES, (str, Path)),
}


def _checked(path: Path | None, name: str, value: Any) -> Any:
    wanted = _TYPES[name]
    if value is None:
        return None
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        names = " or ".join(t.__name__ for t in wanted)
        raise ConfigurationError(f"{path or 'settings'}: {name}={value!r}: it must be of type {names}")
    if name == "slots":
        return tuple(cast("Sequence[int]", value))
    if name == "session_headers":
        return tuple(str(one).lower() for one in cast("Sequence[object]", value))
    return Path(str(value)).expanduser() if name == "state" else value

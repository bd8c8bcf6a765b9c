"""The subcommand ``smoothagent gateway``."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import uvicorn
from platformdirs import user_state_path

from smoothagent import BackendError, ConfigurationError, OpenAIBackend
from smoothagent_gateway.app import OWN, Gateway
from smoothagent_gateway.settings import Settings, is_loopback, read_values, settings_of_values
from smoothagent_gateway.strategies import KINDS

TOKEN = "SMOOTHAGENT_GATEWAY_TOKEN"  # noqa: S105  a variable's name
API_KEY = "SMOOTHAGENT_UPSTREAM_API_KEY"
"""Environment variables, since what stands on a command line is seen by everybody on the machine."""
_SWITCH_SECONDS = 0.0005
_CONNECTIONS = 4096
"""Connections beyond which more are answered with 503."""
_GARBAGE = (20_000, 20, 50)
"""Thresholds of the garbage collector; Python's own are 700 (2000), 10, 10."""
_SHARE = 0.75
"""The trigger as a share of the model's window, where none is told."""


def gateway(argv: Sequence[str]) -> int:
    """``smoothagent gateway``: serve until it is stopped."""
    options = _parser().parse_args(argv)
    settings = settings_of(options, dict(os.environ))
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    serve(settings)
    return 0


def serve(settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises:
        ConfigurationError: the address is taken.
    """
    # Lookahead has a thread of its own, which may keep streams waiting for so long.
    sys.setswitchinterval(_SWITCH_SECONDS)
    server = Announced(settings)
    # A look through all that conversations hold would keep every stream waiting; little of it is in cycles.
    gc.freeze()
    gc.set_threshold(*_GARBAGE)
    logging.getLogger("uvicorn.error").addFilter(_is_ours_to_say)
    try:
        server.run()
    except OSError:  # no address at all
        server.failed = True
    if server.failed:
        raise ConfigurationError(
            f"nothing can be served at {settings.host}:{settings.port}: another program is there, or it is no address "
            "of this machine; pass another --port or --host"
        )


def _is_ours_to_say(record: logging.LogRecord) -> bool:
    # That an upstream broke off is no fault of the application, which leaves the answer without an end on purpose.
    return "without completing response" not in record.getMessage()


class Announced(uvicorn.Server):
    """uvicorn's server, which says where it is once that is known.

    Attributes:
        failed: it could not start.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.failed = False
        config = uvicorn.Config(
            Gateway(settings).app,
            host=settings.host,
            port=settings.port,
            ws="none",
            log_level="warning",
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=5,
            limit_concurrency=_CONNECTIONS,
            backlog=1024,
        )
        super().__init__(config)

    async def startup(self, sockets: list[Any] | None = None) -> None:
        """As uvicorn's; and a line that says where."""
        try:
            await super().startup(sockets)
        except SystemExit:
            self.failed = True
            self.should_exit = True
            return
        for server in self.servers:
            for one in server.sockets:
                host, port = one.getsockname()[:2]
                name = f"[{host}]" if ":" in host else host
                sys.stdout.write(f"smoothagent gateway: http://{name}:{port}/v1 → {self._settings.base}\n")
                sys.stdout.write(f"                     http://{name}:{port}{OWN} shows what it does\n")
        sys.stdout.flush()


def settings_of(options: argparse.Namespace, environment: dict[str, str]) -> Settings:
    """The settings that a command line asks for.

    Raises:
        ConfigurationError: what it asks for is impossible, or the model's window is needed and not told.
    """
    given = {name: value for name, value in vars(options).items() if value is not None and name in _PLAIN}
    for name, variable in (("token", TOKEN), ("api_key", API_KEY)):
        if environment.get(variable):
            given.setdefault(name, environment[variable])
    strategy = _strategy(options)
    if strategy:
        given["strategy"] = strategy
    if options.no_lookahead:
        given["lookahead"] = False
    if options.no_state:
        given["state"] = None
    else:
        given.setdefault("state", user_state_path("smoothagent", appauthor=False) / "gateway.sqlite")
    values = read_values(options.config, given)
    if not values.get("token") and not is_loopback(values.get("host", "127.0.0.1")):
        values["token"] = secrets.token_urlsafe(24)
        sys.stdout.write(f"smoothagent gateway: the token is {values['token']} (set {TOKEN} to choose one)\n")
    table = values.get("strategy", {})
    if isinstance(table, dict):
        strategy = {"kind": "summarize", **cast("dict[str, Any]", table)}
        if strategy["kind"] == "summarize" and "hard" not in strategy:
            strategy["hard"] = _hard(values)
        values["strategy"] = strategy
    return settings_of_values(values)


_PLAIN = ("upstream", "host", "port", "lookahead_url", "volatile_tail", "state", "store", "dialect")


def _strategy(options: argparse.Namespace) -> dict[str, Any]:
    """What is told of a strategy; without its kind the file's, or the default's."""
    told = {
        name: value
        for name in ("hard", "keep", "turns", "at_turns", "tokens", "stride")
        if (value := getattr(options, name)) is not None
    }
    if options.strategy is None:
        return told
    if options.strategy == "keep-recent" and "hard" in told:
        told["at_tokens"] = told.pop("hard")
    return {"kind": options.strategy, **told}


def _hard(given: dict[str, Any]) -> int:
    upstream = given["upstream"]
    backend = OpenAIBackend(upstream, api_key=given.get("api_key") or "x")

    async def ask() -> int | None:
        try:
            return (await backend.caps()).window
        finally:
            await backend.aclose()

    try:
        window = asyncio.run(ask())
    except BackendError as error:
        raise ConfigurationError(f"{error}. (Pass --hard TOKENS to start without asking it.)") from error
    if window is None:
        raise ConfigurationError(
            f"the server at {upstream} does not tell its model's window: pass --hard TOKENS, the size at which a "
            "context is summarized"
        )
    return int(window * _SHARE)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="smoothagent gateway",
        description="An OpenAI-compatible proxy that gives any agent lookahead: point its base URL here.",
        epilog=f"Environment: {TOKEN}, what clients authorize themselves with; {API_KEY}, for the upstream.",
    )
    add = parser.add_argument
    add("--upstream", metavar="URL", help="the model server's API, as http://127.0.0.1:8080/v1")
    add("--host", metavar="ADDRESS", help="default: 127.0.0.1")
    add("--port", type=int, metavar="N", help="default: 8090")
    add("--config", type=Path, metavar="FILE", help="TOML with these settings and more; options here come first")
    add("--strategy", metavar="KIND", help=f"one of {', '.join(KINDS)}; default: summarize")
    add("--hard", type=int, metavar="TOKENS", help="the trigger; default: three quarters of the model's window")
    add("--keep", type=int, metavar="N", help="summarize: tokens that stay; offload: newest outputs that stay")
    add("--turns", type=int, metavar="N", help="keep-recent, sliding-window: turns that stay")
    add("--at-turns", type=int, metavar="N", help="keep-recent: the trigger in turns")
    add("--tokens", type=int, metavar="N", help="sliding-window: tokens that stay")
    add("--stride", type=int, metavar="N", help="sliding-window: how much it moves at once")
    add("--lookahead-url", metavar="URL", help="a second llama.cpp server with the same model, for lookahead work")
    add("--volatile-tail", type=int, metavar="N", help="last messages that change with every call; default: found out")
    add("--dialect", metavar="NAME", help="the server's kind; default: it is asked")
    add("--no-lookahead", action="store_true", help="transform at the trigger only")
    add("--store", metavar="PATH", help="offload: where outputs go; default: the user's data folder")
    add(
        "--state",
        type=Path,
        metavar="FILE",
        help="SQLite file with what a restart needs; default: the user's state folder",
    )
    add("--no-state", action="store_true", help="keep nothing")
    return parser

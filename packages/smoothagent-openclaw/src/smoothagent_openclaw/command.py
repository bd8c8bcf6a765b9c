"""The subcommand ``smoothagent openclaw``."""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from platformdirs import user_state_path

from smoothagent import ConfigurationError
from smoothagent_gateway import Settings, read_settings
from smoothagent_gateway.command import serve
from smoothagent_openclaw.changes import Plugin, changed, restored, route_in
from smoothagent_openclaw.doctor import Finding, examined
from smoothagent_openclaw.document import Document
from smoothagent_openclaw.places import (
    Remembered,
    backup_of,
    beside,
    config_path,
    digest_of,
    plugin_folder,
    read,
    recall,
    remember,
    write,
)
from smoothagent_openclaw.plugin import install, may_be_marked, remove

PORT = 8091


def openclaw(argv: Sequence[str]) -> int:
    """``smoothagent openclaw``: configure, run, doctor, unconfigure."""
    options = _parser().parse_args(argv)
    path = config_path(options.config, dict(os.environ))
    match options.what:
        case "configure":
            return configure(path, options)
        case "unconfigure":
            return unconfigure(path, dry=options.dry_run)
        case "run":
            return run(path)
        case _:
            return doctor(path)


def configure(path: Path, options: argparse.Namespace) -> int:
    """Let OpenClaw's requests go through the gateway."""
    text = read(path)
    document = Document(text, str(path))
    if recall(path) is not None:
        raise ConfigurationError(
            f"{path} is configured already: `smoothagent openclaw unconfigure` first, or `doctor` to see how"
        )
    route = route_in(document, options.provider)
    hard = route.hard if options.hard is None else options.hard
    if not 0 < hard < route.window:
        raise ConfigurationError(
            f"--hard {hard}: it must lie below the model's contextWindow, which is {route.window} tokens"
        )
    plugin = None if options.no_plugin else _plugin(path, route.provider)
    made, originals = changed(document, route, f"http://127.0.0.1:{options.port}/v1", plugin)
    _say(_difference(text, made.text, path))
    if options.dry_run:
        return 0
    shutil.copy2(path, backup_of(path))
    if plugin is not None:
        install(plugin_folder(path), plugin.provider)
    told = Remembered(
        *(route.upstream, route.provider, route.model, route.window),
        hard=hard,
        keep=options.keep,
        port=options.port,
        originals=originals,
        plugin=plugin is not None,
        digest=digest_of(made.text),
    )
    remember(path, told)  # first: what was changed and is not remembered could not be undone
    write(path, made.text)
    _say(
        f"{path}: requests to {route.provider} go through http://127.0.0.1:{options.port}/v1 to {route.upstream}, and "
        f"contexts are summarized at {hard} tokens.\n"
        f"As it was: {backup_of(path)}. Now: smoothagent openclaw run\n"
    )
    return 0


def _plugin(path: Path, provider: str) -> Plugin:
    marked = may_be_marked(provider)
    if marked is None:
        _say("openclaw is not on the path: its sessions are told apart by their messages alone\n")
    elif not marked:
        _say(f"{provider} is a plugin of OpenClaw's own: its sessions are told apart by their messages alone\n")
    return Plugin(str(plugin_folder(path)), provider if marked else None)


def unconfigure(path: Path, *, dry: bool) -> int:
    """Put back what `configure` has changed; other changes stay."""
    told = recall(path)
    if told is None:
        raise ConfigurationError(f"{path} was not configured by smoothagent: there is nothing to undo")
    text = read(path)
    made, left = _undone(path, text, told)
    _say(_difference(text, made, path))
    for place in left:
        _say(f"{place} was changed since, and is left as it is\n")
    if not dry:
        write(path, made)
        if told.plugin:
            remove(plugin_folder(path))
        beside(path).unlink()
    return 0


def _undone(path: Path, text: str, told: Remembered) -> tuple[str, list[str]]:
    """The configuration as it was; where it was changed since, with what was changed here put back."""
    backup = backup_of(path)
    if digest_of(text) == told.digest and backup.exists():
        return read(backup), []
    made, left = restored(Document(text, str(path)), told.originals)
    return made.text, left


def run(path: Path) -> int:
    """Serve OpenClaw's requests until it is stopped."""
    told = _configured(path)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    serve(settings_for(told))
    return 0


def settings_for(told: Remembered) -> Settings:
    """The gateway's settings."""
    strategy = {"kind": "summarize", "hard": told.hard} | ({} if told.keep is None else {"keep": told.keep})
    state = user_state_path("smoothagent", appauthor=False) / "openclaw.sqlite"
    # `/compact` may come long after the last turn, and finds its summary as long as the conversation is in memory.
    kept = {"idle_seconds": 86_400, "conversations": 1024}
    return read_settings(
        None, {"upstream": told.upstream, "port": told.port, "strategy": strategy, "state": str(state), **kept}
    )


def doctor(path: Path) -> int:
    """Say whether compaction is ours; status 1 where it is not."""
    findings = examined(path)
    for finding in findings:
        _say(_line(finding))
    return 0 if all(finding.fine for finding in findings) else 1


def _line(finding: Finding) -> str:
    remedy = f"\n      {finding.remedy}" if finding.remedy and not finding.fine else ""
    return f"{'ok' if finding.fine else 'NOT'}   {finding.what}{remedy}\n"


def _configured(path: Path) -> Remembered:
    told = recall(path)
    if told is None:
        raise ConfigurationError(f"{path} is not configured: `smoothagent openclaw configure` first")
    return told


def _difference(before: str, after: str, path: Path) -> str:
    names = {"fromfile": str(path), "tofile": str(path)}
    return "".join(difflib.unified_diff(before.splitlines(True), after.splitlines(True), n=2, **names))


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="smoothagent openclaw",
        description="Lookahead for OpenClaw: its requests go through a gateway that keeps their contexts in bounds.",
    )
    what = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    one = what.add_parser("configure", help="change OpenClaw's configuration, with a backup")
    one.add_argument("--provider", metavar="NAME", help="of models.providers; default: the first model's")
    one.add_argument("--port", type=int, default=PORT, metavar="N", help="the gateway's; default: %(default)s")
    one.add_argument(
        "--hard", type=int, metavar="TOKENS", help="when to summarize; default: three quarters of the window"
    )
    one.add_argument("--keep", type=int, metavar="TOKENS", help="what stays verbatim; default: a quarter of that")
    one.add_argument(
        "--no-plugin", action="store_true", help="change values only: no session ids, and OpenClaw's own /compact"
    )
    one.add_argument("--dry-run", action="store_true", help="show what would be changed")
    two = what.add_parser("unconfigure", help="put back what was changed")
    two.add_argument("--dry-run", action="store_true", help="show what would be changed")
    three = what.add_parser("run", help="serve until it is stopped")
    four = what.add_parser("doctor", help="say whether compaction is ours")
    for each in (one, two, three, four):
        each.add_argument("--config", type=Path, metavar="FILE", help="default: where OpenClaw finds it")
    return parser

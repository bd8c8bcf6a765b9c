"""Whether OpenClaw's contexts really are kept in bounds here, and what to do where they are not."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple, cast

import httpx

from smoothagent import ConfigurationError
from smoothagent_openclaw.changes import WINDOW
from smoothagent_openclaw.document import Document
from smoothagent_openclaw.places import Original, Remembered, plugin_folder, read, recall
from smoothagent_openclaw.plugin import ID, is_as_shipped

SUPPORTED = (2026, 9)
"""The releases that this was tried with: 2026.9.x."""
_SECONDS = 60


class Finding(NamedTuple):
    """One thing that was looked at.

    Attributes:
        fine: it is as it has to be.
        what: what was found.
        remedy: what to do otherwise.
    """

    fine: bool
    what: str
    remedy: str = ""


def examined(path: Path, *, client: httpx.Client | None = None) -> list[Finding]:
    """All of it, the first things first; what depends on one that is not so is left out."""
    findings = [version()]
    try:
        document, told = Document(read(path), str(path)), recall(path)
    except ConfigurationError as error:
        return [*findings, Finding(False, str(error))]
    if told is None:
        return [*findings, Finding(False, f"{path} is not configured", "smoothagent openclaw configure")]
    findings += configuration(document, told)
    if told.plugin:
        findings += plugin(document, plugin_folder(path))
    with client or httpx.Client(trust_env=False, timeout=10) as http:
        findings += gateway(http, told, marked=_marked(document) is not None)
    return findings


def version() -> Finding:
    """OpenClaw's."""
    remedy = "npm install -g openclaw@2026.9 (with Node.js >= 24.16)"
    found = shutil.which("openclaw")
    if found is None:
        return Finding(False, "there is no openclaw on the path", remedy)
    try:
        said = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(False, f"{found} does not run: {error}", remedy)
    number = re.search(r"(\d{4})\.(\d+)\.\d+", said.stdout + said.stderr)
    if number is None:
        return Finding(
            False, f"{found} --version says no version: {(said.stderr or said.stdout).strip()[:200]}", remedy
        )
    tried = (int(number[1]), int(number[2])) == SUPPORTED
    return Finding(tried, f"OpenClaw {number[0]}" + ("" if tried else ": this was tried with 2026.9.x"), remedy)


def configuration(document: Document, told: Remembered) -> list[Finding]:
    """What `configure` has written, and nobody has changed since."""
    again = "smoothagent openclaw unconfigure, then configure again"
    findings = [
        Finding(
            original.written in _listed(document, original)
            if original.item
            else document.get(original.path) == original.written,
            f"{'.'.join(map(str, original.path))} = {document.get(original.path)!r}",
            f"it was {original.written!r}: {again}",
        )
        for original in told.originals
    ]
    off = ["agents", "defaults", "compaction", "enabled"]
    if not any(original.path == off for original in told.originals):
        now = document.get(off)
        findings.append(Finding(now is False, f"{'.'.join(off)} = {now!r}", again))
    listed = document.get(["models", "providers", told.provider, "models"])
    models = cast("list[dict[str, Any]]", listed) if isinstance(listed, list) else []
    real = [str(m.get("id")) for m in models if m.get("contextWindow") != WINDOW]
    findings += [
        Finding(False, f"the model {name} of {told.provider} is told its real window, and compacts by itself", again)
        for name in real
    ]
    return findings


def _listed(document: Document, original: Original) -> list[Any]:
    now = document.get(original.path)
    return cast("list[Any]", now) if isinstance(now, list) else []


def _marked(document: Document) -> str | None:
    told = document.get(["plugins", "entries", ID, "config", "provider"])
    return told if isinstance(told, str) else None


def plugin(document: Document, folder: Path) -> list[Finding]:
    """Ours, which OpenClaw loads."""
    provider = _marked(document)
    again = "smoothagent openclaw unconfigure, then configure again"
    marks = f"marks the requests of {provider}" if provider else "marks no requests, since the provider is another's"
    findings = [Finding(is_as_shipped(folder, provider), f"the plugin in {folder} {marks}", again)]
    if document.get(["plugins", "enabled"]) is False:
        findings.append(Finding(False, "plugins.enabled = False: OpenClaw loads none", "take it out"))
    denied = document.get(["plugins", "deny"])
    if isinstance(denied, list) and ID in denied:
        findings.append(Finding(False, f"plugins.deny has {ID}: OpenClaw does not load it", "take it out"))
    return findings


def gateway(http: httpx.Client, told: Remembered, *, marked: bool) -> list[Finding]:
    """Whether it serves, what it has behind it, and what it did."""
    root = f"http://127.0.0.1:{told.port}"
    try:
        state: dict[str, Any] = http.get(f"{root}/smoothagent/state").raise_for_status().json()
    except (httpx.HTTPError, ValueError) as error:
        return [Finding(False, f"no gateway answers at {root} ({type(error).__name__})", "smoothagent openclaw run")]
    seen = sum(one["requests"] for one in state["conversations"])
    commits: dict[str, int] = state["commits"]
    findings = [Finding(True, f"the gateway at {root}: {seen} requests of {state['known']} conversations")]
    if told.plugin and marked and seen:
        known = any(one.get("named_by_client") for one in state["conversations"])
        said = "with their session ids" if known else "none with a session id"
        findings.append(Finding(known, f"OpenClaw's requests come {said}", "start OpenClaw again: it loads the plugin"))
    try:
        http.get(f"{root}/v1/models").raise_for_status()
        findings.append(Finding(True, f"the model server at {told.upstream} answers"))
    except httpx.HTTPStatusError as error:
        fine = error.response.status_code in (401, 403, 404)  # it is there; this has no key of it, or it lists nothing
        findings.append(Finding(fine, f"the model server at {told.upstream} answers {error.response.status_code}"))
    except httpx.HTTPError as error:
        findings.append(Finding(False, f"the model server at {told.upstream}: {type(error).__name__}", "start it"))
    ready, late = commits.get("hit", 0), commits.get("late", 0) + commits.get("sync", 0)
    findings.append(
        Finding(
            True,
            f"contexts shortened: {ready} were ready and warm, {late} were not" if ready + late else "none yet was due",
        )
    )
    return findings

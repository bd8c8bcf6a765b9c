"""Did the warm-up hit, and if not, what differed first?

A prefill warms the request that the next commit is predicted to send. If that request then finds its prefix
cold, either the request was another one (and the first difference says why), or the server lost the prefix.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Literal, cast

from smoothagent.prompt import Prompt
from smoothagent.quoting import may_quote
from smoothagent.serving.backend import Wire

Kind = Literal["model", "system", "tools", "params", "message", "detail"]


@dataclass(frozen=True, slots=True)
class Request:
    """What was, or will be, sent.

    Attributes:
        messages: the wire messages, in order.
        prompt: what else shapes the tokens.
        partial: the last message's text was still growing.
    """

    messages: Sequence[Wire]
    prompt: Prompt = field(default_factory=Prompt)
    partial: bool = False


@dataclass(frozen=True, slots=True)
class Difference:
    """The first thing in which a request departs from what was warmed.

    Attributes:
        kind: where it is; ``detail`` is one that most chat templates do not render (call ids, None for "").
        sentence: the finding, with at most 20 characters of either side's text, control characters escaped.
        message: the message's place in the request, counted from 0; None for the other kinds.
    """

    kind: Kind
    sentence: str
    message: int | None = None

    def __str__(self) -> str:
        return self.sentence


def first_difference(warmed: Request, actual: Request) -> Difference | None:
    """Where ``actual`` first departs from ``warmed``; None where it extends it, as it should.

    In the order of the tokens: model, parameters, system text, tools, messages; details last, since they
    seldom are the cause.
    """
    before, after = warmed.prompt, actual.prompt
    if before.model != after.model:
        return Difference("model", f"model differs: {_name(before.model)} was warmed, {_name(after.model)} is sent")
    for key in sorted({*before.params, *after.params}):
        if before.params.get(key) != after.params.get(key):
            # The key only: values may hold headers and secrets.
            return Difference("params", f"params differ: {_name(key)}")
    if (before.system or "") != (after.system or ""):
        return Difference("system", f"system text differs {_where(before.system or '', after.system or '')}")
    return _tools_difference(before.tools, after.tools) or _messages_difference(warmed, actual)


def _tools_difference(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> Difference | None:
    names_before, names_after = [_tool_name(t) for t in before], [_tool_name(t) for t in after]
    for i, (was, now) in enumerate(zip_longest(names_before, names_after)):
        if was != now:
            was_text = "nothing" if was is None else _name(was)
            now_text = "nothing" if now is None else _name(now)
            return Difference("tools", f"tools differ: tool {i} was {was_text}, now it is {now_text}")
    for i, (was, now) in enumerate(zip(before, after, strict=True)):
        # Unsorted, as templates print them: the order of the keys is in the tokens.
        left, right = json.dumps(was, default=repr), json.dumps(now, default=repr)
        if left != right:
            return Difference("tools", f"tools differ: tool {i} ({_name(names_before[i])}) {_where(left, right)}")
    return None


def _messages_difference(warmed: Request, actual: Request) -> Difference | None:
    detail: Difference | None = None
    for i, message in enumerate(warmed.messages):
        head = f"message {i} ({_plain(str(message.get('role')))[:20]})"
        if i == len(actual.messages):
            more = len(warmed.messages) - i
            return Difference("message", f"{head}: the request ends before it, {more} more were warmed", i)
        other = actual.messages[i]
        if message == other:
            continue
        growing = warmed.partial and i == len(warmed.messages) - 1
        what = _message_difference(message, other, growing)
        if what is not None:
            return Difference("message", f"{head}: {what}", i)
        what = _message_detail(message, other, growing)
        if what is not None and detail is None:
            detail = Difference("detail", f"{head}: {what}", i)
    return detail


def _message_difference(was: Wire, now: Wire, growing: bool) -> str | None:
    if was.get("role") != now.get("role"):
        return f"role differs: {_name(was.get('role'))} was warmed, {_name(now.get('role'))} is sent"
    what = _content_difference(was.get("content") or "", now.get("content") or "", growing)
    if what is None:
        what = _calls_difference(_calls(was), _calls(now))
    if what is not None or growing:
        return what
    for key in sorted({*was, *now} - {"role", "content", "tool_calls", "tool_call_id"}):
        left, right = was.get(key), now.get(key)
        if left != right and (left or right):  # an empty field is as good as absent
            return f"{_name(key)} differs {_where(_text(left), _text(right))}"
    return None


def _content_difference(was: object, now: object, growing: bool) -> str | None:
    if was == now:
        return None
    if isinstance(was, str) and isinstance(now, str):
        return None if growing and now.startswith(was) else f"content differs {_where(was, now)}"
    if isinstance(was, str) or isinstance(now, str):
        kinds = ("text", "a list of parts") if isinstance(was, str) else ("a list of parts", "text")
        return f"content was {kinds[0]}, now it is {kinds[1]}"
    return f"content differs, as JSON, {_where(_text(was), _text(now))}"


def _calls_difference(was: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> str | None:
    if len(was) != len(now):
        return f"{len(was)} tool calls were warmed, {len(now)} are sent"
    for k, (left, right) in enumerate(zip(was, now, strict=True)):
        if _tool_name(left) != _tool_name(right):
            return f"tool call {k} was {_name(_tool_name(left))}, now it is {_name(_tool_name(right))}"
        a, b = _arguments(left), _arguments(right)
        if a != b:
            return f"arguments of tool call {k} ({_name(_tool_name(left))}) differ {_where(a, b)}"
    return None


def _message_detail(was: Wire, now: Wire, growing: bool) -> str | None:
    ids = [(c.get("id"), d.get("id")) for c, d in zip(_calls(was), _calls(now), strict=True)]
    ids.append((was.get("tool_call_id"), now.get("tool_call_id")))
    for a, b in ids:
        if a != b and (a or b):
            return f"tool call id {_name(a)} became {_name(b)} (some templates render ids)"
    if not growing and was.get("content") != now.get("content"):
        return "content is empty text in one and null in the other"
    return None


# -- reading and quoting ---------------------------------------------------------------------------------------------


def _calls(message: Wire) -> Sequence[Mapping[str, Any]]:
    return cast("Sequence[Mapping[str, Any]]", message.get("tool_calls") or ())


def _function(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", entry.get("function") or entry.get("custom") or entry)


def _tool_name(entry: Mapping[str, Any]) -> str:
    return str(_function(entry).get("name") or "")


def _arguments(call: Mapping[str, Any]) -> str:
    function = _function(call)
    return _text(function.get("arguments", function.get("input", "")))


def _text(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, default=repr)


_BEFORE, _AROUND = 6, 20  # characters quoted: before the difference, and in all


def _where(was: str, now: str) -> str:
    pairs = enumerate(zip(was, now, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(was), len(now)))
    if not may_quote():
        return f"at character {at}"
    return f"at character {at}: {_quote(was, at)} was warmed, {_quote(now, at)} is sent"


def _quote(text: str, at: int) -> str:
    start = max(0, at - _BEFORE)
    piece = text[start : start + _AROUND]
    head = "…" if start else ""
    tail = "…" if start + _AROUND < len(text) else ""
    return f"'{head}{_plain(piece)}{tail}'"


def _name(value: object) -> str:
    if value is None:
        return "none"
    text = str(value)
    return f"'{_plain(text[:40])}{'…' if len(text) > 40 else ''}'"


def _plain(text: str) -> str:
    # Message text is untrusted: no line breaks, terminal or bidirectional controls in a log line.
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


# -- the tracker -----------------------------------------------------------------------------------------------------

_REPORT_FLAG: Mapping[str, str] = {
    "sglang": "start it with --enable-cache-report",
    "vllm": "start it with --enable-prompt-tokens-details",
    "llama.cpp": "a build of 2025 or newer reports them",
}

_BLOCK = 64
"""Tokens. Servers cache whole blocks (16–64 tokens): less than one says nothing about a hit."""


class Fidelity:
    """Follows the commits of one conversation and says, once, when warming does not pay.

    Args:
        server: the server's kind, as `smoothagent.serving.backend.Caps` names it.

    Attributes:
        commits: commits whose cached tokens were known and worth judging.
        cold: those that found less than half of what was warmed.
        cold_run: consecutive cold commits up to now.
        last_ratio: cached ÷ warmed tokens of the last judged commit (may exceed 1), or None.
    """

    def __init__(self, server: str = "unknown") -> None:
        self.server = server
        self.commits = 0
        self.cold = 0
        self.cold_run = 0
        self.last_ratio: float | None = None
        self._said: set[str] = set()

    @property
    def warming_pays(self) -> bool:
        """False after four cold commits in a row: more warming would only load the server (vllm#54360)."""
        return self.cold_run < 4

    def observe_commit(
        self, warmed_tokens: int, cached_tokens: int | None, difference: Difference | None
    ) -> str | None:
        """Judge the first request after a commit.

        Args:
            warmed_tokens: tokens of its prefix that were warmed.
            cached_tokens: prompt tokens the server found in its cache; None where it does not say.
            difference: the request's first difference from what was warmed.

        Returns:
            A sentence to log as WARNING, each kind once; else None.
        """
        if warmed_tokens < _BLOCK:
            return None
        if cached_tokens is None:
            return self._once("unreported", self._unreported)
        self.commits += 1
        self.last_ratio = cached_tokens / warmed_tokens
        if cached_tokens >= 0.5 * warmed_tokens:
            self.cold_run = 0
            return None
        self.cold += 1
        self.cold_run += 1
        if self.cold_run == 2:
            return self._once("cold", lambda: _cold(warmed_tokens, cached_tokens, difference))
        if not self.warming_pays:
            return self._once("off", self._off)
        return None

    def _once(self, topic: str, sentence: Callable[[], str]) -> str | None:
        if topic in self._said:
            return None
        self._said.add(topic)
        return sentence()

    def _unreported(self) -> str:
        remedy = _REPORT_FLAG.get(self.server, "it needs usage.prompt_tokens_details.cached_tokens")
        return (
            "the server reported no cached tokens where there should be some, so nobody can tell whether warm-ups hit: "
            f"{remedy}; if that is so, see that its prefix cache is on"
        )

    def _off(self) -> str:
        return f"warming is off for this conversation: {self.cold_run} commits in a row found their prefix cold"


def _cold(warmed: int, cached: int, difference: Difference | None) -> str:
    head = f"two commits in a row were cold ({cached} of {warmed} warmed tokens cached): "
    if difference is None:
        return head + (
            "the messages sent extend those warmed, so the calls have tools or a system text that the Prompt does not "
            "name, the server evicted them (cache too small, other requests), or its chat template renders earlier "
            "messages anew (reasoning, tool results)"
        )
    if difference.kind == "detail":
        return head + f"the only difference is in {difference.sentence}; otherwise the server evicted the prefix"
    return head + f"the request differs from what was warmed: {difference.sentence}"

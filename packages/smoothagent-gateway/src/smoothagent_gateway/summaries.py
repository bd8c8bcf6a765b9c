"""A summary of what a harness is about to compact itself: the one that its conversation has here, or a new one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from smoothagent import (
    BackendError,
    CommitRecord,
    MainRequest,
    OpenAIBackend,
    OpenAICodec,
    Pipeline,
    SmoothAgentError,
    Summarize,
    SummaryRejectedError,
)
from smoothagent.model import checked
from smoothagent.request import Aside
from smoothagent_gateway.alignment import Aligned, aligned, text_of
from smoothagent_gateway.asgi import Receive, RefusedError, Scope, Send, read_body, respond, while_connected
from smoothagent_gateway.credentials import AsClient
from smoothagent_gateway.sessions import Session, Sessions, Wire
from smoothagent_gateway.settings import Settings

_EACH = 2_000
"""Characters of a message that are repeated whole; of a longer one its beginning and end."""
_ALL = 16_000
"""Characters of all that follows a summary verbatim; what is longer is summarized, too."""
_SYSTEM = ("system", "developer")


class Asked(NamedTuple):
    """What is asked for.

    Attributes:
        messages: what is to be summarized, in OpenAI's form, without system text.
        session: what its requests call the conversation; None where they do not.
        question: how; None takes what there is.
    """

    messages: list[Wire]
    session: str | None
    question: str | None


class Summaries:
    """``POST /smoothagent/summary``: ``{"messages": […]}`` → ``{"summary": "…", "kind": "ready"}``.

    A harness that compacts by itself after all asks here instead of the model. Where the strategy has summarized the
    conversation ahead of time, the answer is that summary, and what came after it, shortened (``ready``). Where that is
    too much, or a ``question`` is asked, the model is asked after the conversation as it was last sent to it, which the
    server has in its cache (``written``). A ``session`` is what the harness calls the conversation in its requests.

    Args:
        settings: the gateway's.
        backend: the model server.
        sessions: the conversations.
    """

    def __init__(self, settings: Settings, backend: OpenAIBackend, sessions: Sessions) -> None:
        self._settings, self._backend, self._sessions = settings, backend, sessions
        self._strategy = _summarizing(settings.strategy()) or Summarize(1 << 20)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one. Raises RefusedError, GoneError."""
        data = await read_body(scope, receive, self._settings.max_body_bytes)
        await while_connected(receive, self._answer(send, asked_in(data)))

    async def _answer(self, send: Send, asked: Asked) -> None:
        sessions = self._sessions.all()[::-1]
        named = [s for s in sessions if asked.session is not None and s.space.name == asked.session]
        try:
            found = await asyncio.to_thread(_found, [named, sessions], asked.messages)
        except (SmoothAgentError, AttributeError, TypeError, ValueError) as error:
            raise RefusedError(400, f"the messages are no history ({type(error).__name__})", "invalid_body") from error
        if found is None:
            raise RefusedError(
                404,
                "no conversation with these messages is known here: it was not used since the gateway was started, "
                "or for too long",
                "unknown_conversation",
            )
        text = None if asked.question else self._ready(found, asked.messages)
        kind = "ready" if text else "written"
        if text is None:
            text = await self._written(found, asked)
        told = {"summary": text, "kind": kind, "conversation": found.session.name}
        headers = {"content-type": "application/json", "cache-control": "no-store"}
        await respond(send, 200, json.dumps(told).encode("utf-8", "surrogatepass"), headers)

    def _ready(self, found: Aligned, messages: Sequence[Wire]) -> str | None:
        """The strategy's summary, and what it does not hold; None where there is none, or that is too much."""
        record = _record_of(found)
        if record is None or not any(self._is_summary(m) for m in record.head):
            return None
        if record.covered > found.pairs[-1][0] + 1 and found.rest < len(messages):
            return None  # both go on after the last that they have in common: it is another branch's
        covered = found.covered(record.covered)
        missing = [*(i for i in found.strangers if i < covered), *range(covered, len(messages))]
        since = [_shortened(messages[i], _EACH) for i in missing]
        if sum(map(len, since)) > _ALL:
            return None
        return _paragraphs([text_of(m) for m in record.head if m.get("role") not in _SYSTEM], since)

    def _is_summary(self, message: Wire) -> bool:
        return message.get("role") == "user" and text_of(message).startswith(self._strategy.prefix)

    async def _written(self, found: Aligned, asked: Asked) -> str:
        """The model's answer to the question. Raises RefusedError where there is none."""
        session, strategy, record = found.session, self._strategy, _record_of(found)
        view = session.runtime.view(found.seen)
        end = found.end - (len(found.seen) - len(view))  # the view ends as the history does
        end = max(end, 0 if record is None else len(record.head))
        question = {"role": "user", "content": asked.question or strategy.question}
        backend = AsClient(self._backend, session.space.credentials)
        try:
            # Somebody waits for it: it goes before all that is only prepared.
            async with MainRequest(Aside(backend, "gateway")):
                answer = await backend.generate(
                    *(session.name, [*view[:end], question], session.prompt),
                    max_tokens=strategy.max_tokens,
                    lookahead=False,
                )
            text = checked(answer, strategy.max_tokens, accept_cut_off=True)
        except (BackendError, SummaryRejectedError) as error:
            raise RefusedError(502, f"the model wrote no summary ({type(error).__name__})", "no_summary") from error
        # What the model was not sent yet: the newest answer, mostly.
        missing = [*found.strangers, *range(found.rest, len(asked.messages))]
        each = min(_EACH, _ALL // max(1, len(missing)))
        return _paragraphs([text], [_shortened(asked.messages[i], each) for i in missing])


def _found(ways: Sequence[Sequence[Session]], messages: Sequence[Wire]) -> Aligned | None:
    found = (aligned([(s, s.seen) for s in sessions], messages) for sessions in ways)
    return next((f for f in found if f is not None), None)


def _record_of(found: Aligned) -> CommitRecord[Wire] | None:
    """The commit that stands for the beginning of the conversation."""
    record, chain = found.session.runtime.record, found.session.chain
    return record if record is not None and record.digest in chain[record.covered - 1 : record.covered] else None


def _paragraphs(head: Sequence[str], since: Sequence[str]) -> str:
    return "\n\n".join([*head, *(["Since then:", *since] if since else [])])


def asked_in(data: bytes) -> Asked:
    """What a request's body asks for. Raises RefusedError where that cannot be read."""
    try:
        body: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, "the body is not JSON", "invalid_body") from error
    told = cast("dict[str, Any]", body) if isinstance(body, dict) else {}
    given = told.get("messages")
    if not isinstance(given, list) or not all(isinstance(m, dict) for m in cast("list[Any]", given)):
        raise RefusedError(400, 'no messages: send {"messages": [...]} as in a chat completion', "invalid_body")
    messages = [m for m in cast("list[Wire]", given) if m.get("role") not in _SYSTEM]
    if not messages:
        raise RefusedError(400, "no messages but system text: there is nothing to summarize", "invalid_body")
    for name in ("session", "question"):
        if not isinstance(told.get(name), str | None):
            raise RefusedError(400, f"{name}: it must be a text", "invalid_body")
    return Asked(messages, told.get("session"), told.get("question"))


def _shortened(message: Wire, most: int) -> str:
    """A message as a paragraph, who says it first."""
    decoded = OpenAICodec().decode(message)
    calls = [f"[calls {c.name} {_cut(c.arguments, most)}]" for c in decoded.tool_calls]
    return f"{decoded.role}: {' '.join([p for p in (_cut(decoded.text, most), *calls) if p])}"


def _cut(text: str, most: int) -> str:
    left = len(text) - most
    return text if left <= 0 else f"{text[: most // 2]} [… {left} characters …] {text[len(text) - most // 2 :]}"


def _summarizing(strategy: object) -> Summarize | None:
    stages = (*strategy.front, strategy.last) if isinstance(strategy, Pipeline) else (strategy,)
    return next((s for s in stages if isinstance(s, Summarize)), None)

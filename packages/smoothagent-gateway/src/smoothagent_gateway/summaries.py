"""A summary of what a harness is about to compact itself: the one that its conversation has here, or a new one."""

from __future__ import annotations

import asyncio
import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from smoothagent import (
    BackendError,
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
from smoothagent_gateway.asgi import Receive, RefusedError, Scope, Send, read_body, respond, while_connected
from smoothagent_gateway.credentials import AsClient
from smoothagent_gateway.sessions import Session, Sessions, Wire
from smoothagent_gateway.settings import Settings

_END = 200
"""Characters at the end of a text by which it is known: harnesses put the time before it."""
_EACH = 2_000
"""Characters of a message that are repeated whole; of a longer one its beginning and end."""
_ALL = 16_000
"""Characters of all that follows a summary verbatim; what is longer is summarized, too."""
_SYSTEM = ("system", "developer")
_CODEC = OpenAICodec()


class Asked(NamedTuple):
    """What is asked for.

    Attributes:
        messages: what is to be summarized, in OpenAI's form, without system text.
        question: how; None takes what there is.
    """

    messages: list[Wire]
    question: str | None


@dataclass(frozen=True, slots=True)
class Found:
    """A conversation, and what of it is asked for.

    Attributes:
        session: the conversation.
        pairs: which of its messages is which of the given ones; both grow.
    """

    session: Session
    pairs: list[tuple[int, int]]


class Summaries:
    """``POST /smoothagent/summary``: ``{"messages": […], "question": "…"}`` → ``{"summary": "…", "kind": "ready"}``.

    A harness that compacts by itself after all asks here instead of the model. Where the strategy has summarized the
    conversation ahead of time, the answer is that summary, and what came after it, shortened (``ready``). Where that is
    too much, or a ``question`` is asked, the model is asked after the conversation as it was last sent to it, which the
    server has in its cache (``written``).

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
        seen = [(s, s.seen) for s in self._sessions.all()]
        try:
            found = await asyncio.to_thread(found_in, seen, asked.messages)
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

    def _ready(self, found: Found, messages: Sequence[Wire]) -> str | None:
        """The strategy's summary, and what came after it; None where there is none, or that is too much."""
        record = found.session.runtime.record
        if record is None or not any(self._is_summary(m) for m in record.head):
            return None
        covered = max((mine for its, mine in found.pairs if its < record.covered), default=-1) + 1
        after = [_shortened(m) for m in messages[covered:]]
        if sum(map(len, after)) > _ALL:
            return None
        head = [_text(m) for m in record.head if m.get("role") not in _SYSTEM]
        since = ["Since then:", *after] if after else []
        return "\n\n".join([*head, *since])

    def _is_summary(self, message: Wire) -> bool:
        return message.get("role") == "user" and _text(message).startswith(self._strategy.prefix)

    async def _written(self, found: Found, asked: Asked) -> str:
        """The model's answer to the question. Raises RefusedError where there is none."""
        session, strategy = found.session, self._strategy
        seen, end = session.seen, found.pairs[-1][0] + 1
        while end < len(seen) and seen[end].get("role") == "tool":
            end += 1  # no call without its result
        view = session.runtime.view(seen)
        end = max(0, end - (len(seen) - len(view)))  # the view ends as the history does
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
            return checked(answer, strategy.max_tokens, accept_cut_off=True)
        except (BackendError, SummaryRejectedError) as error:
            raise RefusedError(502, f"the model wrote no summary ({type(error).__name__})", "no_summary") from error


def asked_in(data: bytes) -> Asked:
    """What a request's body asks for. Raises RefusedError where that cannot be read."""
    try:
        body: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, "the body is not JSON", "invalid_body") from error
    told = cast("dict[str, Any]", body) if isinstance(body, dict) else {}
    given, question = told.get("messages"), told.get("question")
    if not isinstance(given, list) or not all(isinstance(m, dict) for m in cast("list[Any]", given)):
        raise RefusedError(400, 'no messages: send {"messages": [...]} as in a chat completion', "invalid_body")
    messages = [m for m in cast("list[Wire]", given) if m.get("role") not in _SYSTEM]
    if not messages:
        raise RefusedError(400, "no messages but system text: there is nothing to summarize", "invalid_body")
    if question is not None and not isinstance(question, str):
        raise RefusedError(400, "question: it must be a text", "invalid_body")
    return Asked(messages, question)


def found_in(conversations: Sequence[tuple[Session, list[Wire]]], messages: Sequence[Wire]) -> Found | None:
    """The conversation that has most of these messages, the newest of several; None where none has half of them.

    A harness gives them as it keeps them, which is not quite as it sends them: times stand before a user's texts, ids
    of calls are written otherwise, and what it adds to a request is missing.

    Args:
        conversations: each with its messages, the newest last.
        messages: those to look for.
    """
    wanted = [_key(m) for m in messages]
    best: Found | None = None
    for session, seen in reversed(conversations):
        matcher = difflib.SequenceMatcher(None, [_key(m) for m in seen], wanted, autojunk=False)
        pairs = [(b.a + i, b.b + i) for b in matcher.get_matching_blocks() for i in range(b.size)]
        if 2 * len(pairs) >= len(wanted) and (best is None or len(pairs) > len(best.pairs)):
            best = Found(session, pairs)
    return best


def _key(message: Wire) -> tuple[str, ...]:
    """By what a message is known: a result and calls by their ids, else the end of its text."""
    role = str(message.get("role"))
    if role == "tool":
        return (role, _letters(message.get("tool_call_id")))
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        ids = (cast("dict[str, Any]", c).get("id") for c in cast("list[Any]", calls) if isinstance(c, dict))
        return (role, *map(_letters, ids))
    return (role, "", " ".join(_text(message).split())[-_END:])


def _letters(value: object) -> str:
    return "".join(c for c in str(value) if c.isalnum())


def _text(message: Wire) -> str:
    return _CODEC.decode(message).text


def _shortened(message: Wire) -> str:
    """A message as a paragraph, who says it first."""
    decoded = _CODEC.decode(message)
    calls = [f"[calls {c.name} {_cut(c.arguments)}]" for c in decoded.tool_calls]
    return f"{decoded.role}: {' '.join([p for p in (_cut(decoded.text), *calls) if p])}"


def _cut(text: str) -> str:
    left = len(text) - _EACH
    return text if left <= 0 else f"{text[: _EACH // 2]} [… {left} characters …] {text[-_EACH // 2 :]}"


def _summarizing(strategy: object) -> Summarize | None:
    stages = (*strategy.front, strategy.last) if isinstance(strategy, Pipeline) else (strategy,)
    return next((s for s in stages if isinstance(s, Summarize)), None)

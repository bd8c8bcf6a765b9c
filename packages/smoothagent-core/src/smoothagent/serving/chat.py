"""What goes into a lookahead request, and what may be made of its answer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from smoothagent.prompt import Prompt
from smoothagent.serving.backend import Wire

ROUTING = frozenset({"id_slot", "cache_prompt", "rid", "priority", "custom_params", "extra_headers", "extra_query"})
"""Fields that say where a main request goes; lookahead requests set their own."""
ANSWER = frozenset(
    {
        *("max_tokens", "max_completion_tokens", "n_predict", "stream", "stream_options", "n", "logprobs"),
        *("top_logprobs", "tool_choice", "store", "metadata", "user", "prediction", "return_progress", "timeout"),
    }
)
"""Fields about the answer that a lookahead request decides itself."""
SAMPLING = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "frequency_penalty", "presence_penalty"),
        *("repetition_penalty", "repeat_penalty", "logit_bias", "ignore_eos"),
    }
)
"""Fields about sampling: of no use to a request that only prefills."""

MARKUP = re.compile(
    r"<tool_call>|<\|python_tag\|>|\[TOOL_CALLS\]|<function=|<\|tool_calls?_|<｜tool▁calls|<\|channel\|>commentary to="
    r"|\A\s*(?:```(?:json)?\s*)?[\[{]\s*\"(?:name|function|tool)\"\s*:",
)
"""How models write tool calls where no parser takes them out of the text."""

THOUGHT = re.compile(r"\A\s*(?:<think>)?.*?</think>\s*", re.DOTALL)


def conversation(messages: Sequence[Wire], prompt: Prompt) -> list[dict[str, Any]]:
    """The messages as sent: the system text that a framework keeps apart comes first."""
    head: list[dict[str, Any]] = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
    return [*head, *(dict(m) for m in messages)]


def fields(prompt: Prompt, *, sampling: bool) -> dict[str, Any]:
    """Request fields besides model and messages: tools and what of ``prompt.params`` shapes the tokens."""
    params = dict(prompt.params)
    extra = params.pop("extra_body", None)
    if isinstance(extra, Mapping):
        params.update(cast("Mapping[str, Any]", extra))
    drop = ROUTING | ANSWER | (frozenset[str]() if sampling else SAMPLING)
    out = {k: v for k, v in params.items() if k not in drop}
    if prompt.tools:
        out["tools"] = [dict(t) for t in prompt.tools]
    return out


def calls_tools(text: str) -> bool:
    """Whether an answer's text is, or contains, the markup of a tool call."""
    return MARKUP.search(text) is not None


def without_thoughts(text: str, *, opened: bool = False) -> str | None:
    """The answer after its reasoning; None where the reasoning never ended.

    Args:
        text: what the model wrote.
        opened: the prompt already ended inside a ``<think>`` block.
    """
    if "</think>" in text and (opened or text.lstrip().startswith("<think>")):
        return THOUGHT.sub("", text, count=1)
    return None if opened or text.lstrip().startswith("<think>") else text


def text_of(message: Wire) -> str | None:
    """A message's text where it can be cut anywhere: plain string content."""
    content = message.get("content")
    return content if isinstance(content, str) else None


def with_text(message: Wire, text: str) -> dict[str, Any]:
    """The message with other text."""
    return {**message, "content": text}

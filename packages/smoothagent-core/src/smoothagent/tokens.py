"""How many tokens a message costs: a local tokenizer, or an estimate that the server's usage calibrates.

All that is sent is counted: system text, tool definitions, calls with their arguments, the template's
scaffolding around each message (langchain#34664). A counter keeps no messages; the caller counts each
message once and keeps the number (deepagents#1530).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from smoothagent.errors import ConfigurationError
from smoothagent.message import Message, sent_back
from smoothagent.prompt import Prompt

MEDIA_TOKENS = 800
"""What one image, audio clip or file is taken to cost: a 1024×1024 image is 765 tokens on GPT-4o and ~1,300 on
Qwen2-VL. Its base64 text is never counted."""

_MESSAGE = 5  # <|im_start|>role\n … <|im_end|>\n ; Llama 3's headers cost the same
_CALL = 10  # <tool_call>\n{"name": "…", "arguments": …}\n</tool_call>
_TOOLS = 50  # the sentences a template writes around the tool definitions


@runtime_checkable
class TokenCounter(Protocol):
    """Counts tokens. Pure given its calibration; callable from any thread."""

    def count(self, message: Message) -> int:
        """Tokens of one message with the template's scaffolding around it, calls and arguments included."""
        ...

    def fixed(self, prompt: Prompt) -> int:
        """Tokens sent with every request besides the messages: the system text and the tool definitions."""
        ...


class EstimateCounter:
    """Estimates tokens from the kinds of characters, and learns the model's own rate from usage.

    The weights were fitted to cl100k, o200k and SmolLM2: within 5% on Python and prose for the first two and within
    26% for each on JSON and logs, where tokenizers disagree about digits. On other scripts tokenizers differ by
    2–4×; the weights lie near cl100k there, so that Chinese, Japanese and Korean are not undercounted 2× before the
    first usage arrives (langchain#39754); SmolLM2, made for English, needs that usage.
    """

    def __init__(self) -> None:
        # One float, replaced whole: two threads that observe at once lose one observation, never consistency.
        self._factor: float | None = None

    @property
    def factor(self) -> float:
        """What estimates are multiplied by; a number counted at factor f is now worth number × factor / f."""
        return 1.0 if self._factor is None else self._factor

    @property
    def calibrated(self) -> bool:
        """Whether a server's usage has been seen."""
        return self._factor is not None

    def count(self, message: Message) -> int:
        """Estimated tokens of one message (about 2 µs for 500 ASCII characters, 5 µs for others)."""
        content = message.content
        if isinstance(content, str) and not message.tool_calls and message.name is None and not message.extra:
            raw = _MESSAGE + _weigh(content)
        else:
            raw = _MESSAGE + _CALL * len(message.tool_calls) + _media(message) + sum(map(_weigh, _texts(message)))
        return math.ceil(raw * self.factor)

    def fixed(self, prompt: Prompt) -> int:
        """Estimated tokens of the system text and the tool definitions."""
        return math.ceil(sum(map(_weigh, _fixed_texts(prompt)), _fixed_overhead(prompt, _MESSAGE)) * self.factor)

    def observe(self, estimated: int, actual: int) -> None:
        """Calibrate with one request.

        Args:
            estimated: tokens of the whole request as this counter counts it now.
            actual: prompt tokens that the server reported for it.

        Requests below 32 tokens say more about the template than about text and are ignored. The first
        observation sets the factor; later ones move it by at most 10%, so that an odd one (an image,
        a text the server adds) does not throw the trigger off. The factor stays within 0.25–4.
        """
        if estimated < 32 or actual <= 0:
            return
        seen = self.factor * actual / estimated
        if self._factor is not None:
            step = math.log(seen / self._factor)
            seen = self._factor * math.exp(0.3 * max(-0.33, min(0.33, step)))
        self._factor = max(0.25, min(4.0, seen))


class FunctionCounter:
    """Counts with a local tokenizer, given as a function from a text to its number of tokens.

    ``FunctionCounter(lambda text: len(encoding.encode(text, disallowed_special=())))`` for tiktoken,
    ``FunctionCounter(lambda text: len(tokenizer.encode(text, add_special_tokens=False)))`` for transformers.

    Args:
        fn: text → tokens. Never sees lone surrogates, which tokenizers refuse.
        per_message: tokens that the chat template adds to each message.

    Raises:
        ConfigurationError: ``per_message`` is negative.
    """

    def __init__(self, fn: Callable[[str], int], per_message: int = 4) -> None:
        if per_message < 0:
            raise ConfigurationError(f"per_message={per_message}: use 0 or more")
        self._fn = fn
        self._per_message = per_message

    def count(self, message: Message) -> int:
        """Tokens of one message; whatever ``fn`` raises passes through."""
        calls = _CALL * len(message.tool_calls)
        return self._per_message + calls + _media(message) + sum(map(self._tokens, _texts(message)))

    def fixed(self, prompt: Prompt) -> int:
        """Tokens of the system text and the tool definitions; whatever ``fn`` raises passes through."""
        return sum(map(self._tokens, _fixed_texts(prompt)), _fixed_overhead(prompt, self._per_message))

    def _tokens(self, text: str) -> int:
        return self._fn(text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8"))


# -- what of a message is text, and what has a price of its own ------------------------------------------------------

_MEDIA = ("image", "input_image", "audio", "input_audio", "video", "file", "input_file")


def _is_media(part: Mapping[str, Any]) -> bool:
    return str(part.get("type", "")).startswith(_MEDIA)


def _media(message: Message) -> int:
    if not isinstance(message.content, tuple):
        return 0
    return MEDIA_TOKENS * sum(map(_is_media, message.content))


def _texts(message: Message) -> Iterator[str]:
    if message.name is not None:
        yield message.name
    content = message.content
    if isinstance(content, str):
        yield content
    elif content is not None:
        for part in content:
            text = part.get("text")
            if isinstance(text, str):
                yield text
            elif not _is_media(part):
                yield json.dumps(part, default=repr)
    for call in message.tool_calls:
        yield call.name
        yield call.arguments
    for value in sent_back(message) if message.extra else ():
        if value:
            yield value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=repr)


def _fixed_texts(prompt: Prompt) -> Iterator[str]:
    if prompt.system:
        yield prompt.system
    for tool in prompt.tools:
        # Templates print definitions with ``tojson``: the default separators, text unescaped.
        yield json.dumps(tool, ensure_ascii=False, default=repr)


def _fixed_overhead(prompt: Prompt, per_message: int) -> int:
    return (per_message if prompt.system else 0) + (_TOOLS if prompt.tools else 0)


# -- the estimate ----------------------------------------------------------------------------------------------------
#
# The UTF-8 bytes are mapped to classes and the classes counted, all in C. A lead byte tells the script well enough.

_UPPER, _MARK, _DIGIT, _LATIN, _TWO_BYTE, _THREE_BYTE, _FOUR_BYTE, _SPACE = range(8)
_LOWER = 8
_WEIGHTS = {
    _LOWER: 0.21,
    _UPPER: 0.35,
    _SPACE: 0.05,  # merges into the word after it, or into one run
    _MARK: 0.57,
    _DIGIT: 1.0,  # a token each for Qwen, Llama 2 and SmolLM2; line ends and control characters cost the same
    _LATIN: 0.9,  # accented letters: each breaks the word it stands in
    _TWO_BYTE: 0.65,  # Greek, Cyrillic, Hebrew, Arabic
    _THREE_BYTE: 1.1,  # Chinese, Japanese, Korean; Indic scripts, Thai; typographic signs
    _FOUR_BYTE: 2.5,  # emoji
}


def _class(byte: int) -> int:
    if byte < 0x80:
        char = chr(byte)
        if char.isalpha():
            return _LOWER if char.islower() else _UPPER
        if char == " ":
            return _SPACE
        return _MARK if char == "\t" or (char.isprintable() and not char.isdigit()) else _DIGIT
    return _LATIN if byte < 0xCE else _TWO_BYTE if byte < 0xE0 else _THREE_BYTE if byte < 0xF0 else _FOUR_BYTE


_CLASSES = bytes(map(_class, range(256)))
_NOT_ASCII = bytes(range(0x80, 0x100))
_NOT_LEAD = bytes(range(0xC0))


def _weigh(text: str) -> float:
    """Uncalibrated tokens of a text; additive, and linear in its length."""
    if text.isascii():
        return _weigh_ascii(text.encode())
    raw = text.encode("utf-8", "surrogatepass")
    leads = raw.translate(_CLASSES, _NOT_LEAD)
    total = _weigh_ascii(raw.translate(None, _NOT_ASCII))
    for kind in (_LATIN, _TWO_BYTE, _THREE_BYTE, _FOUR_BYTE):
        total += _WEIGHTS[kind] * leads.count(kind)
    return total


def _weigh_ascii(raw: bytes) -> float:
    kinds = raw.translate(_CLASSES)
    upper, mark, digit, space = kinds.count(_UPPER), kinds.count(_MARK), kinds.count(_DIGIT), kinds.count(_SPACE)
    lower = len(raw) - upper - mark - digit - space
    # Spelled out: a sum over the table costs as much as the counting.
    return 0.21 * lower + 0.35 * upper + 0.05 * space + 0.57 * mark + 1.0 * digit

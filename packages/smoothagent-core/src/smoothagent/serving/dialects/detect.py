"""Which server is it?"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from smoothagent.errors import (
    BackendError,
    BackendProtocolError,
    BackendRefusedError,
    BackendUnreachableError,
    ConfigurationError,
    RateLimitedError,
)
from smoothagent.serving.connection import Connection, expect_object
from smoothagent.serving.dialects.base import Dialect, Options, mapping, rows
from smoothagent.serving.dialects.hosted import Hosted
from smoothagent.serving.dialects.llamacpp import LlamaCpp
from smoothagent.serving.dialects.sglang import SGLang
from smoothagent.serving.dialects.vllm import VLLM

DIALECTS: Mapping[str, type[Dialect]] = {
    "llama.cpp": LlamaCpp,
    "sglang": SGLang,
    "vllm": VLLM,
    "openai": Hosted,
}
PROBE_TIMEOUT = 20.0


async def detect(link: Connection, options: Options, name: str) -> Dialect:
    """The server's dialect, probed and ready.

    Raises:
        BackendError: nothing answers, or what answers does not speak the OpenAI API.
        ConfigurationError: the model or the slots named do not exist.
    """
    hosted = name == "openai" or (name == "auto" and is_hosted(link.base_url))
    served = await _models(link, forgiving=hosted)
    if name != "auto":
        kind = DIALECTS[name]
    elif hosted:
        kind = Hosted
    else:
        kind = await _recognise(link)
    if options.lookahead is not None and kind is not LlamaCpp:
        raise ConfigurationError(
            f"lookahead_url={options.lookahead.base_url!r} needs llama.cpp, whose slots can be handed from server to "
            f"server; {link.base_url} is {kind.server}: leave it out"
        )
    dialect = kind(link, options, served)
    try:
        await dialect.probe()
    except BackendRefusedError as error:
        if isinstance(error, RateLimitedError) or name == "auto":
            raise
        raise BackendProtocolError(
            f"{link.base_url} does not answer as {name} does ({error}); leave dialect='auto' or correct base_url"
        ) from error
    return dialect


def is_hosted(url: str) -> bool:
    """Whether a URL is a known paid endpoint: nothing but the API itself is asked of those."""
    host = urlsplit(url).hostname or ""
    return host.endswith(("openai.com", "openai.azure.com", "openrouter.ai"))


async def _models(link: Connection, *, forgiving: bool) -> list[str]:
    try:
        answer = expect_object(await link.get("/models", timeout=PROBE_TIMEOUT), f"GET {link.base_url}/models")
        if not isinstance(answer.get("data"), list):
            raise BackendProtocolError(f"GET {link.base_url}/models answered without a list of models")
    except BackendUnreachableError:
        raise
    except BackendError as error:
        if forgiving:
            return []
        if isinstance(error, BackendRefusedError) and error.status in (401, 403, 429, 503):
            raise
        raise BackendProtocolError(
            f"{link.base_url} does not speak the OpenAI API ({error}). base_url usually ends in /v1."
        ) from error
    return [str(m["id"]) for m in rows(answer["data"]) if "id" in m]


async def _recognise(link: Connection) -> type[Dialect]:
    props = await _try(link, "~/props")
    if "total_slots" in props or "default_generation_settings" in props:
        return LlamaCpp
    if await SGLang.info(link):
        return SGLang
    if "version" in await _try(link, "~/version"):
        return VLLM
    return Hosted


async def _try(link: Connection, path: str) -> Mapping[str, object]:
    try:
        return mapping(await link.get(path, timeout=PROBE_TIMEOUT))
    except RateLimitedError:
        raise
    except (BackendRefusedError, BackendProtocolError):
        return {}

"""An openai client whose chat completions are main requests."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any, Self, TypeVar, cast

from smoothagent.request import MainRequest

C = TypeVar("C")

_PATH = ("chat", "completions")


RequestFor = Callable[[Mapping[str, Any]], MainRequest]
"""The request that a call with these keyword arguments is."""


def wrap(client: C, request_for: RequestFor) -> C:
    """A proxy of ``client`` whose ``chat.completions.create`` and ``parse`` mark, pace and measure each call.

    Works for ``OpenAI`` and ``AsyncOpenAI``, streaming or not, also under ``beta``; everything else is the client's
    own, among it ``chat.completions.stream``, ``with_raw_response`` and ``responses``, which go out unmarked.
    Answers, chunks and errors come through unchanged.
    """
    return cast("C", _Proxy(client, _PATH, request_for))


class _Proxy:
    def __init__(self, target: Any, path: tuple[str, ...], request_for: RequestFor) -> None:
        self._target, self._path, self._request_for = target, path, request_for

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if self._path and name == self._path[0]:
            return _Proxy(value, self._path[1:], self._request_for)
        if not self._path and name in ("create", "parse"):
            return _create(value, self._request_for)
        if self._path == _PATH and name == "beta":
            return _Proxy(value, _PATH, self._request_for)
        if self._path == _PATH and name in ("with_options", "copy"):
            return self._copying(value)
        return value

    def _copying(self, copy: Callable[..., Any]) -> Callable[..., Any]:
        def copied(*args: Any, **kwargs: Any) -> Any:
            return wrap(copy(*args, **kwargs), self._request_for)

        return copied

    # Python looks these up on the class, where ``__getattr__`` is not asked.
    def __enter__(self) -> Self:
        self._target.__enter__()
        return self

    def __exit__(self, *error: object) -> Any:
        return self._target.__exit__(*error)

    async def __aenter__(self) -> Self:
        await self._target.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> Any:
        return await self._target.__aexit__(*error)


def _create(create: Callable[..., Any], request_for: RequestFor) -> Callable[..., Any]:
    async def acreate(*args: Any, **kwargs: Any) -> Any:
        request = request_for(kwargs)
        await request.__aenter__()
        return await _finished(lambda: create(*args, **merged(kwargs, request.extras)), request, kwargs)

    def screate(*args: Any, **kwargs: Any) -> Any:
        request = request_for(kwargs)
        request.__enter__()
        try:
            answer = create(*args, **merged(kwargs, request.extras))
        except BaseException as error:
            request.__exit__(type(error), error, None)
            raise
        if inspect.isawaitable(answer):
            return _finished(lambda: answer, request, kwargs)
        return _Stream(answer, request) if kwargs.get("stream") else _whole(answer, request)

    # The client's own decorators hide that its method is a coroutine function.
    return acreate if inspect.iscoroutinefunction(inspect.unwrap(create)) else screate


async def _finished(call: Callable[[], Awaitable[Any]], request: MainRequest, kwargs: dict[str, Any]) -> Any:
    try:
        answer = await call()
    except BaseException as error:
        request.__exit__(type(error), error, None)
        raise
    return _AsyncStream(answer, request) if kwargs.get("stream") else _whole(answer, request)


def merged(kwargs: dict[str, Any], extras: dict[str, Any]) -> dict[str, Any]:
    """``kwargs`` with ``extras`` below them: mappings are merged, the user's own values win."""
    out = dict(kwargs)
    for key, value in extras.items():
        mine = out.get(key)
        out[key] = (
            {**value, **cast("dict[str, Any]", mine)}
            if isinstance(mine, dict) and isinstance(value, dict)
            else (value if mine is None else mine)
        )
    return out


def _whole(answer: Any, request: MainRequest) -> Any:
    try:
        request.usage(getattr(answer, "usage", None))
    finally:
        request.__exit__(None, None, None)
    return answer


class _Told:
    """A stream that tells its request what passes; closing and attributes are the stream's own.

    One that is given up before its first token ends like one that failed: it had none.
    """

    def __init__(self, stream: Any, request: MainRequest) -> None:
        self._stream, self._request = stream, request
        self._over = False
        self._single = True

    def __del__(self) -> None:
        # Dropped unread: its request is over all the same, or lookahead would wait for it for ever.
        self._end(GeneratorExit())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _saw(self, chunk: Any) -> Any:
        choices = getattr(chunk, "choices", None)
        if choices:
            self._request.first_token()
            # Of several answers nobody knows which one will be gone on with.
            self._single = self._single and len(choices) == 1 and not getattr(choices[0], "index", 0)
            delta = getattr(choices[0], "delta", None)
            text = getattr(delta, "content", None)
            if self._single and isinstance(text, str):
                self._request.text(text)
            for call in getattr(delta, "tool_calls", None) or ():
                self._request.call(call)
        if getattr(chunk, "usage", None) is not None:
            self._request.usage(chunk.usage)
        return chunk

    def _end(self, error: BaseException | None = None) -> None:
        if not self._over:
            self._over = True
            self._request.__exit__(type(error) if error is not None else None, error, None)

    def _ended_by(self, error: BaseException) -> None:
        self._end(None if isinstance(error, (StopIteration, StopAsyncIteration)) else error)


class _Stream(_Told):
    """For a blocking client."""

    def __iter__(self) -> Iterator[Any]:
        try:
            for chunk in self._stream:
                yield self._saw(chunk)
        except BaseException as error:
            self._end(error)
            raise
        self._end()

    def __next__(self) -> Any:
        try:
            chunk = next(self._stream)
        except BaseException as error:
            self._ended_by(error)
            raise
        return self._saw(chunk)

    def __enter__(self) -> Self:
        self._stream.__enter__()
        return self

    def __exit__(self, *error: object) -> Any:
        self._end(GeneratorExit())
        return self._stream.__exit__(*error)

    def close(self) -> None:
        """Close the stream."""
        self._end(GeneratorExit())
        self._stream.close()


class _AsyncStream(_Told):
    """For an asynchronous one."""

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            async for chunk in self._stream:
                yield self._saw(chunk)
        except BaseException as error:
            self._end(error)
            raise
        self._end()

    async def __anext__(self) -> Any:
        try:
            chunk = await self._stream.__anext__()
        except BaseException as error:
            self._ended_by(error)
            raise
        return self._saw(chunk)

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> Any:
        self._end(GeneratorExit())
        return await self._stream.__aexit__(*error)

    async def close(self) -> None:
        """Close the stream."""
        self._end(GeneratorExit())
        await self._stream.close()

"""An openai client whose chat completions are main requests."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Self, TypeVar, cast

from smoothagent.request import MainRequest

C = TypeVar("C")


def wrap(client: C, main_request: Callable[[], MainRequest]) -> C:
    """A proxy of ``client`` whose ``chat.completions.create`` marks, paces and measures each call.

    Works for ``OpenAI`` and ``AsyncOpenAI``, streaming or not; everything else is the client's own.
    Answers, chunks and errors come through unchanged.
    """
    return cast("C", _Proxy(client, ("chat", "completions"), main_request))


class _Proxy:
    def __init__(self, target: Any, path: tuple[str, ...], main_request: Callable[[], MainRequest]) -> None:
        self._target, self._path, self._main_request = target, path, main_request

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if self._path and name == self._path[0]:
            return _Proxy(value, self._path[1:], self._main_request)
        if not self._path and name == "create":
            return _create(value, self._main_request)
        return value


def _create(create: Callable[..., Any], main_request: Callable[[], MainRequest]) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(create):

        async def acreate(*args: Any, **kwargs: Any) -> Any:
            request = main_request()
            request.__enter__()
            try:
                answer = await create(*args, **merged(kwargs, request.extras))
            except BaseException as error:
                request.__exit__(type(error), error, None)
                raise
            if kwargs.get("stream"):
                return _AsyncStream(answer, request)
            return _whole(answer, request)

        return acreate

    def screate(*args: Any, **kwargs: Any) -> Any:
        request = main_request()
        request.__enter__()
        try:
            answer = create(*args, **merged(kwargs, request.extras))
        except BaseException as error:
            request.__exit__(type(error), error, None)
            raise
        if kwargs.get("stream"):
            return _Stream(answer, request)
        return _whole(answer, request)

    return screate


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
    request.usage(getattr(answer, "usage", None))
    request.__exit__(None, None, None)
    return answer


def _saw(chunk: Any, request: MainRequest) -> None:
    if getattr(chunk, "choices", None):
        request.first_token()
    if getattr(chunk, "usage", None) is not None:
        request.usage(chunk.usage)


class _Stream:
    """A stream that tells its request what passes; iteration, closing and attributes are the stream's own."""

    def __init__(self, stream: Any, request: MainRequest) -> None:
        self._stream, self._request = stream, request
        self._over = False

    def __iter__(self) -> Iterator[Any]:
        try:
            for chunk in self._stream:
                _saw(chunk, self._request)
                yield chunk
        finally:
            self._end()

    def __next__(self) -> Any:
        try:
            chunk = next(self._stream)
        except BaseException:
            self._end()
            raise
        _saw(chunk, self._request)
        return chunk

    def __enter__(self) -> Self:
        self._stream.__enter__()
        return self

    def __exit__(self, *error: object) -> Any:
        self._end()
        return self._stream.__exit__(*error)

    def close(self) -> None:
        """Close the stream."""
        self._end()
        self._stream.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _end(self) -> None:
        if not self._over:
            self._over = True
            self._request.__exit__(None, None, None)


class _AsyncStream:
    """The same for an async stream."""

    def __init__(self, stream: Any, request: MainRequest) -> None:
        self._stream, self._request = stream, request
        self._over = False

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            async for chunk in self._stream:
                _saw(chunk, self._request)
                yield chunk
        finally:
            self._end()

    async def __anext__(self) -> Any:
        try:
            chunk = await self._stream.__anext__()
        except BaseException:
            self._end()
            raise
        _saw(chunk, self._request)
        return chunk

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> Any:
        self._end()
        return await self._stream.__aexit__(*error)

    async def close(self) -> None:
        """Close the stream."""
        self._end()
        await self._stream.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _end(self) -> None:
        if not self._over:
            self._over = True
            self._request.__exit__(None, None, None)

"""One backend a server, shared by all who use that server in this process."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from smoothagent.forks import after_fork
from smoothagent.serving.openai import OpenAIBackend

_SERVERS = 64
"""Servers (with their keys and headers) that are remembered."""


class _Shared:
    def __init__(self) -> None:
        self._backends: OrderedDict[tuple[Any, ...], OpenAIBackend] = OrderedDict()
        self._start_afresh()
        after_fork(self._start_afresh)

    def _start_afresh(self) -> None:
        self._lock = threading.Lock()

    def get(self, url: str, key: str, headers: Mapping[str, str], warm: bool | None) -> OpenAIBackend:
        identity = (url, key, tuple(sorted(headers.items())), warm)
        with self._lock:
            found = self._backends.get(identity)
            if found is None:
                found = self._backends[identity] = OpenAIBackend(url, api_key=key, headers=headers, warm=warm)
                while len(self._backends) > _SERVERS:
                    self._backends.popitem(last=False)  # whoever still has it goes on with it
            self._backends.move_to_end(identity)
            return found


_shared = _Shared()


def shared_backend(url: str, key: str, headers: Mapping[str, str], *, warm: bool | None = None) -> OpenAIBackend:
    """The backend for a server as it is reached with this key and these headers: it leases slots and paces for all.

    Args:
        url: the API's URL.
        key: its key.
        headers: sent with every request.
        warm: as `OpenAIBackend` takes it.
    """
    return _shared.get(url, key, headers, warm)

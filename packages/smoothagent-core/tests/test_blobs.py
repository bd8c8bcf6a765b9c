"""The offload store behind fsspec URLs, on the memory filesystem and with its faults."""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from smoothagent.blobs_remote import RemoteBlobs
from smoothagent.errors import ConfigurationError, StoreError, StoreUnavailableError, UnknownReferenceError
from smoothagent.store import OffloadStore, Reference, Retained

MEMORY = cast("Any", MemoryFileSystem)
URL = "memory://smoothagent-tests/agents"


@pytest.fixture
def store() -> Iterator[OffloadStore]:
    MEMORY.store.clear()
    yield OffloadStore(URL)
    MEMORY.store.clear()


def path_of(reference: Reference) -> str:
    return f"/smoothagent-tests/agents/outputs/{reference.id}.txt"


def age(reference: Reference, seconds: float) -> None:
    MEMORY.store[path_of(reference)].modified = datetime.now(UTC) - timedelta(seconds=seconds)


def answering(value: object) -> Any:
    def answer(*_: object) -> object:
        return value

    return answer


def raising(error: Exception) -> Any:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@given(text=st.text(st.characters(exclude_categories=())))
def test_every_text_comes_back_exactly(text: str) -> None:
    store = OffloadStore("memory://smoothagent-tests/any")
    reference = store.put(text)
    assert store.put(text) == reference
    assert OffloadStore("memory://smoothagent-tests/any").get(reference) == text


def test_exists_forget_and_damage(store: OffloadStore) -> None:
    assert not store.exists("ab" * 10)
    reference = store.put("output")
    assert store.exists(reference)
    MEMORY().pipe_file(path_of(reference), b"outpu")
    with pytest.raises(StoreError, match="damaged"):
        store.get(reference)
    assert store.get(store.put("output")) == "output"
    assert store.forget(reference)
    assert not store.forget(reference)
    with pytest.raises(UnknownReferenceError):
        store.get(reference)


def test_missing_folders_are_made(store: OffloadStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = MEMORY.pipe_file

    def pipe_file(self: Any, path: str, value: bytes) -> None:
        if not self.exists("/smoothagent-tests/agents/outputs"):
            raise FileNotFoundError(path)
        real(self, path, value)

    monkeypatch.setattr(MEMORY, "pipe_file", pipe_file)
    assert store.get(store.put("output")) == "output"


def test_a_write_that_was_not_kept_is_no_success(store: OffloadStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = MEMORY.pipe_file

    def pipe_file(self: Any, path: str, value: bytes) -> None:
        real(self, path, value[:3])

    monkeypatch.setattr(MEMORY, "pipe_file", pipe_file)
    with pytest.raises(StoreUnavailableError, match="did not keep"):
        store.put("output")


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), RuntimeError("socket closed")])
def test_errors_of_the_service_are_ours(store: OffloadStore, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    reference = store.put("output")
    for method in ("pipe_file", "cat_file", "rm_file", "exists", "ls"):
        monkeypatch.setattr(MEMORY, method, raising(error))
    with pytest.raises(StoreUnavailableError, match=URL):
        store.put("another")
    with pytest.raises(StoreUnavailableError):
        store.get(reference)
    with pytest.raises(StoreUnavailableError):
        store.forget(reference)
    with pytest.raises(StoreUnavailableError):
        store.exists(reference)
    with pytest.raises(StoreUnavailableError):
        store.retain(max_bytes=0)


def test_retention(store: OffloadStore) -> None:
    assert store.retain(max_bytes=0) == Retained(0, 0, 0, 0)
    old, young = store.put("old"), store.put("young")
    age(old, 10 * 86_400)
    assert store.retain(max_bytes=0).removed == 0  # this process put both
    assert OffloadStore(URL).retain(max_bytes=0) == Retained(1, 3, 1, 5)
    assert store.exists(young)


def test_put_renews_what_is_old(store: OffloadStore) -> None:
    reference = store.put("output")
    age(reference, 10 * 86_400)
    store.put("output")
    assert OffloadStore(URL).retain(max_age_seconds=86_400).kept == 1


def test_what_was_renewed_or_deleted_since_it_was_listed(store: OffloadStore, monkeypatch: pytest.MonkeyPatch) -> None:
    renewed, deleted = store.put("renewed"), store.put("deleted")
    age(renewed, 10 * 86_400)
    age(deleted, 10 * 86_400)
    listed = RemoteBlobs(URL, {}).entries()
    store.put("renewed")
    store.forget(deleted)
    monkeypatch.setattr(RemoteBlobs, "entries", answering(listed))
    assert OffloadStore(URL).retain(max_bytes=0).removed == 0
    assert store.get(renewed) == "renewed"


def test_put_notices_that_retention_took_the_blob(store: OffloadStore, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = store.put("output")
    real = MEMORY.modified

    def modified(self: Any, path: str) -> datetime:
        MEMORY.store.pop(path, None)
        return real(self, path)

    monkeypatch.setattr(MEMORY, "modified", modified)
    store.put("output")
    monkeypatch.undo()
    assert store.get(reference) == "output"


def test_times_without_a_zone_are_utc(store: OffloadStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("output")
    now = datetime.now(UTC).replace(tzinfo=None)
    monkeypatch.setattr(MEMORY, "modified", answering(now))
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert OffloadStore(URL).retain(max_age_seconds=0, in_use_seconds=3600).kept == 1
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_filesystem_without_times_keeps_everything(store: OffloadStore, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = store.put("output")
    monkeypatch.setattr(MEMORY, "modified", raising(NotImplementedError()))
    assert store.put("output") == reference
    with pytest.raises(StoreError, match="lifecycle"):
        store.retain(max_bytes=0)


def test_it_can_be_pickled_and_forked(store: OffloadStore, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = store.put("output")
    assert pickle.loads(pickle.dumps(store)).get(reference) == "output"
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    assert store.get(reference) == "output"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.setitem(sys.modules, "ocifs", None)
    with pytest.raises(ConfigurationError, match="pip install 's3fs'"):
        OffloadStore("s3://bucket/agents")
    with pytest.raises(ConfigurationError, match="pip install 's3fs'"):
        OffloadStore("simplecache::s3://bucket/agents")
    monkeypatch.setitem(sys.modules, "wandbfs", None)
    with pytest.raises(ConfigurationError, match="wandbfs"):
        OffloadStore("wandb://project")


def test_credentials_stay_out_of_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "paramiko", None)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.sftp", raising=False)
    with pytest.raises(ConfigurationError, match="paramiko") as caught:
        OffloadStore("sftp://user:secret@host/agents")
    assert "secret" not in str(caught.value)
    store = OffloadStore("memory://user:secret@host/agents")
    assert store.location == "memory://***@host/agents"
    assert "secret" not in repr(store)


def test_an_unknown_protocol_or_option_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="nonsense"):
        OffloadStore("nonsense://bucket")
    monkeypatch.setattr("smoothagent.blobs_remote.url_to_fs", raising(TypeError("unexpected keyword 'sekret'")))
    with pytest.raises(ConfigurationError, match=r"\['sekret'\].*unexpected"):
        OffloadStore("s3://bucket", options={"sekret": "value"})


def test_a_service_that_cannot_be_reached_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smoothagent.blobs_remote.url_to_fs", raising(ConnectionError(111, "Connection refused")))
    with pytest.raises(StoreUnavailableError, match=r"cannot open.*Connection refused"):
        OffloadStore("sftp://host/agents")

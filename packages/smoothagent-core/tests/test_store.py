"""OffloadStore: nothing is lost, whatever the output, the writer or the fault."""

from __future__ import annotations

import errno
import os
import pickle
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smoothagent.blobs_local import LocalBlobs
from smoothagent.errors import ConfigurationError, StoreError, StoreUnavailableError, UnknownReferenceError
from smoothagent.store import (
    OffloadStore,
    Reference,
    Retained,
    default_location,
    parse_reference,
    reference_text,
)

ANY_TEXT = st.text(st.characters(exclude_categories=()))
HARD_TEXTS = ["", "\0", "\r\n\n\r", "\ud800", "\ud83d\ude00", "😀", "\ufeff\u2028 \x85", "é" * 3, "a" * 3_000_000]
DAY = 86_400.0


@pytest.fixture
def store(tmp_path: Path) -> OffloadStore:
    return OffloadStore(tmp_path / "store")


@pytest.fixture(scope="module")
def long_lived(tmp_path_factory: pytest.TempPathFactory) -> OffloadStore:
    return OffloadStore(tmp_path_factory.mktemp("long-lived"))


def file_of(store: OffloadStore, reference: Reference) -> Path:
    return Path(store.location) / "outputs" / f"{reference.id}.txt"


def files(store: OffloadStore) -> list[Path]:
    return sorted((Path(store.location) / "outputs").iterdir())


def age(store: OffloadStore, reference: Reference, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(file_of(store, reference), (then, then))


def fails_with(code: int) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


# -- exactness ---------------------------------------------------------------------------------


@given(text=ANY_TEXT)
def test_every_text_comes_back_exactly(long_lived: OffloadStore, text: str) -> None:
    reference = long_lived.put(text)
    assert long_lived.get(reference) == text
    assert long_lived.get(reference.id) == text
    assert reference.chars == len(text)
    assert reference.bytes == len(text.encode("utf-8", "surrogatepass"))


@pytest.mark.parametrize("text", HARD_TEXTS, ids=lambda text: ascii(text[:8]))
def test_hard_texts_come_back_exactly(store: OffloadStore, text: str) -> None:
    assert OffloadStore(store.location).get(store.put(text)) == text


def test_a_pair_of_lone_surrogates_is_another_text_than_the_character(store: OffloadStore) -> None:
    assert store.put("\ud83d\ude00").id != store.put("😀").id


def test_put_is_idempotent(store: OffloadStore) -> None:
    assert store.put("output") == store.put("output")
    assert len(files(store)) == 1


def test_a_text_that_shares_its_short_id_is_kept_apart(store: OffloadStore, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = {b"one": "a" * 64, b"two": "a" * 20 + "b" * 44}

    def sha256(data: bytes) -> SimpleNamespace:
        return SimpleNamespace(hexdigest=lambda: digests[data])

    monkeypatch.setattr("smoothagent.store.hashlib", SimpleNamespace(sha256=sha256))
    first, second = store.put("one"), store.put("two")
    assert (first.id, second.id) == ("a" * 20, digests[b"two"])
    assert (store.get(first), store.get(second)) == ("one", "two")
    assert store.put("two") == second
    assert parse_reference(reference_text(second, "two")) == second.id


# -- references --------------------------------------------------------------------------------


@given(text=ANY_TEXT)
def test_a_reference_is_short_stable_and_recognised(long_lived: OffloadStore, text: str) -> None:
    reference = long_lived.put(text)
    shown = reference_text(reference, text)
    assert shown == reference_text(long_lived.put(text), text)
    assert len(shown) < 110
    assert parse_reference(shown) == reference.id


def test_the_reference_says_how_much_there_is() -> None:
    reference = Reference("ab" * 10, 12, 12)
    expected = '[output offloaded: 12 chars, 2 lines; read it with read_offloaded(ref="abababababababababab")]'
    assert reference_text(reference, "line\nanother") == expected
    assert reference_text(reference, "line\nanother\n") == expected
    assert "0 lines" in reference_text(reference, "")


@given(before=ANY_TEXT, after=ANY_TEXT)
def test_a_text_that_quotes_a_reference_is_not_one(before: str, after: str) -> None:
    quoted = reference_text(Reference("ab" * 10, 5, 5), "quote")
    text = before + quoted + after
    assert (parse_reference(text) is None) == (text != quoted)


@pytest.mark.parametrize("text", ["", "[output offloaded: 5 chars]", "\n", "ab" * 10])
def test_other_texts_are_no_references(text: str) -> None:
    assert parse_reference(text) is None


HOSTILE = ["", "..", "../../etc/passwd", "/etc/passwd", "ab" * 10 + "\n", "AB" * 10, "ab" * 9 + "/.", "a\0b", "٣" * 20]


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_nothing_but_an_id_reaches_the_filesystem(
    store: OffloadStore, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reached(*_: object, **__: object) -> None:
        pytest.fail("reached")

    for method in ("read", "exists", "remove"):
        monkeypatch.setattr(LocalBlobs, method, reached)
    assert not store.exists(text)
    with pytest.raises(UnknownReferenceError, match="no reference"):
        store.get(text)
    with pytest.raises(UnknownReferenceError, match="no reference"):
        store.forget(text)


def test_exists_and_forget(store: OffloadStore) -> None:
    reference = store.put("output")
    assert store.exists(reference)
    assert store.exists(reference.id)
    assert store.forget(reference)
    assert not store.forget(reference)
    assert not store.exists(reference)
    with pytest.raises(UnknownReferenceError, match="shared URL"):
        store.get(reference)


def test_an_unused_store_is_empty_and_creates_nothing(store: OffloadStore) -> None:
    assert not store.exists("ab" * 10)
    assert store.retain(max_bytes=0) == Retained(0, 0, 0, 0)
    assert not Path(store.location).exists()


# -- damage ------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [b"", b"outpu", b"Output", b"\xff\xfe"])
def test_damage_is_told_and_repaired_by_the_next_put(store: OffloadStore, damage: bytes) -> None:
    reference = store.put("output")
    file_of(store, reference).write_bytes(damage)
    with pytest.raises(StoreError, match="damaged") as caught:
        store.get(reference)
    assert not isinstance(caught.value, (UnknownReferenceError, StoreUnavailableError))
    assert store.put("output") == reference
    assert store.get(reference) == "output"
    assert len(files(store)) == 1


# -- privacy -----------------------------------------------------------------------------------


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_files_are_private_under_any_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = OffloadStore(tmp_path / "deep" / "store")
        reference = store.put("output")
    finally:
        os.umask(before)
    assert mode(file_of(store, reference)) == 0o600
    for folder in (tmp_path / "deep", tmp_path / "deep" / "store", tmp_path / "deep" / "store" / "outputs"):
        assert mode(folder) == 0o700


def test_an_open_location_is_left_alone_and_the_outputs_are_private(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    store = OffloadStore(tmp_path)
    reference = store.put("output")
    assert mode(tmp_path) == 0o755
    file_of(store, reference).parent.chmod(0o777)
    store.put("output")
    assert mode(file_of(store, reference).parent) == 0o700


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12_345)
    with pytest.raises(StoreUnavailableError, match="belongs to user id"):
        OffloadStore(tmp_path).put("output")


# -- faults ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "remedy"),
    [(errno.ENOSPC, "full"), (errno.EACCES, "writable"), (errno.EROFS, "read-only"), (errno.EIO, "check")],
)
def test_a_failed_write_leaves_nothing_and_loses_nothing(
    store: OffloadStore, monkeypatch: pytest.MonkeyPatch, code: int, remedy: str
) -> None:
    kept = store.put("earlier")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails_with(code))
        with pytest.raises(StoreUnavailableError, match=remedy) as caught:
            store.put("output")
    assert caught.value.errno == code
    assert store.location in str(caught.value)
    assert files(store) == [file_of(store, kept)]
    assert store.get(store.put("output")) == "output"


def test_a_write_cut_off_in_the_middle_leaves_nothing(store: OffloadStore) -> None:
    script = """
import resource, sys
from smoothagent.store import OffloadStore
from smoothagent.errors import StoreUnavailableError
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
store = OffloadStore(sys.argv[1])
store.put("fits")
try:
    store.put("x" * 1_000_000)
except StoreUnavailableError as error:
    print(error.errno)
"""
    done = subprocess.run([sys.executable, "-c", script, store.location], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(errno.EFBIG), done.stderr
    assert [path.read_text() for path in files(store)] == ["fits"]


def test_a_folder_that_cannot_be_synced_is_no_success(store: OffloadStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("earlier")
    real, synced = os.fsync, list[bool]()

    def fsync(descriptor: int) -> None:
        synced.append(stat.S_ISDIR(os.fstat(descriptor).st_mode))
        if synced[-1]:
            raise OSError(errno.EIO, "broken")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StoreUnavailableError, match="broken"):
        store.put("output")
    assert synced == [False, True]  # the file before its name
    with pytest.raises(StoreUnavailableError, match="broken"):
        store.put("earlier")


def test_some_filesystems_cannot_sync_folders_or_link(store: OffloadStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not for folders")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", fails_with(errno.EPERM))
    reference = store.put("output")
    assert store.get(reference) == "output"
    assert files(store) == [file_of(store, reference)]


def test_a_link_that_fails_otherwise_is_a_failure(store: OffloadStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", fails_with(errno.EIO))
    with pytest.raises(StoreUnavailableError):
        store.put("output")
    assert files(store) == []


def test_a_location_that_is_a_file_or_below_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for location in (tmp_path / "file", tmp_path / "file" / "store"):
        with pytest.raises(StoreUnavailableError, match="folder"):
            OffloadStore(location).put("output")
    assert (tmp_path / "file").read_text() == "mine"


def test_outputs_behind_a_link_are_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "outputs").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreUnavailableError):
        OffloadStore(tmp_path).put("output")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_unreadable_is_not_unknown(store: OffloadStore) -> None:
    reference = store.put("output")
    file_of(store, reference).unlink()
    file_of(store, reference).mkdir()
    with pytest.raises(StoreUnavailableError, match="cannot read from"):
        store.get(reference)


def test_the_folder_may_be_deleted_under_a_running_process(store: OffloadStore) -> None:
    reference = store.put("output")
    file_of(store, reference).unlink()
    file_of(store, reference).parent.rmdir()
    Path(store.location).rmdir()
    assert store.get(store.put("output")) == "output"


@pytest.mark.parametrize("location", ["", "a\0b"])
def test_no_location_at_all_is_refused(location: str) -> None:
    with pytest.raises(ConfigurationError, match="location"):
        OffloadStore(location)


def test_a_relative_location_survives_a_change_of_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = OffloadStore("store")
    reference = store.put("output")
    monkeypatch.chdir("/")
    assert store.get(reference) == "output"
    assert store.location == str(tmp_path / "store")


def test_the_default_is_the_users_data_folder() -> None:
    assert OffloadStore().location == str(default_location())
    assert default_location().parts[-2:] == ("smoothagent", "offload")


# -- many writers ------------------------------------------------------------------------------


def test_threads_put_and_read_the_same_texts(store: OffloadStore) -> None:
    texts = [f"output {i % 5}" * 2000 for i in range(60)]
    with ThreadPoolExecutor(8) as pool:
        references = list(pool.map(store.put, texts))
        assert list(pool.map(store.get, references)) == texts
    assert len(files(store)) == 5


def test_processes_put_the_same_texts(store: OffloadStore) -> None:
    script = """
import sys
from smoothagent.store import OffloadStore
store = OffloadStore(sys.argv[1])
for i in range(30):
    text = f"output {i % 10}" * 2000
    assert store.get(store.put(text)) == text
"""
    running = [subprocess.Popen([sys.executable, "-c", script, store.location]) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert len(files(store)) == 10


def test_a_slower_writer_accepts_what_the_faster_one_wrote(
    store: OffloadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.link

    def link(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "link", real)
        OffloadStore(store.location).put("output")
        real(source, target)

    monkeypatch.setattr(os, "link", link)
    assert store.get(store.put("output")) == "output"
    assert len(files(store)) == 1


def test_it_can_be_pickled(store: OffloadStore) -> None:
    reference = store.put("output")
    copy = pickle.loads(pickle.dumps(store))
    assert copy.get(reference) == "output"
    assert repr(copy) == f"OffloadStore({store.location!r})"


# -- retention ---------------------------------------------------------------------------------


def test_nothing_in_use_is_deleted(store: OffloadStore) -> None:
    reference = store.put("output")
    assert store.retain(max_age_seconds=0, max_bytes=0) == Retained(0, 0, 1, 6)
    age(store, reference, 30 * DAY)
    # This process has put it, whatever the filesystem says.
    assert store.retain(max_age_seconds=DAY) == Retained(0, 0, 1, 6)
    assert OffloadStore(store.location).retain(max_age_seconds=DAY) == Retained(1, 6, 0, 0)


def test_the_oldest_are_deleted_until_the_rest_fits(store: OffloadStore) -> None:
    references = [store.put(f"output {i}") for i in range(4)]
    for i, reference in enumerate(references):
        age(store, reference, (10 - i) * DAY)
    later = OffloadStore(store.location)
    assert later.retain(max_bytes=20) == Retained(2, 16, 2, 16)
    assert [later.exists(reference) for reference in references] == [False, False, True, True]
    assert later.retain(max_age_seconds=7.5 * DAY) == Retained(1, 8, 1, 8)
    assert later.retain() == Retained(0, 0, 1, 8)


@pytest.mark.parametrize("use", ["get", "put"])
def test_use_by_any_process_makes_it_young_again(store: OffloadStore, use: str) -> None:
    reference = store.put("output")
    age(store, reference, 30 * DAY)
    other = OffloadStore(store.location)
    assert other.get(reference) == "output" if use == "get" else other.put("output") == reference
    assert OffloadStore(store.location).retain(max_age_seconds=DAY).kept == 1


def test_foreign_files_stay_and_leftovers_of_crashes_go(store: OffloadStore, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = store.put("output")
    folder = file_of(store, reference).parent
    (folder / "notes.txt").write_text("mine")
    (folder / ".tmp-dead").write_text("half")
    store.retain(max_age_seconds=0)
    assert (folder / ".tmp-dead").exists()  # may be another process's, in the middle of its write
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 2 * DAY)
    store.retain(max_age_seconds=0)
    assert [path.name for path in files(store)] == ["notes.txt"]


def test_what_is_put_again_while_retention_runs_stays(store: OffloadStore, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = store.put("output")
    age(store, reference, 30 * DAY)
    listed = LocalBlobs(Path(store.location)).entries()

    def entries(_: LocalBlobs) -> object:
        store.put("output")
        return listed

    monkeypatch.setattr(LocalBlobs, "entries", entries)
    assert OffloadStore(store.location).retain(max_age_seconds=DAY) == Retained(0, 0, 1, 6)
    assert store.get(reference) == "output"


@pytest.mark.parametrize("renewed_first", [True, False])
def test_put_notices_that_retention_took_the_file(
    store: OffloadStore, monkeypatch: pytest.MonkeyPatch, renewed_first: bool
) -> None:
    store.put("output")
    real = os.utime

    def utime(path: Path) -> None:
        monkeypatch.setattr(os, "utime", real)
        if renewed_first:
            real(path)
            path.unlink()
        else:
            path.unlink()
            real(path)

    monkeypatch.setattr(os, "utime", utime)
    assert store.get(store.put("output")) == "output"


def test_a_store_that_is_emptied_all_the_time_is_reported(store: OffloadStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("output")

    def gone(*_: object) -> bool:
        return False

    monkeypatch.setattr(LocalBlobs, "refresh", gone)
    with pytest.raises(StoreUnavailableError, match="keeps vanishing"):
        store.put("output")


@pytest.mark.parametrize("limit", ["max_age_seconds", "max_bytes"])
def test_negative_limits_are_refused(store: OffloadStore, limit: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{limit}=-1"):
        store.retain(**{limit: -1})

"""A memory's messages in its store, and the one transaction that puts a summary in the place of some of them."""

# LlamaIndex's own annotations are partial.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

from __future__ import annotations

import asyncio
import contextlib
import itertools
import weakref
from collections.abc import AsyncGenerator, Sequence
from typing import Any, NamedTuple, TypeGuard

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.storage.chat_store.base_db import AsyncDBChatStore, MessageStatus
from llama_index.core.storage.chat_store.sql import SQLAlchemyChatStore
from sqlalchemy import insert, select, update

from smoothagent_llamaindex.codec import alike, is_summary, summary_message

_AT_ONCE = 500
"""Row ids in one statement: databases limit the parameters."""
_FEW = 4
_ITS_OWN = ("_initialize", "get_messages", "add_message", "add_messages", "archive_oldest_messages")
"""Where a class overrides one of these, its rows are not what we would read and write."""


class Row(NamedTuple):
    """One message of the queue.

    Attributes:
        id: its key in the database; None where the store does not tell.
        timestamp: its place in the queue.
        message: itself.
    """

    id: int | None
    timestamp: int
    message: ChatMessage


async def queue_of(store: AsyncDBChatStore, session: str) -> list[Row]:
    """The messages that have not left the queue, oldest first."""
    if not is_plain_sql(store):
        found = await store.get_messages(session, status=MessageStatus.ACTIVE)
        return [Row(None, number, message) for number, message in enumerate(found)]
    sessions, table = await _opened(store)
    async with _alone(store), sessions() as database:
        rows = await database.execute(_oldest(table, session))
        return [Row(row.id, row.timestamp, ChatMessage.model_validate(row.data)) for row in rows.fetchall()]


async def summary_in(store: AsyncDBChatStore, session: str) -> str | None:
    """The summary of what has left the queue; None where none was kept."""
    if not is_plain_sql(store):
        archived = await store.get_messages(session, status=MessageStatus.ARCHIVED)
        return next((m.content or "" for m in reversed(archived) if is_summary(m)), None)
    sessions, table = await _opened(store)
    newest = (
        select(table.c.data)
        .where(
            table.c.key == session,
            table.c.status == MessageStatus.ARCHIVED.value,
            table.c.role == MessageRole.SYSTEM.value,
        )
        # By id, which is one database's, and not by time, which is each writer's own.
        .order_by(table.c.id.desc())
    )
    async with _alone(store), sessions() as database:
        for start in itertools.count(0, _FEW):
            rows = (await database.execute(newest.limit(_FEW).offset(start))).fetchall()
            for row in rows:
                message = ChatMessage.model_validate(row.data)
                if is_summary(message):
                    return message.content or ""
            if len(rows) < _FEW:
                return None
    raise AssertionError("unreachable")


async def put_summary(store: AsyncDBChatStore, session: str, covered: Sequence[Row], text: str) -> bool:
    """Archive ``covered`` and keep the summary that stands for them, or do neither.

    In an SQL store in one transaction, guarded by the rows' ids: the covered ones must still be the oldest of the
    queue, and nobody else may have archived them. Elsewhere the summary is kept first, so that a crash in between loses
    nothing.

    Returns:
        False where the queue is another by now.
    """
    summary = summary_message(text)
    if not is_plain_sql(store):
        async with _alone(store):
            present = await store.get_messages(session, status=MessageStatus.ACTIVE)
            pairs = zip(covered, present, strict=False)
            if len(present) < len(covered) or not all(alike(row.message, message) for row, message in pairs):
                return False
            await store.add_message(session, summary, status=MessageStatus.ARCHIVED)
            await store.archive_oldest_messages(session, len(covered))
            return True
    sessions, table = await _opened(store)
    ids = [row.id for row in covered]
    async with _alone(store), sessions() as database, database.begin() as transaction:
        oldest = await database.execute(_oldest(table, session).limit(len(ids)))
        # By their times, too: ids are used again where a session that was alone is deleted.
        same = [(row.id, row.timestamp) for row in oldest.fetchall()] == [(row.id, row.timestamp) for row in covered]
        archived = 0
        for start in range(0, len(ids), _AT_ONCE) if same else ():
            some = ids[start : start + _AT_ONCE]
            done = await database.execute(
                update(table)
                .where(
                    table.c.id.in_(some),
                    table.c.key == session,
                    table.c.status == MessageStatus.ACTIVE.value,
                    table.c.timestamp.between(covered[0].timestamp, covered[-1].timestamp),
                )
                .values(status=MessageStatus.ARCHIVED.value)
            )
            archived += done.rowcount
        if not same or archived != len(ids):
            await transaction.rollback()
            return False
        await database.execute(
            insert(table).values(
                key=session,
                timestamp=covered[-1].timestamp,
                role=summary.role.value,
                status=MessageStatus.ARCHIVED.value,
                data=summary.model_dump(mode="json"),
            )
        )
    return True


_locks: dict[tuple[int, int], tuple[weakref.ref[Any], weakref.ref[Any], asyncio.Lock]] = {}
"""By the identities of store and loop: pydantic's objects cannot be looked up."""


@contextlib.asynccontextmanager
async def _alone(store: AsyncDBChatStore) -> AsyncGenerator[None]:
    """Nobody else of this loop is at the store: what has several steps has no others between them.

    SQLite's in-memory databases have one connection for all sessions, so that one's rollback is another's.
    """
    loop = asyncio.get_running_loop()
    key = id(store), id(loop)
    found = _locks.get(key)
    if found is None or found[0]() is not store or found[1]() is not loop:

        def forget(_: object) -> None:
            _locks.pop(key, None)

        found = _locks[key] = weakref.ref(store, forget), weakref.ref(loop), asyncio.Lock()
    async with found[2]:
        yield


def _oldest(table: Any, session: str) -> Any:
    return (
        select(table)
        .where(table.c.key == session, table.c.status == MessageStatus.ACTIVE.value)
        .order_by(table.c.timestamp, table.c.id)
    )


def is_plain_sql(store: AsyncDBChatStore) -> TypeGuard[SQLAlchemyChatStore]:
    """Whether its rows can be reached past its methods: it is LlamaIndex's own store, or reads and writes as that."""
    return isinstance(store, SQLAlchemyChatStore) and all(
        getattr(type(store), name) is getattr(SQLAlchemyChatStore, name) for name in _ITS_OWN
    )


async def _opened(store: SQLAlchemyChatStore) -> tuple[Any, Any]:
    # The store offers no transaction of several steps; this is where its own methods begin, too.
    return await store._initialize()  # pyright: ignore[reportPrivateUsage]

"""Which conversation a request goes on with, and from which commit: clients that branch, go back, ask aside."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from agent_server import AgentServer, serving
from gw import STREAM, Body, Running, answered, chunked, http, raw, running, turns, wait_for, window
from smoothagent import KeepRecent, LookaheadRuntime, Offload, OffloadStore, Summarize


def ask(client: httpx.Client, gateway: Running, messages: Any, **more: Any) -> httpx.Response:
    headers = more.pop("headers", {})
    call = {"model": "m", "messages": messages, **more}
    return client.post(f"{gateway.url}/chat/completions", json=call, headers=headers)


def synchronously(messages: list[Body]) -> list[Body]:
    """What the strategy makes of a history that it sees for the first time."""
    runtime = LookaheadRuntime[Body](window, lookahead=False)
    try:
        return runtime.on_commit(messages)
    finally:
        runtime.close()


def named(response: httpx.Response) -> str:
    return response.headers["x-smoothagent-conversation"]


@pytest.mark.parametrize(
    "bad",
    [
        {"role": "user", "content": {"a": 1}},
        {"role": "tool", "tool_call_id": "call-2", "content": {"json": "object"}},
        {"role": "user", "content": 5},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "x", "function": "x"}]},
        {"role": "tool", "tool_call_id": "nobody's", "content": "x"},
    ],
)
def test_what_one_client_sends_amiss_is_its_own_affair(bad: Body) -> None:
    with serving(AgentServer(turns=100)) as server, running(server.url) as gateway, http() as client:
        before = [*turns(2)]
        for number in (1, 2):
            ask(client, gateway, turns(number))
        ask(client, gateway, [bad])
        ask(client, gateway, [*before, bad])
        assert server.main[-1]["messages"] == [*before, bad], "the server's to judge"
        commits = 0
        for number in range(3, 10):
            response = ask(client, gateway, turns(number))
            gateway.idle()
            commits += response.headers["x-smoothagent-commit"] != "none"
        assert commits
        assert len(server.main[-1]["messages"]) < len(turns(9))


@pytest.mark.parametrize("volatile", [False, True])
def test_a_history_that_is_taken_back_behind_a_commit_is_what_it_was(volatile: bool, tmp_path: Path) -> None:
    """An answer that is made again, another branch, a second run: the newest result is never what a commit covers."""
    tail: list[Body] = [{"role": "user", "content": "now"}] if volatile else []
    state = tmp_path / "state"
    with serving(AgentServer(turns=100)) as server:
        with running(server.url, state=state) as gateway, http() as client:
            for number in range(1, 8):
                ask(client, gateway, [*turns(number), *tail])
                gateway.idle()
            assert len(server.main[-1]["messages"]) < len(turns(7))
            for number in (3, 4):
                sent = [*turns(number), *tail]
                ask(client, gateway, sent)
                gateway.idle()
                assert server.main[-1]["messages"] == sent
        with running(server.url, state=state) as gateway, http() as client:
            sent = [*turns(3), *tail]
            ask(client, gateway, sent)
            assert server.main[-1]["messages"] == sent


def test_a_history_that_is_taken_back_far_goes_on_from_an_earlier_commit() -> None:
    with serving(AgentServer(turns=100)) as server, running(server.url) as gateway, http() as client:
        sizes = dict[int, int]()
        for number in range(1, 16):
            ask(client, gateway, turns(number))
            gateway.idle()
            sizes[number] = len(server.main[-1]["messages"])
        cuts = [n for n in sizes if n > 1 and sizes[n] <= sizes[n - 1]]
        assert len(cuts) >= 3
        for number in (cuts[1], cuts[1] + 1, cuts[2] - 1):
            ask(client, gateway, turns(number))
            gateway.idle()
            sent = server.main[-1]["messages"]
            assert sent[-4:] == turns(number)[-4:], "the strategy keeps two turns"
            assert len(sent) <= max(sizes.values()), "what was committed before holds"


@pytest.mark.parametrize("how", ["restart", "idle"])
def test_conversations_with_one_system_prompt_each_go_on(how: str, tmp_path: Path) -> None:
    def both(number: int) -> list[list[Body]]:
        one, two = turns(number), turns(number)
        two[1] = {"role": "user", "content": "another task"}
        return [one, two]

    with serving(AgentServer(turns=100)) as server:
        more: dict[str, Any] = {"state": tmp_path / "state", "idle_seconds": 0.05 if how == "idle" else 900}
        last = dict[int, list[Body]]()

        def go_on(gateway: Running, client: httpx.Client, number: int) -> None:
            for which, messages in enumerate(both(number)):
                ask(client, gateway, messages)
                gateway.idle()
                before, last[which] = last.get(which, []), server.main[-1]["messages"]
                if number > 7:
                    assert last[which][: len(before)] == before, "the prefix goes on as it was"

        with running(server.url, lambda: KeepRecent(2, at_turns=6), **more) as gateway, http() as client:
            for number in range(1, 8):
                go_on(gateway, client, number)
            assert all(len(sent) < len(turns(7)) for sent in last.values())
            if how == "idle":
                time.sleep(0.1)
                gateway.gateway.sessions.sweep()
                assert not len(gateway.gateway.sessions)
                go_on(gateway, client, 8)
                return
        with running(server.url, lambda: KeepRecent(2, at_turns=6), **more) as gateway, http() as client:
            go_on(gateway, client, 8)


def test_a_branch_survives_a_restart_too(tmp_path: Path) -> None:
    with serving(AgentServer(turns=100)) as server:
        with running(server.url, state=tmp_path / "s") as gateway, http() as client:
            for number in range(1, 8):
                ask(client, gateway, turns(number))
                gateway.idle()
            branch = [*turns(7), {"role": "user", "content": "another way"}]
            ask(client, gateway, branch)
            expected = server.main[-1]["messages"]
            for number in range(8, 14):
                ask(client, gateway, turns(number))
                gateway.idle()
        with running(server.url, state=tmp_path / "s") as gateway, http() as client:
            ask(client, gateway, branch)
            assert server.main[-1]["messages"] == expected


def test_another_strategy_does_not_go_on_from_what_this_one_has_made(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with serving(AgentServer(turns=100)) as server:
        with running(server.url, state=state) as gateway, http() as client:
            for number in range(1, 8):
                ask(client, gateway, turns(number))
                gateway.idle()
        with running(server.url, lambda: Summarize(100_000), state=state) as gateway, http() as client:
            ask(client, gateway, turns(8))
            assert server.main[-1]["messages"] == turns(8)


def test_what_is_asked_aside_costs_a_conversation_nothing() -> None:
    """A title, a suggestion: the history with another last message, or with one more."""
    with serving(AgentServer(turns=100)) as server, running(server.url) as gateway, http() as client:
        aside: Body = {"role": "user", "content": "suggest a title"}
        names, kinds = set[str](), list[str]()
        for number in range(1, 14):
            response = ask(client, gateway, turns(number))
            gateway.idle()
            names.add(named(response))
            kinds.append(response.headers["x-smoothagent-commit"])
            asked = [*turns(number), aside] if number % 2 else [*turns(number)[:-1], aside]
            if number % 2:
                ask(client, gateway, asked)
                gateway.idle()
                assert server.main[-1]["messages"][-1] == aside
        assert len(names) == 1
        assert len([k for k in kinds if k != "none"]) >= 2
        assert gateway.gateway.sessions.all()[-1].tail == 0


def test_a_harness_that_rewrites_its_last_message_and_one_that_does_not_share_a_key() -> None:
    with serving(AgentServer(turns=100)) as server, running(server.url) as gateway, http() as client:
        plain, volatile = set[str](), set[str]()
        for number in range(1, 9):
            other = turns(number)
            other[1] = {"role": "user", "content": "another"}
            plain.add(named(ask(client, gateway, turns(number))))
            gateway.idle()
            volatile.add(named(ask(client, gateway, [*other, {"role": "user", "content": f"now {number}"}])))
            gateway.idle()
        assert (len(plain), len(volatile)) == (1, 1)
        assert [s.tail for s in gateway.gateway.sessions.all()] == [0, 1]
        assert server.prefills


def test_a_client_that_goes_on_as_soon_as_it_can_is_the_same_one() -> None:
    """Servers, and proxies before them, may close a stream a while after its end."""

    def answer(head: bytes, body: bytes) -> list[bytes | float]:
        said = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
        return [STREAM, chunked(said), 0.3, b"0\r\n\r\n"]

    with raw(answer) as server, running(server.url, dialect="openai") as gateway, http() as client:
        messages: list[Body] = [{"role": "user", "content": "q"}]
        names = set[str]()
        for number in range(4):
            call = {"messages": messages, "stream": True}
            with client.stream("POST", f"{gateway.url}/chat/completions", json=call) as response:
                names.add(response.headers["x-smoothagent-conversation"])
                for data in response.iter_raw():
                    if b"[DONE]" in data:
                        break
            messages = [*messages, {"role": "assistant", "content": "a"}, {"role": "user", "content": str(number)}]
        assert len(names) == 1
        wait_for(lambda: not gateway.gateway.sessions.all()[0].busy)


def test_a_stream_that_closes_late_does_not_free_the_next_request() -> None:
    """The first is over for its client at its end, and closed by the server while the next is answered."""
    closing = threading.Event()

    def answer(head: bytes, body: bytes) -> list[bytes | float]:
        said = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
        if len(json.loads(body)["messages"]) == 1:
            return [STREAM, chunked(said), 0.3, b"0\r\n\r\n"]
        return [STREAM, chunked(b": wait\n\n"), 20.0]

    def next_one(gateway: Running) -> None:
        messages = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a"},
            {"role": "user", "content": "b"},
        ]
        call = {"messages": messages, "stream": True}
        with http() as client, client.stream("POST", f"{gateway.url}/chat/completions", json=call):
            closing.wait(20)

    with raw(answer) as server, running(server.url, dialect="openai") as gateway, http() as client:
        call = {"messages": [{"role": "user", "content": "q"}], "stream": True}
        with client.stream("POST", f"{gateway.url}/chat/completions", json=call) as response:
            chunks = response.iter_raw()
            while b"[DONE]" not in next(chunks):
                pass
            thread = threading.Thread(target=next_one, args=(gateway,))
            thread.start()
            (session,) = gateway.gateway.sessions.all()
            wait_for(lambda: session.requests == 2)
            assert not list(chunks)  # the server has closed the first
            wait_for(lambda: gateway.gateway.figures.open == 1)
            assert session.busy
        closing.set()
        thread.join()
        wait_for(lambda: not session.busy)


@pytest.mark.parametrize("field", ["tools", "extra_body", "temperature", "model", "stop", "reasoning", "user", "n"])
@pytest.mark.parametrize("value", [5, True, "x", [1], {"a": [None]}, None])
def test_fields_of_any_type_go_on_to_the_server(field: str, value: Any) -> None:
    with raw(lambda head, body: [answered(b"{}")]) as server, running(server.url, dialect="openai") as gateway:
        with http() as client:
            response = ask(client, gateway, turns(1), **{field: value})
        assert response.status_code == 200
        assert json.loads(server.requests[0][1])[field] == value


def test_a_call_that_the_strategy_cannot_work_with_is_sent_as_earlier_ones_have_left_it(tmp_path: Path) -> None:
    """A summary that a harness asks for without its tools: the whole of it would not fit any more."""
    store = OffloadStore(tmp_path / "store")
    tools = [{"type": "function", "function": {"name": "read_offloaded"}}]
    with (
        serving(AgentServer(turns=100)) as server,
        running(server.url, lambda: Offload(1500, keep=1, store=store)) as gateway,
        http() as client,
    ):
        for number in range(1, 12):
            ask(client, gateway, turns(number, "long " * 100), tools=tools)
            gateway.idle()
        moved = json.dumps(server.main[-1]["messages"])
        assert "output offloaded" in moved
        ask(client, gateway, [*turns(11, "long " * 100), {"role": "user", "content": "sum up"}])
        sent = server.main[-1]["messages"]
        assert sent[-1]["content"] == "sum up"
        assert len(json.dumps(sent)) < len(moved) + 200


@pytest.mark.parametrize("field", ["function_call", "refusal", "audio"])
def test_an_edit_of_any_content_is_an_edit(field: str) -> None:
    def edited(number: int, what: str) -> list[Body]:
        messages = turns(number)
        said: Any = {"name": "f", "arguments": what} if field == "function_call" else {"id": what}
        messages[2] = {"role": "assistant", "content": "x", field: what if field == "refusal" else said}
        messages[3] = {"role": "user", "content": "go on"}
        return messages

    with serving(AgentServer(turns=100)) as server, running(server.url) as gateway, http() as client:
        for number in range(1, 9):
            ask(client, gateway, edited(number, "ORIGINAL"))
            gateway.idle()
        assert len(server.main[-1]["messages"]) < len(turns(8))
        ask(client, gateway, edited(8, "EDITED"))
        assert server.main[-1]["messages"] == synchronously(edited(8, "EDITED"))


def test_what_stays_is_sent_as_its_client_has_written_it_this_time() -> None:
    """True and 1 are equal in Python, and not to a server."""
    with serving(AgentServer(turns=100)) as server, running(server.url) as gateway, http() as client:
        for number in range(1, 9):
            messages = turns(number)
            messages[-1]["cache"] = 1
            messages[-2]["x"] = 1.0
            ask(client, gateway, messages)
            gateway.idle()
        messages = turns(9)
        messages[-3]["cache"], messages[-4]["x"] = True, 1
        ask(client, gateway, messages)
        sent = server.main[-1]["messages"]
        assert sent[-3]["cache"] is True
        assert json.dumps(sent[-4]["x"]) == "1"
        assert len(sent) < len(messages)


def test_a_state_that_another_holds_up_holds_up_nobody_here(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with serving(AgentServer(turns=100)) as server:
        with running(server.url, state=state) as gateway, http(timeout=20) as client:
            with sqlite3.connect(state, isolation_level=None) as other:
                other.execute("BEGIN IMMEDIATE")
                for number in range(1, 20):
                    ask(client, gateway, turns(number))
                    gateway.idle()
                messages = turns(3)
                messages[0] = {"role": "system", "content": "another"}
                began = time.perf_counter()
                ask(client, gateway, messages)
                waited = time.perf_counter() - began
                file: Any = gateway.gateway._records._file  # pyright: ignore[reportPrivateUsage]
                left = len(file._waiting)
                other.execute("ROLLBACK")
            other.close()
            assert left or waited < 5
        # What had to wait was written at the end.
        with sqlite3.connect(state) as database:
            count = database.execute("SELECT count(*) FROM commits").fetchone()[0]
        database.close()
        assert count >= 3


def test_many_that_go_on_at_once_after_a_restart_are_as_many(tmp_path: Path) -> None:
    with serving(AgentServer(turns=100)) as server:
        with running(server.url, state=tmp_path / "s") as gateway, http() as client:
            for number in range(1, 8):
                ask(client, gateway, turns(number))
                gateway.idle()
        with running(server.url, state=tmp_path / "s") as gateway:
            names, sizes = list[str](), list[int]()
            server.pause = 0.2

            def one() -> None:
                with http() as client:
                    names.append(named(ask(client, gateway, turns(8))))

            threads = [threading.Thread(target=one) for _ in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            sizes = [len(b["messages"]) for b in server.main[-6:]]
            assert len(set(names)) == 6
            assert len(set(sizes)) == 1
            assert sizes[0] < len(turns(8))


def with_system(content: Any, number: int, **more: Any) -> list[Body]:
    return [{"role": "system", "content": content, **more}, *turns(number)[1:]]


def summarizing() -> Summarize:
    return Summarize(700, keep=150, max_tokens=60)


def test_another_system_text_finds_what_was_committed() -> None:
    """A harness has other tools in one of its turns, or the date has changed: a long history goes on being short."""
    with serving(AgentServer(turns=1000)) as server, running(server.url, summarizing) as gateway, http() as client:
        commits, names = list[str](), set[str]()
        for number in range(1, 20):
            other = number in (12, 15, 16)
            response = ask(client, gateway, with_system("Other tools." if other else "S", number))
            gateway.idle()
            commits.append(response.headers["x-smoothagent-commit"])
            names.add(named(response))
            sent = server.main[-1]["messages"]
            assert sent[0] == {"role": "system", "content": "Other tools." if other else "S"}
            assert len(json.dumps(sent)) < 4 * 1000, "nobody sends all of it"
        assert commits.count("sync") <= 1, "that of a conversation's first request, if it is due then"
        assert commits.count("hit") >= 2
        assert len(names) == 2
        assert {s["messages"][0]["content"] for s in server.summaries} <= {"S", "Other tools."}


def test_agents_with_a_history_in_common_are_conversations_of_their_own() -> None:
    """A group chat: each has its own system text, and all have the same messages."""
    with serving(AgentServer(turns=1000)) as server, running(server.url, window) as gateway, http() as client:
        names: dict[str, set[str]] = {"writer": set(), "critic": set()}
        for number in range(1, 9):
            for agent, seen in names.items():
                seen.add(named(ask(client, gateway, with_system(f"You are a {agent}.", number))))
                gateway.idle()
                assert server.main[-1]["messages"][0]["content"] == f"You are a {agent}."
        assert [len(seen) for seen in names.values()] == [1, 1]
        assert names["writer"] != names["critic"]
        for body in server.prefills:
            begun = body["messages"][0]["content"]  # a first slice may end in it
            assert any(b["messages"][0]["content"].startswith(begun) for b in server.main), begun


@pytest.mark.parametrize(
    "lead",
    [
        [{"role": "system", "content": [{"type": "text", "text": "S"}]}],
        [{"role": "system", "content": "S", "name": "x"}],
        [{"role": "developer", "content": "S"}],
        [{"role": "system", "content": "S"}, {"role": "system", "content": "T"}],
        [],
    ],
)
def test_system_text_of_any_form_is_sent_as_it_was(lead: list[Body]) -> None:
    with serving(AgentServer(turns=1000)) as server, running(server.url, window) as gateway, http() as client:
        commits = list[str]()
        for number in range(1, 9):
            response = ask(client, gateway, [*lead, *turns(number)[1:]])
            gateway.idle()
            commits.append(response.headers["x-smoothagent-commit"])
            assert server.main[-1]["messages"][: len(lead)] == lead
        assert commits.count("hit") >= 1
        assert all(b["messages"][: len(lead)] == lead for b in server.prefills)


def test_system_text_alone_is_a_request_too() -> None:
    with serving(AgentServer(turns=0)) as server, running(server.url, window) as gateway, http() as client:
        only = [{"role": "system", "content": "S"}]
        assert ask(client, gateway, only).status_code == 200
        assert server.main[-1]["messages"] == only

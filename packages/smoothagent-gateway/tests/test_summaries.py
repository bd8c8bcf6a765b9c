"""A harness that compacts by itself is given its conversation's summary, or one that finds its prompt warm."""

from __future__ import annotations

import copy
from typing import Any

import httpx
import pytest

from agent_server import AgentServer, kind_of, serving
from gw import Body, Running, answered, http, raw, running, turns, window
from smoothagent import LookaheadStrategy, Offload, OffloadStore, Pipeline, Summarize

QUESTION = "Summarize the conversation so far, and mind the names."


def summarizing() -> Summarize:
    return Summarize(700, keep=150, max_tokens=60)


def said(client: httpx.Client, gateway: Running, number: int, **more: Any) -> str:
    call = {"model": "m", "messages": turns(number), **more}
    response = client.post(f"{gateway.url}/chat/completions", json=call)
    gateway.idle()
    return response.headers["x-smoothagent-commit"]


def talked(client: httpx.Client, gateway: Running, last: int, **more: Any) -> int:
    """So many turns; how many there were at the last commit."""
    return max((n for n in range(1, last + 1) if said(client, gateway, n, **more) != "none"), default=0)


def asked(client: httpx.Client, gateway: Running, messages: Any, **more: Any) -> httpx.Response:
    return client.post(f"{gateway.root}/smoothagent/summary", json={"messages": messages, **more})


def kept_by_a_harness(messages: list[Body]) -> list[Body]:
    """As a harness keeps them: without what it adds to a request, ids as they came."""
    own = copy.deepcopy([m for m in messages if m["role"] != "system"])
    for m in own:
        for call in m.get("tool_calls", ()):
            call["id"] = call["id"].replace("-", "_")
        if "tool_call_id" in m:
            m["tool_call_id"] = m["tool_call_id"].replace("-", "_")
    return own


def with_times(messages: list[Body]) -> list[Body]:
    return [
        {**m, "content": f"[Tue 07:2{i % 10}] {m['content']}"} if m["role"] == "user" else m
        for i, m in enumerate(messages)
    ]


@pytest.mark.parametrize("tail", [0, 2, 4])
def test_what_was_summarized_ahead_of_time_is_given_with_what_came_after_it(tail: int) -> None:
    with serving(AgentServer(turns=1000)) as server, running(server.url, summarizing) as gateway, http() as client:
        assert talked(client, gateway, 12)
        sent = server.main[-1]["messages"]
        summary = next(m["content"] for m in sent if "SUMMARY" in str(m["content"]))
        before = len(server.bodies)
        mine = kept_by_a_harness(turns(12))
        system = turns(0)[:1] if tail == 2 else []
        response = asked(client, gateway, [*system, *mine[: len(mine) - tail]])
        assert response.status_code == 200
        told = response.json()
        assert told["kind"] == "ready"
        assert len(server.bodies) == before, "nobody had to be asked"
        assert told["summary"].startswith(summary)
        # All that no summary holds, in its order, and nothing that one holds.
        verbatim = [m for m in sent if m["role"] == "tool"]
        since = [m["content"] for m in verbatim[: len(verbatim) - tail // 2]]
        places = [told["summary"].find(text) for text in since]
        assert -1 not in places
        assert places == sorted(places)
        assert told["summary"].count("tool: ") == len(since)


def test_a_question_is_put_after_what_the_server_has_in_its_cache() -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    with serving(AgentServer(turns=1000)) as server, running(server.url, summarizing) as gateway, http() as client:
        assert talked(client, gateway, 12, tools=tools)
        last = server.main[-1]
        told = asked(client, gateway, with_times(kept_by_a_harness(turns(12))[:-2]), question=QUESTION).json()
        assert told["kind"] == "written"
        assert "SUMMARY" in told["summary"]
        [body] = [b for b in server.bodies if b["messages"][-1].get("content") == QUESTION]
        assert body["messages"][:-1] == last["messages"][:-2], "as it was sent, up to what was asked for"
        assert body["tools"] == tools
        before = len(server.bodies)
        assert said(client, gateway, 13, tools=tools) in ("none", "hit")
        assert [b for b in server.bodies[before:] if kind_of(b) == "main"], "the conversation goes on"


def test_a_conversation_without_a_summary_has_one_written() -> None:
    with serving(AgentServer(turns=1000)) as server, running(server.url, window) as gateway, http() as client:
        assert talked(client, gateway, 8)
        told = asked(client, gateway, kept_by_a_harness(turns(8))).json()
        assert told["kind"] == "written"
        asked_for = server.bodies[-1]["messages"]
        assert asked_for[:-1] == server.main[-1]["messages"]
        assert "Summarize the conversation so far" in asked_for[-1]["content"]


def test_what_is_too_long_to_be_repeated_is_summarized_too() -> None:
    def long() -> LookaheadStrategy:
        return Summarize(12_000, keep=6_000, max_tokens=60)

    with serving(AgentServer(turns=1000)) as server, running(server.url, long) as gateway, http() as client:
        output = "r" * 2_500
        for n in range(1, 23):
            client.post(f"{gateway.url}/chat/completions", json={"model": "m", "messages": turns(n, output)})
            gateway.idle()
        assert any("SUMMARY" in str(m["content"]) for m in server.main[-1]["messages"])
        told = asked(client, gateway, kept_by_a_harness(turns(22, output))).json()
        assert told["kind"] == "written"
        assert server.bodies[-1]["messages"][:-1] == server.main[-1]["messages"]


def test_a_pipelines_summary_is_one(tmp_path: Any) -> None:
    def both() -> LookaheadStrategy:
        return Pipeline(
            Offload(600, keep=1, store=OffloadStore(tmp_path), min_chars=10_000, allow_unreadable=True), summarizing()
        )

    with serving(AgentServer(turns=1000)) as server, running(server.url, both) as gateway, http() as client:
        assert talked(client, gateway, 12)
        assert asked(client, gateway, kept_by_a_harness(turns(12))).json()["kind"] == "ready"


def test_each_conversation_has_its_own() -> None:
    with serving(AgentServer(turns=1000)) as server, running(server.url, summarizing) as gateway, http() as client:
        names = list[str]()
        for word in ("apples", "pears"):
            for n in range(1, 13):
                messages = [
                    {**m, "content": f"{m['content']} {word}"} if m["role"] in ("user", "assistant") else m
                    for m in turns(n)
                ]
                for m in messages:
                    for call in m.get("tool_calls", ()):
                        call["id"] = f"{word}{call['id']}"
                    if "tool_call_id" in m:
                        m["tool_call_id"] = f"{word}{m['tool_call_id']}"
                response = client.post(f"{gateway.url}/chat/completions", json={"model": "m", "messages": messages})
                gateway.idle()
            names.append(response.headers["x-smoothagent-conversation"])  # pyright: ignore[reportPossiblyUnboundVariable]
            last = kept_by_a_harness(messages)  # pyright: ignore[reportPossiblyUnboundVariable]
            told = asked(client, gateway, last).json()
            assert told["conversation"] == names[-1]
            assert f"the task {word}" in told["summary"]
        assert len(set(names)) == 2


def test_what_the_model_was_not_sent_is_there_word_for_word() -> None:
    """The newest answer, and what is no message of the conversation, whether the summary is ready or written now."""
    with serving(AgentServer(turns=1000)) as server, running(server.url, summarizing) as gateway, http() as client:
        talked(client, gateway, 12)
        mine = kept_by_a_harness(turns(12))
        strangers = [{"role": "user", "content": f"a stranger {i}"} for i in range(3)]
        given = [*strangers[:1], *mine[:6], *strangers[1:], *mine[6:], {"role": "assistant", "content": "the answer"}]
        for more in ({}, {"question": QUESTION}):
            told = asked(client, gateway, given, **more).json()
            assert told["kind"] == ("written" if more else "ready")
            for text in ("a stranger 0", "a stranger 1", "a stranger 2", "the answer"):
                assert told["summary"].count(text) == 1
        assert "a stranger" not in str(server.bodies)


def test_another_branchs_summary_is_none_of_its() -> None:
    """It has the same beginning, and was left behind before the summary's end."""
    with serving(AgentServer(turns=1000)) as server, running(server.url, summarizing) as gateway, http() as client:
        talked(client, gateway, 12)
        covered = gateway.gateway.sessions.all()[0].runtime.record
        assert covered is not None
        common = kept_by_a_harness(turns(4))
        assert covered.covered > len(common)
        branch = [{"role": "assistant", "content": f"elsewhere {i}"} for i in range(4)]
        told = asked(client, gateway, [*common, *branch[:1]]).json()
        assert told["kind"] == "written"
        middle = [*common[:3], *common[7:], *kept_by_a_harness(turns(12))[len(common) :]]
        assert asked(client, gateway, middle).status_code == 404, "answers and results are missing in it"


def test_a_name_decides_between_conversations_that_begin_alike() -> None:
    with serving(AgentServer(turns=1000)) as server, running(server.url, summarizing) as gateway, http() as client:
        names = list[str]()
        for name in ("one", "two"):
            for n in range(1, 13):
                call = {"model": "m", "messages": turns(n)}
                headers = {"x-smoothagent-session": name}
                response = client.post(f"{gateway.url}/chat/completions", json=call, headers=headers)
                gateway.idle()
            names.append(response.headers["x-smoothagent-conversation"])  # pyright: ignore[reportPossiblyUnboundVariable]
        mine = kept_by_a_harness(turns(12))
        for name, conversation in zip(("one", "two", "three"), [*names, names[1]], strict=True):
            assert asked(client, gateway, mine, session=name).json()["conversation"] == conversation
        assert all(b"x-smoothagent-session" not in str(b).encode() for b in server.bodies)


def test_many_messages_that_are_all_alike_take_no_time() -> None:
    with serving(AgentServer(turns=1000)) as server, running(server.url, summarizing) as gateway, http() as client:
        for n in range(1, 4):
            said(client, gateway, n)
        alike = [{"role": "user", "content": "hello"}] * 50_000
        assert asked(client, gateway, alike).status_code == 404


def test_an_unknown_conversation_is_said_to_be_one() -> None:
    with serving(AgentServer(turns=1000)) as server, running(server.url, summarizing) as gateway, http() as client:
        assert asked(client, gateway, turns(3)).json()["error"]["code"] == "unknown_conversation"
        talked(client, gateway, 12)
        other = [{"role": "user", "content": f"something else {i}"} for i in range(20)]
        response = asked(client, gateway, [*turns(2)[2:], *other])
        assert response.status_code == 404
        assert not server.summaries or "something else" not in str(server.bodies)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"messages": []}',
        b'{"messages": "all"}',
        b'{"messages": [{"role": "system", "content": "S"}]}',
        b'{"messages": [1]}',
        b'{"messages": [{"role": "user", "content": "x"}], "question": 3}',
        b'{"messages": [{"role": "user", "content": 5}]}',
        b'{"messages": [{"role": "assistant", "tool_calls": [{"function": "f"}]}]}',
        b"[" * 100_000,
    ],
)
def test_what_cannot_be_read_is_refused(body: bytes) -> None:
    with serving(AgentServer(turns=1000)) as server, running(server.url, summarizing) as gateway, http() as client:
        talked(client, gateway, 2)
        response = client.post(f"{gateway.root}/smoothagent/summary", content=body)
        assert response.status_code in (400, 404)
        assert response.json()["error"]["message"]
        assert said(client, gateway, 3) == "none"


def test_a_model_that_writes_none_is_told_of() -> None:
    answer = b'{"choices": [{"message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}]}'

    def answering(_: bytes, body: bytes) -> list[bytes | float]:
        return [answered(b"no", status=b"500 Broken") if QUESTION.encode() in body else answered(answer)]

    with raw(answering) as server, running(server.url, summarizing) as gateway, http() as client:
        client.post(f"{gateway.url}/chat/completions", json={"model": "m", "messages": turns(2)})
        response = asked(client, gateway, kept_by_a_harness(turns(2)), question=QUESTION)
        assert response.status_code == 502
        assert response.json()["error"]["code"] == "no_summary"
        assert client.get(f"{gateway.root}/smoothagent/state").json()["open"] == 0

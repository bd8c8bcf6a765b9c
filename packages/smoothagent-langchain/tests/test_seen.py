"""Whose call it is that a model of the process makes."""

from __future__ import annotations

from typing import Any, cast

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.load import dumpd
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from agent_server import AgentServer, serving
from smoothagent_langchain.chains import Upcoming
from smoothagent_langchain.watch import is_of


def model_of(url: str | None, name: str = "m") -> ChatOpenAI:
    return ChatOpenAI(model=name, base_url=url, api_key=SecretStr("x"), max_retries=0)


HERE, THERE = "http://127.0.0.1:9/v1", "http://127.0.0.1:10/v1"


@pytest.mark.parametrize(
    ("mine", "called", "same"),
    [
        (model_of(HERE), model_of(HERE), True),
        (model_of(HERE), model_of(THERE), False),
        (model_of(HERE), model_of(None), False),
        (model_of(None), model_of(HERE), False),
        (model_of(None), model_of(None), True),
        (model_of(HERE), model_of(HERE, "other"), False),
    ],
)
def test_a_call_is_a_models_by_name_and_server(mine: BaseChatModel, called: ChatOpenAI, same: bool) -> None:
    assert is_of(mine, dumpd(called), {"model": called.model_name}) is same


def test_a_model_that_cannot_be_serialized_tells_by_its_repr() -> None:
    class Own(ChatOpenAI):
        @classmethod
        def is_lc_serializable(cls) -> bool:
            return False

    mine = Own(model="m", base_url=HERE, api_key=SecretStr("x"))
    for url, same in ((HERE, True), (THERE, False)):
        called = Own(model="m", base_url=url, api_key=SecretStr("x"))
        assert is_of(mine, {"type": "not_implemented", "repr": repr(called)}, {"model": "m"}) is same


def test_another_servers_call_with_the_same_history_teaches_nothing() -> None:
    """What stands before the history in it is another tenant's."""
    history = [HumanMessage("hi")]
    with serving(AgentServer(turns=0)) as here, serving(AgentServer(turns=0)) as there:
        mine = Upcoming()
        mine.watch(cast("list[BaseMessage]", history), model_of(here.url), warm=None)
        model_of(there.url).invoke([SystemMessage("a secret"), *history, HumanMessage("q")])
        assert shape(mine) is None
        model_of(here.url).invoke([SystemMessage("ours"), *history, HumanMessage("q")])
        assert [m.content for m in shape(mine).before] == ["ours"]


def test_a_call_that_could_be_two_conversations_teaches_neither() -> None:
    with serving(AgentServer(turns=0)) as server:
        both = [Upcoming(), Upcoming()]
        for one in both:
            one.watch("Human: hi\nAI: hello", model_of(server.url), warm=None)
        model_of(server.url).invoke([HumanMessage("So far:\nHuman: hi\nAI: hello\nNow: q")])
        assert [shape(one) for one in both] == [None, None]
        both.pop().forget()
        model_of(server.url).invoke([HumanMessage("So far:\nHuman: hi\nAI: hello\nNow: q")])
        assert shape(both[0]).text == "So far:\n"


def test_a_call_long_after_the_history_was_loaded_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(AgentServer(turns=0)) as server:
        mine = Upcoming()
        mine.watch("Human: hi", model_of(server.url), warm=None)
        monkeypatch.setattr("smoothagent_langchain.chains._WATCHED", -1.0)
        model_of(server.url).invoke([HumanMessage("Human: hi")])
        assert shape(mine) is None


def shape(upcoming: Upcoming) -> Any:
    return upcoming._shape  # pyright: ignore[reportPrivateUsage]

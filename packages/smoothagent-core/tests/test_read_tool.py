"""read_offloaded: pages add up to the output, and every mistake of a model gets an answer."""

from __future__ import annotations

import json
import logging
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smoothagent.errors import ConfigurationError, StoreUnavailableError
from smoothagent.prompt import Prompt
from smoothagent.read_tool import READ_OFFLOADED_TOOL, ReadOffloaded, has_read_tool, require_read_tool
from smoothagent.store import OffloadStore, reference_text

HEADER = re.compile(r"\[chars (\d+)-(\d+) of (\d+); (?:end|next page: offset=(\d+))\]")


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> ReadOffloaded:
    return ReadOffloaded(OffloadStore(tmp_path_factory.mktemp("store")), page_chars=7)


@pytest.fixture(scope="module")
def ref(tool: ReadOffloaded) -> str:
    return tool.store.put("0123456789").id


def pages(tool: ReadOffloaded, ref: str, limit: int | None) -> list[str]:
    bodies: list[str] = []
    offset: int | None = 0
    while offset is not None:
        header, body = tool(ref, offset, limit).split("\n", 1)
        match = HEADER.fullmatch(header)
        assert match is not None
        assert (int(match[1]), int(match[2])) == (offset, offset + len(body))
        bodies.append(body)
        offset = int(match[4]) if match[4] else None
    return bodies


@given(
    text=st.text(st.characters(exclude_categories=()) | st.sampled_from("\ud83d\ude00\n\r")), limit=st.integers(1, 9)
)
def test_all_pages_joined_are_the_output(tool: ReadOffloaded, text: str, limit: int) -> None:
    ref = tool.store.put(text).id
    assert "".join(pages(tool, ref, limit)) == text
    assert "".join(pages(tool, ref, None)) == text


@given(text=st.text("\ud83d\ude00", max_size=12), limit=st.integers(1, 5))
def test_no_page_ends_between_two_surrogates_of_a_pair(tool: ReadOffloaded, text: str, limit: int) -> None:
    bodies = pages(tool, tool.store.put(text).id, limit)
    for first, second in pairwise(bodies):
        assert not (first[-1] == "\ud83d" and second[0] == "\ude00")
    # So a way through JSON, which joins pairs, is the same for the pages as for the whole.
    assert "".join(json.loads(json.dumps(body)) for body in bodies) == json.loads(json.dumps(text))


def test_pages_are_cut_by_characters(tool: ReadOffloaded, ref: str) -> None:
    assert tool(ref) == "[chars 0-7 of 10; next page: offset=7]\n0123456"
    assert tool(ref, 7) == "[chars 7-10 of 10; end]\n789"
    assert tool(ref, 2, 3) == "[chars 2-5 of 10; next page: offset=5]\n234"
    assert tool(ref, 0, 1000).startswith("[chars 0-7 of 10;")  # a page never exceeds page_chars
    assert tool(tool.store.put("").id) == "[chars 0-0 of 0; end]\n"


def test_a_page_is_4000_characters_unless_set(tool: ReadOffloaded) -> None:
    text = "x" * 9000
    answer = ReadOffloaded(tool.store)(tool.store.put(text).id)
    assert answer == "[chars 0-4000 of 9000; next page: offset=4000]\n" + text[:4000]


def test_a_page_that_holds_nothing_is_refused(tool: ReadOffloaded) -> None:
    with pytest.raises(ConfigurationError, match="page_chars=0"):
        ReadOffloaded(tool.store, page_chars=0)


def test_the_ref_may_be_the_whole_line_or_quoted(tool: ReadOffloaded, ref: str) -> None:
    whole = reference_text(tool.store.put("0123456789"), "0123456789")
    assert tool(whole) == tool(f'"{ref}"') == tool(f" {ref}\n") == tool(ref)


@pytest.mark.parametrize("arguments", ['{"ref": "%s"}', '{"ref": "%s", "offset": null, "limit": null, "why": 1}'])
def test_run_takes_raw_arguments(tool: ReadOffloaded, ref: str, arguments: str) -> None:
    assert tool.run(arguments % ref) == tool(ref)


@pytest.mark.parametrize("offset", [7, 7.0, "7"])
def test_run_takes_numbers_as_models_write_them(tool: ReadOffloaded, ref: str, offset: object) -> None:
    assert tool.run(json.dumps({"ref": ref, "offset": offset})) == tool(ref, 7)


MALFORMED = ["", "{", "[" * 100_000, "null", "[]", '"ref"', "{}", "1" * 5000, '{"offset": 0}', "\ud800", "\0"]


@pytest.mark.parametrize("arguments", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_arguments_get_an_answer(tool: ReadOffloaded, arguments: str) -> None:
    answer = tool.run(arguments)
    assert answer.startswith("[read_offloaded: the argument")
    assert '"ref"' in answer
    assert len(answer) < 300


@pytest.mark.parametrize("value", ["-1", "1.5", "true", '"x"', '"٣"', "[]", "{}", "NaN", "Infinity", "1e999", '"-1"'])
@pytest.mark.parametrize("name", ["offset", "limit"])
def test_impossible_numbers_get_an_answer(tool: ReadOffloaded, ref: str, name: str, value: str) -> None:
    answer = tool.run(f'{{"ref": "{ref}", "{name}": {value}}}')
    assert answer.startswith(f"[read_offloaded: {name} must be a whole number of at least")


@pytest.mark.parametrize("offset", [10, 11, 10**30])
def test_an_offset_past_the_end_gets_the_length(tool: ReadOffloaded, ref: str, offset: int) -> None:
    assert tool(ref, offset) == f"[read_offloaded: offset={offset} is past the end: the output has 10 chars]"


@pytest.mark.parametrize("bad", ["ab" * 10, "../../etc/passwd", "", "x" * 10_000, "\0", "\ud800"])
def test_an_unknown_ref_gets_an_answer(tool: ReadOffloaded, bad: str) -> None:
    answer = tool(bad)
    assert answer.startswith("[read_offloaded: no output is stored under ref=")
    assert len(answer) < 300
    assert tool.run(json.dumps({"ref": bad})) == answer


@pytest.mark.parametrize("bad", [None, 5, ["ab"], {}])
def test_a_ref_that_is_no_text_gets_an_answer(tool: ReadOffloaded, bad: object) -> None:
    assert tool.run(json.dumps({"ref": bad})).startswith("[read_offloaded: ref must be a string, not ")


def test_a_store_that_fails_is_told_to_the_model_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tool = ReadOffloaded(OffloadStore(tmp_path))
    ref = tool.store.put("output").id

    def get(*_: object) -> str:
        raise StoreUnavailableError("no disk")

    monkeypatch.setattr(OffloadStore, "get", get)
    with caplog.at_level(logging.WARNING):
        assert "cannot be read now; run the original tool again" in tool(ref)
    assert "no disk" in caplog.text


RESPONSES_TOOL: dict[str, Any] = {"type": "function", "name": "read_offloaded", "parameters": {}}
OTHER_TOOL: dict[str, Any] = {"type": "function", "function": {"name": "grep"}}


@pytest.mark.parametrize("tools", [[READ_OFFLOADED_TOOL], [OTHER_TOOL, READ_OFFLOADED_TOOL], [RESPONSES_TOOL]])
def test_the_tool_is_found(tools: list[dict[str, Any]]) -> None:
    assert has_read_tool(Prompt(tools=tools))
    require_read_tool(Prompt(tools=tools))


@pytest.mark.parametrize("tools", [[], [OTHER_TOOL], [{}], [{"function": None}], [{"type": "read_offloaded"}]])
def test_an_agent_without_the_tool_is_refused(tools: list[dict[str, Any]]) -> None:
    assert not has_read_tool(Prompt(tools=tools))
    with pytest.raises(ConfigurationError, match=r"READ_OFFLOADED_TOOL.*allow_unreadable=True"):
        require_read_tool(Prompt(tools=tools))


def test_the_definition_is_what_the_tool_takes(tool: ReadOffloaded, ref: str) -> None:
    function = READ_OFFLOADED_TOOL["function"]
    assert json.loads(json.dumps(READ_OFFLOADED_TOOL)) == READ_OFFLOADED_TOOL
    given_all = {"ref": ref, "offset": 1, "limit": 2}
    assert set(function["parameters"]["properties"]) == set(given_all)
    assert tool(**given_all) == tool.run(json.dumps(given_all))  # pyright: ignore[reportArgumentType]

"""One field of partial tool-call JSON: certain text at once, never a retraction."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from smoothagent.jsonstream import FieldStream

TEXT = st.text() | st.text(st.sampled_from('\\"/u\n\t\x00dD8aé漢😀{}[]:, instruction'))
SCALAR = st.none() | st.booleans() | st.floats() | st.integers() | TEXT
JSON = st.recursive(SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3))
FIELD = "instruction"


@st.composite
def documents(draw: st.DrawFn) -> tuple[dict[str, Any], str]:
    before = draw(st.dictionaries(TEXT | st.sampled_from(["a", '"instruction":']), JSON, max_size=3))
    after = draw(st.dictionaries(TEXT, JSON, max_size=2))
    nested = draw(st.booleans())
    value: dict[str, Any] = {k: v for k, v in before.items() if k != FIELD}
    if nested:
        value["nested"] = [{FIELD: "not this one"}]
    value[FIELD] = draw(TEXT)
    value |= {k: v for k, v in after.items() if k != FIELD}
    indent = draw(st.none() | st.integers(0, 2))
    return value, json.dumps(value, ensure_ascii=draw(st.booleans()), indent=indent)


def cut(text: str, at: list[int]) -> list[str]:
    places = sorted({0, len(text), *(a % (len(text) + 1) for a in at)})
    return [text[i:j] for i, j in pairwise(places)]


@given(documents(), st.lists(st.integers(0, 10_000), max_size=40))
@example(({FIELD: "😀"}, '{"instruction": "\\ud83d\\ude00"}'), list(range(40)))
@example(({FIELD: "\\ud83d"}, '{"instruction": "\\\\ud83d"}'), list(range(40)))
def test_always_a_prefix_and_in_the_end_everything(document: tuple[dict[str, Any], str], at: list[int]) -> None:
    value, text = document
    stream = FieldStream(FIELD)
    got = ""
    for fragment in cut(text, at):
        got += stream.feed(fragment)
        assert value[FIELD].startswith(got)
    assert stream.broken is None
    assert got == value[FIELD]
    assert stream.complete


@given(documents())
def test_fragments_do_not_matter(document: tuple[dict[str, Any], str]) -> None:
    value, text = document
    stream = FieldStream(FIELD)
    assert "".join(map(stream.feed, text)) == value[FIELD]


@given(documents(), st.integers(0, 200), st.text(max_size=5))
def test_what_is_broken_never_raises_or_retracts(
    document: tuple[dict[str, Any], str], where: int, garbage: str
) -> None:
    """What came before the damage stays right; afterwards nothing more comes."""
    value, text = document
    where %= len(text)
    stream = FieldStream(FIELD)
    got = stream.feed(text[:where])
    assert value[FIELD].startswith(got)
    stream.feed(garbage)
    if stream.broken is not None:
        assert stream.feed(text[where:]) == ""


@pytest.mark.parametrize(
    ("text", "certain"),
    [
        ('{"f": "ab', "ab"),
        ('{"f": "ab\\', "ab"),
        ('{"f": "ab\\u', "ab"),
        ('{"f": "ab\\u00e', "ab"),
        ('{"f": "ab\\u00e9', "abé"),
        ('{"f": "ab\\ud83d', "ab"),
        ('{"f": "ab\\ud83d\\', "ab"),
        ('{"f": "ab\\ud83d\\ude0', "ab"),
        ('{"f": "ab\\ud83d\\ude00', "ab😀"),
        ('{"f": "ab\\n\\"', 'ab\n"'),
        ('{"g": "\\"f\\": \\"no\\"", "f', ""),
        ('{"g": {"f": "no"}, "h": ["f", "no"], "f": "y', "y"),
        ('{"\\u0066": "escaped name', "escaped name"),
        ('  {"g": -1.5e3 , "f" : "y', "y"),
        ('{"g": "\\ud83d", "f": "y', "y"),
        ("{}", ""),
        ("", ""),
    ],
)
def test_certain_text(text: str, certain: str) -> None:
    for stream, fragments in ((FieldStream("f"), [text]), (FieldStream("f"), list(text))):
        assert "".join(map(stream.feed, fragments)) == certain
        assert stream.broken is None
        assert not stream.complete


@pytest.mark.parametrize(
    ("text", "certain", "reason"),
    [
        ("[1]", "", "not a JSON object, at character 0"),
        ('"f"', "", "not a JSON object"),
        ('{"f": 12}', "", "'f' is not a string, at character 6"),
        ('{"f": {"f": "x"}}', "", "'f' is not a string"),
        ('{"f": "a", "f": "b"}', "a", "'f' appears twice"),
        ('{"f": "a\nb"}', "a", "control character"),
        ('{"f": "a\\x"}', "a", "unknown escape"),
        ('{"f": "a\\ud83dx"}', "a", "lone surrogate"),
        ('{"f": "a\\ude00"}', "a", "lone surrogate .*at character 8"),
        ('{"f": "a\ude00"}', "a", "lone surrogate"),
        ('{"f": "a"} {', "a", "after the end"),
        ('{"f" "a"}', "", "expected :"),
        ('{"f": "a" "b"}', "a", "expected ,"),
        ('{"f": "a",}', "a", "expected name"),
        ('{"g": [1,]}', "", "expected value"),
        ('{"g": [1}', "", "expected ,"),
        ('{"g": nope, "f": "a"}', "", "expected value"),
        ('{"g": 01, "f": "a"}', "", "expected value"),
        ("{f: 1}", "", "expected name or }"),
        ('{"g": }', "", "expected value"),
        ('{{"f": "a"}', "", "expected name or }"),
    ],
)
def test_malformed(text: str, certain: str, reason: str) -> None:
    stream = FieldStream("f")
    assert "".join(map(stream.feed, text)) == certain
    assert stream.broken is not None
    assert re.search(reason, stream.broken), stream.broken


def test_a_character_that_the_transport_cut_in_two() -> None:
    stream = FieldStream("f")
    assert stream.feed('{"f": "a\ud83d') == "a"
    assert stream.feed("\ude00b") == "😀b"
    assert stream.feed('"}') == ""
    assert stream.complete


@pytest.mark.parametrize("size", [1, 7, 20])
def test_scans_each_character_once(size: int) -> None:
    """No timing: the text that is looked at again is what was held back, at most one escape."""
    text = json.dumps({FIELD: "line\n é😀 " * 2000})
    stream = FieldStream(FIELD)
    for i in range(0, len(text), size):
        stream.feed(text[i : i + size])
        assert len(stream.pending) <= 12
    assert stream.complete

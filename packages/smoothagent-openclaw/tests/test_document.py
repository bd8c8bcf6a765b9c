"""A user's JSON5 file: changed where it is changed, and nowhere else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from json5.loader import loads

from smoothagent import ConfigurationError
from smoothagent_openclaw.document import MISSING, Document

USERS = """// my claw
{
  gateway: { port: 18792, /* mine */ auth: { mode: 'token' } },
  "models": {
    // local ones
    "providers": {
      sa: {
        baseUrl: 'http://127.0.0.1:1234/v1', // llama
        models: [
          { id: "m", contextWindow: 32768, },
          { id: "n" },
        ],
      },
    },
  },
  agents: { defaults: { model: { primary: "sa/m" } } }, // last
}
// end
"""


def test_a_value_is_replaced_and_all_else_stays() -> None:
    made = Document(USERS).set(["models", "providers", "sa", "baseUrl"], "http://127.0.0.1:8091/v1")
    assert made.text == USERS.replace("'http://127.0.0.1:1234/v1'", '"http://127.0.0.1:8091/v1"')
    made = made.set(["models", "providers", "sa", "models", 0, "contextWindow"], 100)
    assert made.text.count("contextWindow: 100, }") == 1
    assert "// llama" in made.text


def test_fields_are_added_where_they_belong() -> None:
    made = Document(USERS).set(["agents", "defaults", "compaction", "enabled"], False)
    assert made.get(["agents", "defaults", "compaction", "enabled"]) is False
    assert "// last" in made.text
    made = made.set(["models", "providers", "sa", "api"], "openai-completions")
    assert '\n        "api": "openai-completions"' in made.text
    assert loads(made.text)["models"]["providers"]["sa"]["models"][1] == {"id": "n"}
    assert Document("{}").set(["a", "b"], 1).text == '{\n  "a": {\n    "b": 1\n  }\n}'
    assert Document("{ // nothing\n}").set(["a"], 1).get(["a"]) == 1


def test_what_was_added_is_taken_out_again() -> None:
    for path in (["agents", "defaults", "compaction"], ["gateway", "x"], ["new"], ["models", "providers", "sa", "api"]):
        document = Document(USERS)
        made = document.set(path, {"enabled": False})
        assert loads(made.remove(path).text) == loads(USERS)
        assert made.remove(path).text.replace("\n", "").replace(" ", "") == USERS.replace("\n", "").replace(" ", "")
    assert Document(USERS).remove(["nothing", "there"]).text == USERS


@pytest.mark.parametrize("text", ["", "[1]", "{", "{a}", "{a:1 b:2}", '"x"'])
def test_what_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"is not JSON5|no object"):
        Document(text, "openclaw.json")


def test_a_field_below_what_is_no_object_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"gateway\.port is no object"):
        Document(USERS).set(["gateway", "port", "x"], 1)


NAMES = st.sampled_from(["a", "b", "c d", "é", "$x"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1000, 1000) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


def rendered(value: Any, draw: Any, indent: str = "") -> str:
    """JSON5 as somebody may write it."""
    told: Any = value
    if isinstance(value, dict) and told:
        comment = draw(st.sampled_from(["", " // said\n", " /* said, } */ "]))
        lines = draw(st.booleans())
        space = f"\n{indent}  " if lines else " "
        pairs = [f"{json.dumps(k)}: {rendered(v, draw, indent + '  ')}" for k, v in told.items()]
        trailing = draw(st.sampled_from(["", ","]))
        return "{" + comment + space + f",{space}".join(pairs) + trailing + (f"\n{indent}" if lines else " ") + "}"
    if isinstance(value, list):
        return "[" + ", ".join(rendered(v, draw, indent) for v in told) + "]"
    return json.dumps(value, ensure_ascii=False)


@given(st.data(), st.dictionaries(NAMES, VALUES, max_size=4), st.lists(NAMES, min_size=1, max_size=3), VALUES)
def test_a_change_is_that_change(data: st.DataObject, value: dict[str, Any], path: list[str], new: Any) -> None:
    text = rendered(value, data.draw)
    document = Document(text)
    assert loads(text) == value
    expected: Any = json.loads(json.dumps(value))
    at: Any = expected
    for name in path[:-1]:
        if name not in at:
            at[name] = {}
        at = at[name]
        if not hasattr(at, "keys"):
            with pytest.raises(ConfigurationError):
                document.set(path, new)
            return
    before: Any = at.get(path[-1], MISSING)
    at[path[-1]] = new
    made = document.set(path, new)
    assert loads(made.text) == expected
    assert made.text.count("said") == text.count("said") or before is not MISSING
    if before is MISSING:
        del at[path[-1]]
        assert loads(made.remove(path).text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{a: []}", '{a: [\n  "x"\n]}'),
        ("{a: [1]}", '{a: [1, "x"]}'),
        ("{a: [1,]}", '{a: [1, "x",]}'),
        ("{\n  a: [\n    1, // one\n    2 // two\n  ]\n}", '{\n  a: [\n    1, // one\n    2, // two\n    "x"\n  ]\n}'),
        ("{\n  a: [\n    1, // one\n  ],\n}", '{\n  a: [\n    1, // one\n    "x",\n  ],\n}'),
    ],
)
def test_a_value_is_added_to_a_list(text: str, expected: str) -> None:
    made = Document(text).append(["a"], "x")
    assert made.text == expected
    values = made.get(["a"])
    assert made.remove(["a", len(values) - 1]).get(["a"]) == values[:-1]
    assert made.remove(["a", 0]).get(["a"]) == values[1:]


@pytest.mark.parametrize("text", ["{\n  a: 1, // note\n}", "{\n  a: 1 // note\n}", "{\n  a: 1, /* note */\n}"])
def test_a_comment_stays_on_its_line(text: str) -> None:
    lines = Document(text).set(["b"], 2).text.split("\n")
    assert "note" in lines[1]
    assert lines[1].lstrip().startswith("a: 1,")


def test_nothing_is_added_to_what_is_no_list() -> None:
    assert Document("{}").append(["a", "b"], 1).get(["a", "b"]) == [1]
    with pytest.raises(ConfigurationError, match=r"gateway\.port is no list"):
        Document(USERS).append(["gateway", "port"], 1)

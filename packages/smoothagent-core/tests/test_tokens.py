"""Counting: all that is sent, every script, and the calibration by the server's usage."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smoothagent.errors import ConfigurationError
from smoothagent.message import Message, ToolCall
from smoothagent.prompt import Prompt
from smoothagent.tokens import MEDIA_TOKENS, EstimateCounter, FunctionCounter, TokenCounter

ANY_TEXT = st.text(st.characters(codec=None))  # lone surrogates and NULs too


def text_tokens(text: str) -> int:
    counter = EstimateCounter()
    return counter.count(Message("user", text)) - counter.count(Message("user", ""))


def test_both_are_counters() -> None:
    assert isinstance(EstimateCounter(), TokenCounter)
    assert isinstance(FunctionCounter(len), TokenCounter)


@given(ANY_TEXT, ANY_TEXT)
def test_additive_and_monotone(a: str, b: str) -> None:
    both = text_tokens(a + b)
    assert both >= max(text_tokens(a), text_tokens(b))
    # A high and a low surrogate that meet stay two code points here, so nothing merges.
    assert abs(both - text_tokens(a) - text_tokens(b)) <= 2


@given(ANY_TEXT, st.floats(0.25, 4))
def test_deterministic_given_its_calibration(text: str, factor: float) -> None:
    one, two = EstimateCounter(), EstimateCounter()
    for counter in (one, two):
        counter.observe(1000, math.ceil(1000 * factor))
    assert one.count(Message("user", text)) == two.count(Message("user", text))


# Tokens that cl100k_base (GPT-4) and o200k_base (GPT-4o) make of these texts.
SCRIPTS = {
    "prose": (
        "Agents keep their context small by transforming it: summarizing old turns and moving tool outputs to files.",
        20,
        20,
    ),
    "python": ("def read(path: str) -> list[str]:\n    with open(path) as f:\n        return f.readlines()\n", 23, 23),
    "digits": ("2026-11-30 12:45:07.123 status=200 took 0.531s", 23, 23),
    "chinese": ("人工智能代理通过压缩上下文来保持提示简短，但每次压缩都会改变前缀，从而使键值缓存失效。", 50, 32),
    "japanese": (
        "会議の議事録を要約してください。明日までにテストの結果を送ってください。よろしくお願いします。",
        42,
        27,
    ),
    "korean": ("회의록을 요약해 주세요. 내일까지 테스트 결과를 모두에게 보내 주시기 바랍니다. 감사합니다.", 41, 23),
}


@pytest.mark.parametrize("kind", SCRIPTS)
def test_near_real_tokenizers_before_any_usage(kind: str) -> None:
    """langchain#39754: East Asian text was undercounted 2-3 times."""
    text, gpt4, gpt4o = SCRIPTS[kind]
    assert min(gpt4, gpt4o) * 0.7 <= text_tokens(text) <= 2 * max(gpt4, gpt4o)
    assert text_tokens(text) >= 0.75 * max(gpt4, gpt4o)


def test_wide_characters_cost_about_a_token_each() -> None:
    for text in ("漢" * 100, "か" * 100, "한" * 100):
        assert 80 <= text_tokens(text) <= 150


@pytest.mark.parametrize("counter", [EstimateCounter(), FunctionCounter(lambda text: len(text.split()))])
def test_everything_sent_is_counted(counter: TokenCounter) -> None:
    """langchain#34664: system text, tools and call arguments were left out."""
    plain = counter.count(Message("assistant", "done"))
    small = counter.count(Message("assistant", "done", (ToolCall("1", "read", "{}"),)))
    large = counter.count(Message("assistant", "done", (ToolCall("1", "read", '{"path": "' + "a b " * 50 + '"}'),)))
    assert plain < small < large
    assert counter.count(Message("assistant", "done", (ToolCall("1", "read", "{}"), ToolCall("2", "ls", "{}")))) > small
    assert counter.count(Message("user", "done", name="some one")) > plain
    assert counter.fixed(Prompt()) == 0
    system = counter.fixed(Prompt(system="You are careful."))
    tool = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}
    assert 0 < system < counter.fixed(Prompt(system="You are careful.", tools=[tool]))
    assert counter.fixed(Prompt(tools=[tool])) < counter.fixed(Prompt(tools=[tool, tool]))


@pytest.mark.parametrize("counter", [EstimateCounter(), FunctionCounter(len)])
def test_parts(counter: TokenCounter) -> None:
    empty = counter.count(Message("user", ""))
    text = Message("user", ({"type": "text", "text": "look at this"},))
    assert counter.count(text) == counter.count(Message("user", "look at this"))
    image = Message("user", ({"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}},))
    assert counter.count(image) == empty + MEDIA_TOKENS
    unknown = Message("user", ({"type": "thinking", "thinking": "word " * 100},))
    assert counter.count(unknown) > empty + 50
    assert counter.count(Message("user", None)) == empty


def test_first_usage_sets_the_factor() -> None:
    counter = EstimateCounter()
    message = Message("user", "word " * 200)
    before = counter.count(message)
    assert not counter.calibrated
    counter.observe(before, before * 2)
    assert counter.calibrated
    assert counter.factor == 2.0
    assert counter.count(message) == pytest.approx(before * 2, abs=2)


def test_one_odd_usage_moves_it_little() -> None:
    counter = EstimateCounter()
    counter.observe(1000, 1000)
    counter.observe(1000, 50_000)
    assert 1.0 < counter.factor <= 1.105
    counter.observe(1000, 1)
    assert counter.factor == pytest.approx(1.0, abs=0.05)


def test_small_or_empty_usage_is_ignored() -> None:
    counter = EstimateCounter()
    counter.observe(31, 3000)
    counter.observe(1000, 0)
    counter.observe(-5, 10)
    assert not counter.calibrated


@given(st.floats(0.3, 3.5), st.lists(st.integers(100, 100_000), min_size=60, max_size=60))
def test_converges_to_the_model_s_rate(rate: float, raw: list[int]) -> None:
    counter = EstimateCounter()
    counter.observe(1000, 1000)
    for n in raw:
        counter.observe(round(n * counter.factor), round(n * rate))
    assert counter.factor == pytest.approx(rate, rel=0.05)


@given(st.lists(st.tuples(st.integers(-10, 10**7), st.integers(-10, 10**7))))
def test_factor_stays_in_bounds(usages: list[tuple[int, int]]) -> None:
    counter = EstimateCounter()
    for estimated, actual in usages:
        counter.observe(estimated, actual)
        assert 0.25 <= counter.factor <= 4.0


def test_function_counter_adds_the_template_and_hides_surrogates() -> None:
    seen: list[str] = []

    def tokens(text: str) -> int:
        text.encode()  # as a real tokenizer would, refuse lone surrogates
        seen.append(text)
        return len(text)

    counter = FunctionCounter(tokens, per_message=7)
    assert counter.count(Message("user", "ab\udc80")) == 7 + 3
    assert seen == ["ab?"]
    with pytest.raises(ConfigurationError, match="per_message=-1"):
        FunctionCounter(len, per_message=-1)

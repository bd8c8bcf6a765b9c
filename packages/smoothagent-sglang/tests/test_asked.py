"""What a request and an operator may ask for, and what is said of anything else."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from smoothagent_sglang.asked import Asked, asked
from smoothagent_sglang.engine import refused_version, version_of
from smoothagent_sglang.errors import SettingError
from smoothagent_sglang.latency import BatchLatency, Load, chunk
from smoothagent_sglang.learning import Learner
from smoothagent_sglang.settings import Settings, read_settings, settings_of


@pytest.mark.parametrize("params", [None, {}, {"lookahead": 0}, {"other": 1}, "x", [1]])
def test_anything_else_is_a_live_request(params: object) -> None:
    assert asked(params) is None


def test_a_lookahead_request_says_its_number_and_its_deadline() -> None:
    assert asked({"lookahead": 1}) == Asked(None, math.inf)
    assert asked({"lookahead": 1, "lookahead_id": 7, "deadline": 2}) == Asked(7, 2.0)


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"lookahead": 2}, "'lookahead'"),
        ({"lookahead": True}, "'lookahead'"),
        ({"lookahead": "be"}, "'lookahead'"),
        ({"lookahead": 1, "deadline": -1}, "'deadline'"),
        ({"lookahead": 1, "deadline": float("nan")}, "'deadline'"),
        ({"lookahead": 1, "deadline": "soon"}, "'deadline'"),
        ({"lookahead": 1, "lookahead_id": "x"}, "'lookahead_id'"),
        ({"lookahead": 1, "lookahead_id": True}, "'lookahead_id'"),
    ],
)
def test_what_is_impossible_is_said(params: dict[str, Any], says: str) -> None:
    told = asked(params)
    assert isinstance(told, str)
    assert says in told


def test_settings_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text('tbt = 0.05\nbe_decodes = 2\nprofile = "p.json"\nstrict = true\n')
    assert read_settings(path) == Settings(tbt=0.05, be_decodes=2, profile=tmp_path / "p.json", strict=True)
    path.write_text("tbt = ")
    with pytest.raises(SettingError, match=r"s\.toml"):
        read_settings(path)


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"tbt": 0}, "tbt is 0"),
        ({"be_step": -1.0}, "be_step"),
        ({"share": 1.5}, "share is 1.5"),
        ({"share": 0}, "share"),
        ({"lease": -1}, "lease"),
        ({"be_decodes": -1}, "be_decodes"),
        ({"be_decodes": 1.5}, "be_decodes"),
        ({"piece": 0}, "piece"),
        ({"tbt": "50ms"}, "'50ms'"),
        ({"tbt": True}, "True"),
        ({"strict": 1}, "true or false"),
        ({"profile": 3}, "a path"),
        ({"tpt": 0.1}, "'tpt' is no setting"),
    ],
)
def test_settings_that_cannot_be_are_said(told: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        settings_of(told)


def test_versions_outside_the_range_are_refused() -> None:
    assert version_of("0.5.10.post1") == (0, 5, 10)
    assert refused_version("0.5.9") is None
    assert refused_version("0.5.23") is None
    for version in ("0.5.8", "0.5.24", "0.6.0", "1.0", "unknown"):
        assert version in str(refused_version(version))


# ---- what a server's own batches teach ---------------------------------------------------------

TRUE = BatchLatency(((1, 0.0102), (2, 0.0104)), 2e-7, 3e-9)


def _batches(seed: int, count: int) -> list[Load]:
    rng = random.Random(seed)
    return [
        Load(n, n * rng.randrange(50, 4000), 0)
        if (n := rng.choice([0, 1, 3, 6]))
        else chunk(rng.randrange(16, 512), rng.randrange(4000))
        for _ in range(count)
    ]


def _known(learner: Learner) -> BatchLatency:
    assert learner.latency is not None
    return learner.latency


def test_it_is_learned_from_batches_however_they_vary() -> None:
    learner, rng = Learner(), random.Random(1)
    for load in _batches(2, 5):
        learner.observe(load, TRUE.estimate(load))
    assert learner.latency is None, "five batches say nothing"
    for load in _batches(3, 400):
        learner.observe(load, TRUE.estimate(load) * rng.uniform(0.9, 1.1) * (20 if rng.random() < 0.03 else 1))
    latency = _known(learner)
    errors = sorted(abs(latency.estimate(load) / TRUE.estimate(load) - 1) for load in _batches(4, 200))
    assert errors[100] < 0.05
    assert errors[190] < 0.15


def test_a_profile_is_multiplied_by_what_the_server_takes() -> None:
    learner = Learner(TRUE)
    for load in _batches(5, 400):
        learner.observe(load, 1.5 * TRUE.estimate(load))
    assert learner.latency is not None
    load = chunk(300, 1000)
    assert learner.latency.estimate(load) == pytest.approx(1.5 * TRUE.estimate(load), rel=0.01)


def test_nothing_odd_is_learned() -> None:
    learner = Learner()
    for seconds in (0.0, -1.0):
        learner.observe(Load(4, 100, 0), seconds)
    learner.observe(Load(), 1.0)
    assert learner.batches == 0

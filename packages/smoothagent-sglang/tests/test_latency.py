"""The batch-latency model says what Eq. 1 says, and a fit finds what made the times."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference import batch_seconds
from smoothagent_sglang.errors import ProfileError
from smoothagent_sglang.fitting import Measured, fit, residuals
from smoothagent_sglang.latency import BatchLatency, Load, chunk, decode
from smoothagent_sglang.physics import QWEN3_8B, QWEN3_32B, Device, check, floor
from test_policy import MODELS

H100 = Device("H100 SXM", 989e12, 3.35e12)


@given(
    MODELS, st.lists(st.integers(1, 9000), max_size=5), st.lists(st.tuples(st.integers(1, 300), st.integers(0, 9000)))
)
def test_loads_add_up_to_the_batch(model: BatchLatency, decodes: list[int], chunks: list[tuple[int, int]]) -> None:
    load = Load()
    for length in decodes:
        load = load.plus(decode(length))
    for tokens, prefix in chunks:
        load = load.plus(chunk(tokens, prefix))
    assert model.estimate(load) == pytest.approx(batch_seconds(model, decodes, chunks), rel=1e-12, abs=1e-15)


@given(MODELS, st.integers(0, 3000), st.integers(0, 3000))
def test_the_table_goes_on_in_straight_lines(model: BatchLatency, a: int, b: int) -> None:
    low, high = sorted((a, b))
    assert model.gemm(low) <= model.gemm(high) + 1e-12
    for tokens, seconds in model.table:
        assert model.gemm(tokens) == pytest.approx(seconds)
    last = model.table[-1][0]
    if low > last:
        middle = model.gemm((low + high) // 2)
        assert model.gemm(low) - 1e-12 <= middle <= model.gemm(high) + 1e-12


def test_between_entries_it_interpolates() -> None:
    model = BatchLatency(((8, 0.01), (16, 0.03)), 1e-6, 1e-9)
    assert [model.gemm(m) for m in (0, 1, 8, 12, 16, 24)] == pytest.approx([0, 0.01, 0.01, 0.02, 0.03, 0.05])
    assert model.estimate(Load(12, 1000, 10**6)) == pytest.approx(0.02 + 0.001 + 0.001)
    assert model.tokens_alone().estimate(Load(12, 1000, 10**6)) == pytest.approx(0.02)
    assert model.scaled(2).estimate(Load(12, 1000, 10**6)) == pytest.approx(0.044)


@pytest.mark.parametrize(
    ("table", "decode", "prefill", "says"),
    [
        ((), 0, 0, "no entries"),
        (((0, 0.1),), 0, 0, "0 tokens"),
        (((4, 0.0),), 0, 0, "0.0 s"),
        (((4, float("nan")),), 0, 0, "nan"),
        (((4, 0.2), (4, 0.3)), 0, 0, "must rise"),
        (((4, 0.2), (8, 0.1)), 0, 0, "no less time"),
        (((4, 0.2),), -1e-9, 0, "'decode'"),
        (((4, 0.2),), 0, float("inf"), "'prefill'"),
    ],
)
def test_what_cannot_be_is_refused(
    table: tuple[tuple[int, float], ...], decode: float, prefill: float, says: str
) -> None:
    with pytest.raises(ProfileError, match=says):
        BatchLatency(table, decode, prefill)


# ---- fitting -----------------------------------------------------------------------------------

TRUE = BatchLatency(((16, 0.004), (128, 0.005), (512, 0.012), (1024, 0.024)), 2e-8, 5e-10)


def batches(seed: int, count: int, *, noise: float = 0.0) -> list[Measured]:
    """Prefill, decode and mixed ones, as a server has them."""
    rng, made = random.Random(seed), list[Measured]()
    for _ in range(count):
        load = Load()
        for _ in range(rng.choice([0, 0, 1, 2, 3, 5, 8])):
            load = load.plus(decode(rng.randrange(100, 8000)))
        for _ in range(rng.choice([0, 1, 1, 3]) or (0 if load.tokens else 1)):
            load = load.plus(chunk(rng.choice([32, 64, 128, 256]), rng.randrange(0, 8000)))
        made.append(Measured(load, TRUE.estimate(load) * (1 + rng.uniform(-noise, noise))))
    return made


@given(st.integers(0, 1000))
def test_a_fit_finds_what_made_the_times(seed: int) -> None:
    model = fit(batches(seed, 300))
    assert model.decode == pytest.approx(TRUE.decode, rel=0.05)
    assert model.prefill == pytest.approx(TRUE.prefill, rel=0.05)
    held_out = residuals(model, batches(seed + 1, 200))
    assert held_out.p50 < 0.01
    assert held_out.p95 < 0.05
    alone = residuals(fit(batches(seed, 300), attention=False), batches(seed + 1, 200))
    assert alone.p95 > 3 * held_out.p95, "tokens alone do not tell it"


def test_what_something_else_held_up_does_not_move_it() -> None:
    rng = random.Random(5)
    held_up = [
        Measured(load, seconds * (rng.choice([4, 10]) if rng.random() < 0.08 else 1))
        for load, seconds in batches(7, 400, noise=0.03)
    ]
    assert residuals(fit(held_up), batches(8, 200)).p95 < 0.05


def test_a_quantile_is_one_that_so_many_batches_are_not_above() -> None:
    measured = batches(3, 400, noise=0.2)
    model = fit(measured)
    for share in (0.5, 0.9, 0.95):
        within = sum(b.seconds <= model.estimate(b.load) * model.upper(share) for b in measured)
        assert abs(within / len(measured) - share) < 0.02
    assert TRUE.upper(0.95) == 1.0


def test_too_few_batches_are_no_profile() -> None:
    with pytest.raises(ProfileError, match="3 different batches"):
        fit(batches(1, 3))
    with pytest.raises(ProfileError, match="1 sizes"):
        fit([Measured(Load(8, c, 0), 0.1) for c in range(1, 20)])


# ---- physics -----------------------------------------------------------------------------------


def test_the_floor_is_the_roofline() -> None:
    # 6.95e9 parameters in the layers of Qwen3-8B: 13.9 GB read once, and two operations each for every token.
    assert QWEN3_8B.weights == pytest.approx(6.946e9, rel=0.001)
    assert floor(H100, QWEN3_8B, 1) == pytest.approx(13.89e9 / 3.35e12, rel=0.001)
    assert floor(H100, QWEN3_8B, 4096) == pytest.approx(2 * 6.946e9 * 4096 / 989e12, rel=0.001)
    assert floor(H100, QWEN3_32B._replace(tensor_parallel=4), 1) == pytest.approx(floor(H100, QWEN3_32B, 1) / 4)


def test_a_table_below_it_is_refused_by_its_entry() -> None:
    good = BatchLatency(((1, 0.006), (4096, 0.09)), 1e-7, 1e-8)
    check(good, H100, QWEN3_8B)
    with pytest.raises(ProfileError, match=r"entry \(4096 tokens, 0.05 s\).*H100.*Qwen3-8B"):
        check(BatchLatency(((1, 0.006), (4096, 0.05)), 1e-7, 1e-8), H100, QWEN3_8B)
    with pytest.raises(ProfileError, match="'decode'"):
        check(BatchLatency(good.table, 1e-9, 1e-8), H100, QWEN3_8B)
    with pytest.raises(ProfileError, match="'prefill'"):
        check(BatchLatency(good.table, 1e-7, 1e-12), H100, QWEN3_8B)

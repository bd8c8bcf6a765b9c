from __future__ import annotations

import inspect

import smoothagent_bench


def test_public_surface() -> None:
    assert sorted(smoothagent_bench.__all__) == smoothagent_bench.__all__
    for name in smoothagent_bench.__all__:
        member = getattr(smoothagent_bench, name)
        assert inspect.getdoc(member), f"{name} has no docstring"
        assert member.__module__.startswith("smoothagent_bench.")

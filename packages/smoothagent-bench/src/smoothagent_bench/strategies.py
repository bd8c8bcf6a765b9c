"""The strategies the benchmark knows, by the names its users type."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from smoothagent import Isolate, KeepRecent, LookaheadStrategy, Offload, OffloadStore, SlidingWindow, Summarize
from smoothagent.errors import ConfigurationError
from smoothagent_bench.workload import Profile

KINDS = ("offload", "keep-recent", "sliding-window", "summarize", "isolate")


@dataclass(frozen=True, slots=True)
class Variant:
    """A strategy as it is run and reported.

    Attributes:
        label: its name in results and plots.
        kind: one of `KINDS`.
        window_turns: turns of a sliding window, if not the profile's.
        stride: turns that a sliding window moves at once.
    """

    label: str
    kind: str
    window_turns: int | None = None
    stride: int = 1


def conversations(kinds: Iterable[str]) -> int:
    """How many conversations an agent has at most: a delegation is one of its own, with its own slots."""
    return 2 if "isolate" in kinds else 1


def variants(names: Sequence[str], *, window_turns: Sequence[int] = (), stride: int = 1) -> list[Variant]:
    """The variants to run, in the order given, each once.

    Args:
        names: strategy names.
        window_turns: window sizes to sweep; none: the profile's.
        stride: the sliding window's stride.

    Raises:
        ConfigurationError: an unknown name, or a window that no strategy given has.
    """
    for name in names:
        if name not in KINDS:
            raise ConfigurationError(f"unknown strategy {name!r}: choose from {', '.join(KINDS)}")
    if window_turns and "sliding-window" not in names:
        raise ConfigurationError(f"--window-turns {','.join(map(str, window_turns))} needs --strategy sliding-window")
    out: list[Variant] = []
    by = f" by {stride}" if stride != 1 else ""
    for name in dict.fromkeys(names):
        if name == "sliding-window" and window_turns:
            out += [Variant(f"{name}-{turns}{by}", name, turns, stride) for turns in window_turns]
        else:
            out.append(Variant(f"{name}{by if name == 'sliding-window' else ''}", name, None, stride))
    return out


def build(variant: Variant, profile: Profile, store: Path) -> LookaheadStrategy:
    """A fresh strategy object for one conversation.

    Args:
        variant: which one.
        profile: its limits.
        store: folder for offloaded outputs.
    """
    match variant.kind:
        case "offload":
            # The agent's decisions are scripted, so nothing would call the read-back tool; without its
            # definition the prompts of all strategies and modes are the same.
            return Offload(
                profile.offload_hard, keep=profile.keep_outputs, store=OffloadStore(store), allow_unreadable=True
            )
        case "keep-recent":
            return KeepRecent(profile.keep_turns, at_turns=profile.at_turns)
        case "sliding-window":
            return SlidingWindow(variant.window_turns or profile.window_turns, stride=variant.stride)
        case "summarize":
            return Summarize(
                profile.hard,
                keep=profile.keep,
                soft=profile.soft,
                max_tokens=profile.summary,
                # A small model does not stop where it should; a cut-off summary costs the same.
                accept_cut_off=True,
            )
        case _:
            return Isolate()


def reached_hard(variant: Variant, profile: Profile, *, turns: int, tokens: int) -> bool:
    """Whether the strategy's trigger is reached: the benchmark's own view of it, for any harness.

    Args:
        variant: the strategy.
        profile: its limits.
        turns: completed turns in the context.
        tokens: tokens of the next prompt.
    """
    match variant.kind:
        case "offload":
            return tokens >= profile.offload_hard
        case "summarize":
            return tokens >= profile.hard
        case "keep-recent":
            return turns >= profile.at_turns
        case "sliding-window":
            return turns > (variant.window_turns or profile.window_turns)
        case _:
            return False

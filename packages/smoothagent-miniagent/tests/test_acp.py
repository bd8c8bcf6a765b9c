"""Mini-Agent's own ACP server, changed as the page says; only where Mini-Agent itself is installed."""

from __future__ import annotations

# Mini-Agent is not installed where types are checked.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false, reportUntypedBaseClass=false
import asyncio
from pathlib import Path
from typing import Any

import pytest

from agent_server import AgentServer, serving
from mini import WORLDS, Look, World, home, settled
from smoothagent import KeepRecent
from smoothagent_miniagent import Attachment, attach

acp = pytest.importorskip("mini_agent.acp", reason="Mini-Agent is on git only: scripts/check_miniagent.py")


class Connection:
    """What the editor would be shown."""

    def __init__(self) -> None:
        self.updates = list[Any]()

    async def sessionUpdate(self, update: Any) -> None:  # noqa: N802  the protocol's name
        self.updates.append(update)


def test_its_sessions_are_kept_in_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mini_agent.config import AgentConfig, Config, LLMConfig, ToolsConfig

    home(monkeypatch, tmp_path)
    world: World = WORLDS[-1].values[0]()  # type: ignore[operator]
    attached = list[Attachment]()

    class Server(acp.MiniMaxACPAgent):
        async def newSession(self, params: Any) -> Any:  # noqa: N802
            made = await super().newSession(params)
            attached.append(attach(self._sessions[made.sessionId].agent, lambda: KeepRecent(2, at_turns=5)))
            return made

    async def main() -> tuple[AgentServer, Connection, list[Any]]:
        with serving(AgentServer(turns=12)) as server:
            look = Look(world, wait=lambda: settled(attached[0]))
            config = Config(
                llm=LLMConfig(api_key="x", api_base=server.url, model="m", provider="openai"),
                agent=AgentConfig(),
                tools=ToolsConfig(enable_file_tools=False, enable_bash=False, enable_note=False),
            )
            connection = Connection()
            one = Server(connection, config, world.openai(server.url), [look], "You are careful.")
            session = await one.newSession(acp.NewSessionRequest(cwd=str(tmp_path), mcpServers=[]))
            prompt = acp.PromptRequest(sessionId=session.sessionId, prompt=[acp.text_block("go")])
            answer = await one.prompt(prompt)
            assert answer.stopReason == "end_turn"
            messages = one._sessions[session.sessionId].agent.messages
            attached[0].detach()
            return server, connection, messages

    server, connection, messages = asyncio.run(main())
    assert len(messages) == 2 + 2 * 12 + 1, "the agent keeps all"
    assert len(server.main[-1]["messages"]) < 16
    assert server.prefills
    assert connection.updates
    for before, body in zip(server.main, server.main[1:], strict=False):
        if len(body["messages"]) <= len(before["messages"]):
            n = len(body["messages"]) - 2
            assert any(p["messages"][:n] == body["messages"][:n] for p in server.prefills), "a commit was warm"

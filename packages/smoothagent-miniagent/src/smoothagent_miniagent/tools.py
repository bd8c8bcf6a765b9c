"""Tools as Mini-Agent takes them, and one that reads offloaded outputs back."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from smoothagent import READ_OFFLOADED_TOOL, OffloadStore, ReadOffloaded


@dataclass(frozen=True, slots=True)
class Result:
    """What a tool returns (Mini-Agent's ``ToolResult``).

    Attributes:
        success: whether it worked.
        content: what the model gets then.
        error: what went wrong otherwise.
    """

    success: bool
    content: str = ""
    error: str | None = None


class Tool:
    """What Mini-Agent asks of a tool (``mini_agent/tools/base.py``)."""

    def __init__(self, name: str, description: str, parameters: Mapping[str, Any]) -> None:
        self.name, self.description, self.parameters = name, description, dict(parameters)

    def to_schema(self) -> dict[str, Any]:
        """In Anthropic's form."""
        return {"name": self.name, "description": self.description, "input_schema": self.parameters}

    def to_openai_schema(self) -> dict[str, Any]:
        """In OpenAI's form."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class ReadOffloadedTool(Tool):
    """Reads offloaded outputs back, page by page. `attach` adds it where the strategy offloads.

    Args:
        store: where the strategy puts outputs.
    """

    def __init__(self, store: OffloadStore) -> None:
        function = READ_OFFLOADED_TOOL["function"]
        super().__init__(function["name"], function["description"], function["parameters"])
        self._read = ReadOffloaded(store)

    async def execute(self, ref: str, offset: int = 0, limit: int | None = None) -> Result:
        """One page; what cannot be read is told to the model."""
        return Result(True, await asyncio.to_thread(self._read, ref, offset, limit))

"""The read-back tool as AutoGen's agents take it."""

from __future__ import annotations

from autogen_core.tools import FunctionTool

from smoothagent import READ_OFFLOADED_TOOL, OffloadStore, ReadOffloaded


def read_offloaded(store: OffloadStore) -> FunctionTool:
    """The tool ``read_offloaded``, which an agent with the strategy `Offload` needs.

    Args:
        store: where the strategy puts outputs.
    """
    definition = READ_OFFLOADED_TOOL["function"]
    read = ReadOffloaded(store)

    def read_offloaded(ref: str, offset: int = 0, limit: int | None = None) -> str:
        return read(ref, offset, limit)

    return FunctionTool(read_offloaded, description=str(definition["description"]), name=str(definition["name"]))

"""An agent with a SQLite checkpointer: ``resumed_agent.py URL DATABASE HANG``; goes on where the last one stopped.

Its tool hangs at call number HANG (0: never), after saying so, for the test to kill it there.
"""

# LangChain's own annotations are partial.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import sys
import time
from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.sqlite import SqliteSaver
from pydantic import SecretStr

from smoothagent_langchain import SummarizationMiddleware

CONFIG: Any = {"configurable": {"thread_id": "one"}, "recursion_limit": 500}
OUTPUT = "r" * 400


def main(url: str, database: str, hang: int) -> None:
    """Run to the end, or hang."""

    def look(number: int) -> str:
        """Look at something."""
        print(f"look {number}", flush=True)
        if number == hang:
            time.sleep(300)
        time.sleep(0.05)
        return f"{number} {OUTPUT}"

    model = ChatOpenAI(model="m", base_url=url, api_key=SecretStr("x"), max_retries=0, temperature=0)
    middleware: list[Any] = [SummarizationMiddleware(model, trigger=("tokens", 1000), keep=("messages", 4))]
    with SqliteSaver.from_conn_string(database) as saver:
        agent = create_agent(model, [look], system_prompt="You are careful.", middleware=middleware, checkpointer=saver)
        begun = agent.get_state(CONFIG).values.get("messages")
        task: Any = None if begun else {"messages": [HumanMessage("the task")]}
        # Each checkpoint is on disk before the next step begins; the default may lose the last one.
        out = agent.invoke(task, CONFIG, durability="sync")
        print(json.dumps([[m.type, m.text, m.id] for m in out["messages"]]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

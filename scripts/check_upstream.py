"""Run LangChain's and AutoGen's own tests of what we replace, on ours.

The tests are those of the installed version's source distribution, fetched through the configured index when this runs.
They run in an environment of their own, with our class in the place of the built-in. What ours does otherwise on
purpose is left out, by name and with the reason; one that is left out and passes is an error, too.

    python scripts/check_upstream.py [PYTEST-ARGUMENT ...]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("blockbuster", "pytest", "pytest-asyncio", "pytest-mock", "pytest-socket", "syrupy", "langchain-tests")


class Suite(NamedTuple):
    """Some of a distribution's tests.

    Attributes:
        distribution: whose source holds them.
        ours: the package of ours that covers it, with its extra.
        tools: what the tests need.
        tests: files.
        swap: a pytest plugin that puts ours in the place of theirs.
        exceptions: what ours does otherwise on purpose, with the reason.
        only: an expression for pytest's ``-k``, where some cannot run everywhere.
    """

    distribution: str
    ours: str
    tools: tuple[str, ...]
    tests: tuple[str, ...]
    swap: str
    exceptions: dict[str, str]
    only: str = ""


AUTOGEN_TOOLS = (
    *("pytest", "pytest-asyncio", "autogen-ext[anthropic,mcp,ollama,openai]", "autogen-agentchat", "tiktoken"),
    "mcp<2",  # which autogen-ext 0.7.5 does not take
)
AUTOGEN_SWAP = """
import sys

import autogen_agentchat.agents
import autogen_agentchat.teams
import autogen_agentchat.tools
import autogen_core.model_context
import smoothagent_autogen as ours

NAMES = [f"{kind}ChatCompletionContext" for kind in ("Buffered", "HeadAndTail", "TokenLimited", "Unbounded")]
for module in [m for name, m in sys.modules.items() if name.startswith(("autogen_core", "autogen_agentchat"))]:
    # Where a class is defined it stays, since ours is made of it.
    for name in [*NAMES, "AgentTool", "TeamTool"]:
        theirs = getattr(module, name, None)
        if theirs is not None and theirs.__module__ != module.__name__:
            setattr(module, name, getattr(ours, name))
"""


FOLDER = "tests/unit_tests/agents/middleware/implementations"
CHAINS = "tests/unit_tests/chains"
SUITES = (
    Suite(
        "langchain",
        "smoothagent-langchain",
        TOOLS,
        (f"{FOLDER}/test_summarization.py", f"{FOLDER}/test_context_editing.py"),
        """
import langchain.agents.middleware as middleware
import langchain.agents.middleware.context_editing as context_editing
import langchain.agents.middleware.summarization as summarization
from smoothagent_langchain import ContextEditingMiddleware, SummarizationMiddleware

middleware.SummarizationMiddleware = summarization.SummarizationMiddleware = SummarizationMiddleware
middleware.ContextEditingMiddleware = context_editing.ContextEditingMiddleware = ContextEditingMiddleware
""",
        {
            f"{FOLDER}/test_summarization.py"
            "::test_summarization_middleware_e2e_failure_raises_without_corrupting_history": (
                "a summary that fails leaves the history as it is and the agent goes on; the built-in raises"
            ),
        },
    ),
    Suite(
        "langchain-classic",
        "smoothagent-langchain[classic]",
        TOOLS,
        tuple(f"{CHAINS}/test_{name}.py" for name in ("memory", "summary_buffer_memory", "conversation")),
        """
import langchain_classic.chains.conversation.memory as conversation
import langchain_classic.memory as memory
import langchain_classic.memory.buffer_window
import langchain_classic.memory.summary
import langchain_classic.memory.summary_buffer
import langchain_classic.memory.token_buffer
from smoothagent_langchain import classic

MODULES = {
    "ConversationBufferWindowMemory": memory.buffer_window,
    "ConversationSummaryMemory": memory.summary,
    "ConversationSummaryBufferMemory": memory.summary_buffer,
    "ConversationTokenBufferMemory": memory.token_buffer,
}
for name, module in MODULES.items():
    for place in (module, memory, conversation):
        setattr(place, name, getattr(classic, name))
""",
        {},
    ),
    Suite(
        "autogen-core",
        "smoothagent-autogen",
        AUTOGEN_TOOLS,
        ("tests/test_model_context.py",),
        AUTOGEN_SWAP,
        {},
        only="not token_limited",  # which count with a tokenizer that is fetched from elsewhere
    ),
    Suite(
        "autogen-agentchat",
        "smoothagent-autogen",
        AUTOGEN_TOOLS,
        tuple(
            f"tests/test_{name}.py"
            for name in ("agent", "assistant_agent", "society_of_mind_agent", "group_chat", "task_runner_tool")
        ),
        AUTOGEN_SWAP,
        {
            f"tests/test_task_runner_tool.py::test_{kind}_tool_component": (
                "a component's configuration names our class, so that it is ours again when it is loaded"
            )
            for kind in ("agent", "team")
        },
        only="not declarative_groupchats_with_config",  # which want a key of OpenAI's
    ),
)


def main() -> int:
    """Run all suites; pytest's exit status, or 1 where an exception is none."""
    return max(check(suite) for suite in SUITES)


def check(suite: Suite) -> int:
    """Fetch, install, run."""
    release = version(suite.distribution)
    with tempfile.TemporaryDirectory(prefix="smoothagent-upstream-") as name:
        folder = Path(name)
        python = folder / "venv" / "bin" / "python"
        run("uv", "venv", "--quiet", "--no-project", "--seed", "--python", sys.executable, folder / "venv")
        run(
            *("uv", "pip", "install", "--quiet", "--python", python),
            *("--editable", "packages/smoothagent-core"),
            *("--editable", f"packages/{suite.ours}"),
            *(f"{suite.distribution}=={release}", *suite.tools),
        )
        run(
            *(python, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", suite.distribution),
            *(f"{suite.distribution}=={release}", "--dest", folder),
        )
        with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")
        tests = next(path for path in folder.glob(f"{suite.distribution.replace('-', '_')}-*") if path.is_dir())
        (tests / "swap_ours_in.py").write_text(suite.swap, encoding="utf-8")
        pytest = [python, "-m", "pytest", "-q", "-p", "swap_ours_in", "-p", "no:cacheprovider", "-c", os.devnull]
        pytest += ["--rootdir", tests, "-o", "asyncio_mode=auto", *(("-k", suite.only) if suite.only else ())]
        leave_out = [word for test in suite.exceptions for word in ("--deselect", test)]
        status = call(*pytest, *suite.tests, *leave_out, *sys.argv[1:], cwd=tests)
        for test, reason in suite.exceptions.items():
            if not status and call(*pytest, "--no-header", "--tb=no", "--no-summary", test, cwd=tests) != 1:
                print(f"{test} does not fail any more, although {reason}", file=sys.stderr)
                return 1
        return status


def call(*command: str | Path, cwd: Path = ROOT) -> int:
    """Run a command without this environment's variables; its exit status."""
    hidden = {"VIRTUAL_ENV", "PYTHONPATH"}
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    environment["PYTHONPATH"] = os.pathsep.join([str(cwd), str(cwd / "tests")])
    return subprocess.run([str(word) for word in command], cwd=cwd, env=environment, check=False).returncode


def run(*command: str | Path) -> None:
    """Run a command that must succeed. Raises SystemExit with its status."""
    if status := call(*command):
        raise SystemExit(status)


if __name__ == "__main__":
    sys.exit(main())

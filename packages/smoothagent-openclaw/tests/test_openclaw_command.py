"""``smoothagent openclaw``: what it changes, how that is undone, and what it says."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import httpx
import pytest
from json5.loader import loads

from smoothagent import ConfigurationError, Summarize
from smoothagent_openclaw.changes import WINDOW
from smoothagent_openclaw.command import openclaw, settings_for
from smoothagent_openclaw.doctor import Finding, examined
from smoothagent_openclaw.places import backup_of, beside, config_path, plugin_folder, recall
from smoothagent_openclaw.plugin import is_as_shipped
from test_document import USERS

CONFIG = USERS.replace("'http://127.0.0.1:1234/v1'", "'http://127.0.0.1:1234/v1', api: 'openai-completions'")


@pytest.fixture(autouse=True)
def an_openclaw(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """On the path, with a plugin for the provider ``vllm``."""
    folder = tmp_path_factory.mktemp("openclaw")
    (folder / "openclaw").write_text("#!/bin/sh\necho OpenClaw 2026.9.6\n")
    (folder / "openclaw").chmod(0o755)
    manifest = folder / "dist" / "extensions" / "vllm" / "openclaw.plugin.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text('{"id": "vllm", "providers": ["vllm"]}')
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "openclaw.json"
    path.write_text(CONFIG)
    path.chmod(0o640)
    return path


def test_configure_and_back(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert openclaw(["configure", "--config", str(config)]) == 0
    told = loads(config.read_text())
    provider = told["models"]["providers"]["sa"]
    assert provider["baseUrl"] == "http://127.0.0.1:8091/v1"
    assert [m.get("contextWindow") for m in provider["models"]] == [WINDOW, WINDOW]
    off = {"enabled": False, "memoryFlush": {"enabled": False}}
    assert told["agents"]["defaults"]["compaction"] == {**off, "provider": "smoothagent"}
    folder = plugin_folder(config)
    assert told["plugins"] == {
        "load": {"paths": [str(folder)]},
        "entries": {"smoothagent": {"enabled": True, "config": {"gateway": "http://127.0.0.1:8091", "provider": "sa"}}},
    }
    assert is_as_shipped(folder, "sa")
    for comment in ("// my claw", "/* mine */", "// local ones", "// llama", "// last", "// end"):
        assert comment in config.read_text()
    assert backup_of(config).read_text() == CONFIG
    assert stat.S_IMODE(config.stat().st_mode) == 0o640
    assert stat.S_IMODE(beside(config).stat().st_mode) == 0o600
    said = capsys.readouterr().out
    assert "-        baseUrl: 'http://127.0.0.1:1234/v1'" in said
    assert "24576 tokens" in said

    assert openclaw(["unconfigure", "--config", str(config)]) == 0
    assert config.read_text() == CONFIG, "to the byte"
    assert not beside(config).exists()
    assert not folder.exists()


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("touched", [False, True])
def test_line_ends_stay(config: Path, newline: str, touched: bool) -> None:
    text = CONFIG.replace("\n", newline)
    config.write_bytes(text.encode())
    openclaw(["configure", "--config", str(config)])
    made = config.read_bytes().decode()
    assert made.count("\n") == made.count(newline)
    if touched:
        config.write_bytes(made.replace("18792", "18793").encode())
    openclaw(["unconfigure", "--config", str(config)])
    back = config.read_bytes().decode()
    assert back.count("\n") == back.count(newline)
    if touched:
        assert loads(back) == loads(text.replace("18792", "18793"))
    else:
        assert back == text


@pytest.mark.parametrize(
    "plugins",
    [
        "{}",
        "{ // none yet\n  }",
        "{ load: { paths: ['/a', '/b',] } }",
        "{ load: { paths: [\n      '/a', // mine\n    ] }, allow: ['telegram'] }",
        "{ entries: { telegram: { enabled: true } }, allow: [] }",
        "{ entries: { smoothagent: { enabled: false } } }",
    ],
)
@pytest.mark.parametrize("touched", [False, True])
def test_its_users_plugins_stay(config: Path, plugins: str, touched: bool) -> None:
    text = CONFIG.replace("  agents:", f"  plugins: {plugins},\n  agents:")
    config.write_text(text)
    before = loads(text)["plugins"]
    openclaw(["configure", "--config", str(config)])
    made = loads(config.read_text())["plugins"]
    assert made["load"]["paths"] == [*before.get("load", {}).get("paths", []), str(plugin_folder(config))]
    assert made["entries"].keys() == before.get("entries", {}).keys() | {"smoothagent"}
    assert made.get("allow") == ([*before["allow"], "smoothagent"] if "allow" in before else None)
    assert ("// mine" in text) == ("// mine" in config.read_text())
    if touched:
        added = (
            config.read_text().replace("18792", "18793").replace('smoothagent-plugin"', "smoothagent-plugin\", '/c'")
        )
        config.write_text(added)
    openclaw(["unconfigure", "--config", str(config)])
    if not touched:
        assert config.read_text() == text
        return
    after = loads(config.read_text())
    assert after["gateway"]["port"] == 18793
    assert after["plugins"]["load"]["paths"] == [*before.get("load", {}).get("paths", []), "/c"]
    left = {k: v for k, v in after["plugins"].items() if k != "load"}
    assert left == {k: v for k, v in before.items() if k != "load"}


def test_without_the_plugin(config: Path) -> None:
    openclaw(["configure", "--config", str(config), "--no-plugin"])
    told = loads(config.read_text())
    assert "plugins" not in told
    assert "provider" not in told["agents"]["defaults"]["compaction"]
    assert not plugin_folder(config).exists()
    assert all(finding.fine for finding in found(config, served(STATE)))


def test_a_provider_that_openclaw_has_a_plugin_for_is_not_marked(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = CONFIG.replace("sa: {", "vllm: {").replace("sa/m", "vllm/m")
    config.write_text(text)
    openclaw(["configure", "--config", str(config)])
    assert loads(config.read_text())["plugins"]["entries"]["smoothagent"]["config"] == {
        "gateway": "http://127.0.0.1:8091"
    }
    assert is_as_shipped(plugin_folder(config), None)
    assert "vllm is a plugin of OpenClaw's own" in capsys.readouterr().out
    assert all(finding.fine for finding in found(config, served(STATE)))


def test_a_folder_of_anothers_is_not_overwritten(config: Path) -> None:
    plugin_folder(config).mkdir()
    with pytest.raises(ConfigurationError, match="is not ours"):
        openclaw(["configure", "--config", str(config)])
    assert config.read_text() == CONFIG
    assert not beside(config).exists()


def test_a_dry_run_changes_nothing(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert openclaw(["configure", "--config", str(config), "--dry-run"]) == 0
    assert config.read_text() == CONFIG
    assert not backup_of(config).exists()
    assert not plugin_folder(config).exists()
    assert "+" in capsys.readouterr().out
    openclaw(["configure", "--config", str(config)])
    changed = config.read_text()
    assert openclaw(["unconfigure", "--config", str(config), "--dry-run"]) == 0
    assert config.read_text() == changed


def test_what_its_user_changes_meanwhile_is_theirs(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    openclaw(["configure", "--config", str(config)])
    text = config.read_text().replace("18792", "18793").replace("http://127.0.0.1:8091/v1", "http://127.0.0.1:7/v1")
    config.write_text(text)
    openclaw(["unconfigure", "--config", str(config)])
    told = loads(config.read_text())
    assert told["gateway"]["port"] == 18793
    assert told["models"]["providers"]["sa"]["baseUrl"] == "http://127.0.0.1:7/v1"
    assert told["models"]["providers"]["sa"]["models"][0]["contextWindow"] == 32768
    assert "compaction" not in told["agents"]["defaults"]
    assert "models.providers.sa.baseUrl was changed since" in capsys.readouterr().out


def test_what_was_off_already_stays_off(config: Path) -> None:
    config.write_text(
        CONFIG.replace('primary: "sa/m" }', 'primary: "sa/m" }, compaction: { enabled: false, mode: "safeguard" }')
    )
    before = loads(config.read_text())
    openclaw(["configure", "--config", str(config)])
    openclaw(["unconfigure", "--config", str(config)])
    assert loads(config.read_text()) == before


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("'openai-completions'", "'anthropic-messages'", "the gateway speaks openai-completions"),
        ('primary: "sa/m"', 'primary: "other/m"', "not in models.providers (there: sa)"),
        ('primary: "sa/m"', "primary: 5", "names no model"),
        ("contextWindow: 32768,", "", "no contextWindow"),
        ("'http://127.0.0.1:1234/v1'", "7", "must be a URL"),
        ("{\n  gateway", "{{\n  gateway", "is not JSON5"),
    ],
)
def test_what_cannot_be_routed_is_refused_and_nothing_is_changed(config: Path, old: str, new: str, says: str) -> None:
    text = CONFIG.replace(old, new)
    assert text != CONFIG
    config.write_text(text)
    with pytest.raises(ConfigurationError) as refused:
        openclaw(["configure", "--config", str(config)])
    assert says in str(refused.value)
    assert config.read_text() == text
    assert not beside(config).exists()


def test_order_matters(config: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="nothing to undo"):
        openclaw(["unconfigure", "--config", str(config)])
    with pytest.raises(ConfigurationError, match="configure` first"):
        openclaw(["run", "--config", str(config)])
    openclaw(["configure", "--config", str(config)])
    with pytest.raises(ConfigurationError, match="configured already"):
        openclaw(["configure", "--config", str(config)])
    with pytest.raises(ConfigurationError, match="start OpenClaw once"):
        openclaw(["configure", "--config", str(tmp_path / "none.json")])
    beside(config).write_text("{}")
    with pytest.raises(ConfigurationError, match="before-smoothagent"):
        openclaw(["unconfigure", "--config", str(config)])


@pytest.mark.parametrize("hard", ["0", "32768", "99999"])
def test_a_trigger_beyond_the_window_is_refused(config: Path, hard: str) -> None:
    with pytest.raises(ConfigurationError, match="must lie below"):
        openclaw(["configure", "--config", str(config), "--hard", hard])


def test_the_gateway_is_told_what_was_there(config: Path) -> None:
    openclaw(["configure", "--config", str(config), "--hard", "9000", "--keep", "2000", "--port", "9999"])
    told = recall(config)
    assert told is not None
    settings = settings_for(told)
    assert (settings.upstream, settings.port, settings.host) == ("http://127.0.0.1:1234/v1", 9999, "127.0.0.1")
    strategy = settings.strategy()
    assert isinstance(strategy, Summarize)
    assert (strategy.limits.hard, strategy.limits.keep) == (9000, 2000)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HOME": "/h"}, "/h/.openclaw/openclaw.json"),
        ({"HOME": "/h", "OPENCLAW_HOME": "/o"}, "/o/.openclaw/openclaw.json"),
        ({"HOME": "/h", "OPENCLAW_PROFILE": "p"}, "/h/.openclaw-p/openclaw.json"),
        ({"HOME": "/h", "OPENCLAW_STATE_DIR": "/s"}, "/s/openclaw.json"),
        ({"HOME": "/h", "OPENCLAW_STATE_DIR": "/s", "OPENCLAW_CONFIG_PATH": "/c.json"}, "/c.json"),
    ],
)
def test_where_the_configuration_is(environment: dict[str, str], expected: str) -> None:
    assert config_path(None, environment) == Path(expected)
    assert config_path(Path("/x"), environment) == Path("/x")


# ---- doctor ------------------------------------------------------------------------------------


def served(state: Any, models: int = 200) -> httpx.Client:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/smoothagent/state":
            return httpx.Response(200, json=state) if state is not None else httpx.Response(500)
        return httpx.Response(models, json={"data": []})

    return httpx.Client(transport=httpx.MockTransport(answer))


STATE = {"conversations": [{"requests": 7, "named_by_client": True}], "known": 1, "commits": {"hit": 2, "sync": 1}}


def found(config: Path, client: httpx.Client) -> list[Finding]:
    return examined(config, client=client)[1:]  # OpenClaw's own version depends on the machine


def test_doctor_says_what_is_so(config: Path) -> None:
    openclaw(["configure", "--config", str(config)])
    findings = found(config, served(STATE))
    assert all(finding.fine for finding in findings)
    assert any("7 requests of 1 conversations" in finding.what for finding in findings)
    assert any("2 were ready and warm, 1 were not" in finding.what for finding in findings)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (f"contextWindow: {WINDOW}", "contextWindow: 32768", "it was 100000000"),
        ("http://127.0.0.1:8091/v1", "http://127.0.0.1:1234/v1", "baseUrl"),
        ('"enabled": false', '"enabled": true', "compaction.enabled = True"),
        ('{ id: "m",', '{ id: "new" }, { id: "m",', "the model new of sa is told its real window"),
    ],
)
def test_doctor_says_what_is_not(config: Path, old: str, new: str, says: str) -> None:
    openclaw(["configure", "--config", str(config)])
    text = config.read_text()
    assert old in text
    config.write_text(text.replace(old, new, 1))
    wrong = [finding for finding in found(config, served(STATE)) if not finding.fine]
    assert any(says in finding.what + finding.remedy for finding in wrong)
    assert all(finding.remedy for finding in wrong)


def test_doctor_says_what_is_amiss_with_the_plugin(config: Path) -> None:
    openclaw(["configure", "--config", str(config)])
    unnamed = {**STATE, "conversations": [{"requests": 7, "named_by_client": False}]}
    [wrong] = [finding for finding in found(config, served(unnamed)) if not finding.fine]
    assert wrong.remedy == "start OpenClaw again: it loads the plugin"
    (plugin_folder(config) / "index.ts").write_text("")
    [wrong] = [finding for finding in found(config, served(STATE)) if not finding.fine]
    assert "the plugin in" in wrong.what
    text = config.read_text()
    config.write_text(text.replace('"load": {', '"deny": ["smoothagent"], "enabled": false, "load": {'))
    wrong = [finding.what for finding in found(config, served(STATE)) if not finding.fine]
    assert any("plugins.enabled" in what for what in wrong)
    assert any("plugins.deny" in what for what in wrong)
    config.write_text(text.replace(str(plugin_folder(config)), "/elsewhere"))
    assert any("plugins.load.paths" in finding.what for finding in found(config, served(STATE)) if not finding.fine)


def test_doctor_without_a_gateway(config: Path) -> None:
    openclaw(["configure", "--config", str(config)])
    [last] = [finding for finding in found(config, served(None)) if not finding.fine]
    assert last.remedy == "smoothagent openclaw run"
    wrong = [finding for finding in found(config, served(STATE, models=502)) if not finding.fine]
    assert wrong


def test_doctor_of_nothing(tmp_path: Path, config: Path) -> None:
    assert not found(tmp_path / "none.json", served(STATE))[-1].fine
    assert found(config, served(STATE))[-1].remedy == "smoothagent openclaw configure"

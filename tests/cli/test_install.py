import json
import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import httpx
import pytest

from flash_mcp.cli import main
from flash_mcp.cli.install import CLIENTS, entry, install
from flash_mcp.protocol import surroundings
from flash_mcp.protocol.errors import FlashError
from flash_mcp.tools.shared import playbook
from tests.teams import team_server


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory without any agent's configuration."""
    for name in ("CODEX_HOME", "CLAUDE_CONFIG_DIR", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", os.defpath)  # without the agents' own commands
    return tmp_path


@pytest.mark.parametrize(
    ("client", "program", "command"),
    [
        ("claude", "claude", "mcp add-json --scope user flash {server}"),
        ("codex", "codex", "mcp add --env=FLASH_HOME={home} flash -- {script} serve"),
        ("gemini", "gemini", "mcp add --scope=user --env=FLASH_HOME={home} flash {script} -- serve"),
        ("vscode", "code", "--add-mcp {entry}"),
    ],
)
def test_an_agents_own_command_adds_the_server_and_a_refusal_says_what_to_add(
    client: str, program: str, command: str, own_home: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("FLASH_MODELS", "FLASH_DEVICE_LOCKS", *surroundings.of(os.environ)):
        monkeypatch.delenv(name)
    calls = own_home / "calls"
    monkeypatch.setenv("PATH", f"{own_home}:{os.defpath}")
    script = f'#!/bin/sh\nfor word; do echo "$word" >> {calls}; done\n'
    (own_home / program).write_text(script)
    (own_home / program).chmod(0o755)
    server = {"type": "stdio", **entry()}
    named = json.dumps({"name": "flash", **server})
    words = {"home": server["env"]["FLASH_HOME"], "script": server["command"], "entry": named}
    assert not install(client, write=False).done and not calls.exists() and install(client).done
    assert calls.read_text().splitlines() == [
        word.format(**words, server=json.dumps(server)) for word in command.split()
    ]
    (own_home / program).write_text(f"{script}echo flash exists already >&2; exit 1\n")
    with pytest.raises(FlashError, match="flash exists already") as caught:
        install(client)
    assert server["command"] in caught.value.fix
    calls.unlink()
    monkeypatch.setenv("FLASH_TOKEN", "flash_secret")  # no word of a command, which others can read
    assert not install(client, url="https://box/mcp").done and not calls.exists()


@pytest.mark.parametrize("client", list(CLIENTS))
def test_a_skill_says_when_to_use_the_tools(client: str, own_home: Path, capsys: pytest.CaptureFixture[str]):
    words = ["install", client, "--skill"]
    if CLIENTS[client].skills is None:
        assert main.main(words) == 2 and "these take one: claude" in capsys.readouterr().err
        assert not CLIENTS[client].locate().exists()
        return
    assert main.main([*words, "--print"]) == 0
    assert list(own_home.rglob("SKILL.md")) == []
    assert main.main(words) == 0
    (path,) = own_home.rglob("SKILL.md")
    _, head, body = path.read_text().split("---\n", 2)
    fields = dict(line.split(": ", 1) for line in head.splitlines())
    assert fields["name"] == path.parent.name and len(fields["description"]) < 1024
    assert len(path.read_bytes()) < 2200 and playbook.calls() in body
    assert f"skill: {path}" in capsys.readouterr().out
    path.write_text("mine")
    assert main.main(words) == 0 and path.read_text().startswith("---")
    (backup,) = path.parent.glob("*.bak")
    assert backup.read_text() == "mine"


def servers_of(client: str, text: str) -> dict:
    """What a client's configuration has under the key of servers."""
    read = tomllib.loads if client == "codex" else json.loads
    return read(text)[CLIENTS[client].key]


@pytest.mark.parametrize("client", list(CLIENTS))
def test_the_printed_entry_starts_this_server_with_this_state_directory(client: str, flash_home: Path):
    added = install(client)
    entry = servers_of(client, added.text)["flash"]
    if client == "opencode":
        assert entry["type"] == "local"
        command, variables = entry["command"], entry["environment"]
    else:
        command, variables = [entry["command"], *entry["args"]], entry["env"]
    assert Path(command[0]).exists() and command[-1] == "serve"
    assert variables["FLASH_HOME"] == str(flash_home)
    assert not added.done and not added.path.exists()


def test_the_command_says_what_to_add_and_where(own_home: Path, capsys: pytest.CaptureFixture[str]):
    assert main.main(["install", "cursor"]) == 0
    where, _, text = capsys.readouterr().out.partition("\n\n")
    assert where == f"add this to {own_home / '.cursor' / 'mcp.json'}:"
    assert "flash" in servers_of("cursor", text.partition("\n--skill")[0])
    assert main.main(["install", "codex", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["client"] == "codex" and shown["done"] is False
    with pytest.raises(SystemExit):
        main.main(["install", "claude", "--ssh", "box", "--url", "https://box/mcp"])
    assert "--url: not allowed with argument --ssh" in capsys.readouterr().err


def test_an_entry_has_what_reaches_hubs_and_indexes_but_no_password(monkeypatch, capsys: pytest.CaptureFixture[str]):
    for name in surroundings.of(os.environ):
        monkeypatch.delenv(name)
    kept = {"HF_ENDPOINT": "https://hub.example", "no_proxy": "localhost", "UV_DEFAULT_INDEX": "https://index.example"}
    secret = {"HF_TOKEN": "pl4nted", "https_proxy": "http://user:pl4nted@proxy", "UV_INDEX_TEAM_PASSWORD": "pl4nted"}
    for name, value in (kept | secret).items():
        monkeypatch.setenv(name, value)
    assert main.main(["install", "cursor"]) == 0
    said = capsys.readouterr().out
    assert kept.items() <= entry()["env"].items() and all(value in said for value in kept.values())
    assert "pl4nted" not in said and "HF_TOKEN, UV_INDEX_TEAM_PASSWORD, https_proxy" in said


SSH = """#!/bin/sh
# Runs what it is to run there, here.
for last; do :; done
exec sh -c "$last"
"""


@pytest.mark.slow
def test_an_agent_starts_the_server_of_another_machine_over_ssh(own_home: Path, monkeypatch: pytest.MonkeyPatch):
    there = Path(sys.executable).with_name("flash-mcp")
    server = servers_of("cursor", install("cursor", ssh=f"user@box:{there}").text)["flash"]
    assert server["command"] == "ssh" and server["args"][-2:] == ["user@box", f"{shlex.quote(str(there))} serve"]
    program = own_home / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(SSH)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.defpath}")
    monkeypatch.setenv("FLASH_HOME", str(own_home / "state"))
    hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    request = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}
    command, asked = [server["command"], *server["args"]], json.dumps(request) + "\n"
    done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout.splitlines()[0])["result"]["serverInfo"]["name"] == "flash-mcp"


REMOTE = {
    "claude": (".claude.json", {"type": "http", "url": "URL", "headers": "HEADERS"}),
    "cursor": (".cursor/mcp.json", {"url": "URL", "headers": "HEADERS"}),
    "codex": (".codex/config.toml", {"url": "URL", "http_headers": "HEADERS"}),
    "opencode": (".config/opencode/opencode.json", {"type": "remote", "url": "URL", "headers": "HEADERS"}),
    "vscode": (".config/Code/User/mcp.json", {"type": "http", "url": "URL", "headers": "HEADERS"}),
    "windsurf": (".codeium/windsurf/mcp_config.json", {"serverUrl": "URL", "headers": "HEADERS"}),
    "zed": (".config/zed/settings.json", {"url": "URL", "headers": "HEADERS"}),
    "gemini": (".gemini/settings.json", {"httpUrl": "URL", "headers": "HEADERS"}),
}


@pytest.mark.parametrize("client", CLIENTS)
def test_an_agent_uses_a_server_that_listens_elsewhere(own_home: Path, monkeypatch: pytest.MonkeyPatch, client: str):
    monkeypatch.setenv("FLASH_TOKEN", "flash_secret")
    name, shape = REMOTE[client]
    added = install(client, url="https://box.example")
    assert added.path == own_home / name
    values = {"URL": "https://box.example/mcp", "HEADERS": {"Authorization": "Bearer flash_secret"}}
    expected = {key: values.get(value, value) for key, value in shape.items()}
    assert servers_of(client, added.text)["flash"] == expected


@pytest.mark.slow
def test_the_entry_of_a_server_elsewhere_reaches_it(own_home: Path, flash_home: Path, monkeypatch: pytest.MonkeyPatch):
    with team_server() as team:
        monkeypatch.setenv("FLASH_TOKEN", team.token("alice"))
        server = servers_of("cursor", install("cursor", url=f"{team.url}/mcp").text)["flash"]
        params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
        request = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}
        headers = {**server["headers"], "accept": "application/json, text/event-stream"}
        answer = httpx.post(server["url"], json=request, headers=headers, trust_env=False)
    assert answer.status_code == 200 and "flash-mcp" in answer.text


@pytest.mark.parametrize(
    "url, token, words",
    [
        ("box/mcp", "t", "https://box/mcp"),
        ("ftp://box", "t", "https://box/mcp"),
        ("http://box/mcp", "t", "ssh -L"),
        ("https://box", "", "token create"),
        ("https://box", "two words", "token create"),
    ],
)
def test_an_address_without_a_safe_way_or_a_token_is_refused(
    own_home: Path, monkeypatch: pytest.MonkeyPatch, url: str, token: str, words: str
):
    monkeypatch.setenv("FLASH_TOKEN", token)
    with pytest.raises(FlashError) as caught:
        install("cursor", url=url)
    assert words in caught.value.fix


def test_what_is_no_host_and_a_name_that_a_client_would_not_take_are_refused():
    for host in ("", "-oProxyCommand=x", "user box", "box;rm"):
        with pytest.raises(FlashError) as caught:
            install("cursor", ssh=host)
        assert "user@box" in caught.value.fix
    with pytest.raises(FlashError, match="no name of a server"):
        install("claude", name="my server")

import ast
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import httpx
import pytest

from flash_mcp.cli import doctor, main
from flash_mcp.cli.install import CLIENTS, entry, install, read_json
from flash_mcp.cli.service import unit_text
from flash_mcp.protocol.errors import FlashError
from flash_mcp.tools.shared import playbook
from tests.teams import team_server

CODEX = """# mine
model = "o9"

[mcp_servers.other]
command = "other"  # kept

[mcp_servers.flash]  # the trainer
command = "old#1"
# its key, 'quoted"
[mcp_servers.flash.env]
OLD = "1" # first

# of the terminal
[tui]
theme = "dark"
"""


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory without any agent's configuration."""
    for name in ("CODEX_HOME", "CLAUDE_CONFIG_DIR", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", os.defpath)  # without the agents' own commands
    return tmp_path


CLAUDE = """#!/bin/sh
exec '{python}' - "$@" <<'END'
import json, pathlib, sys
pathlib.Path({calls!r}).write_text(json.dumps(sys.argv[1:]))
if {works}:
    path = pathlib.Path.home() / ".claude.json"
    found = json.loads(path.read_text())
    found["mcpServers"] = {{sys.argv[-2]: json.loads(sys.argv[-1])}}
    path.write_text(json.dumps(found))
sys.exit(not {works})
END
"""


@pytest.mark.parametrize("works", [True, False])
def test_the_agents_own_command_adds_the_server_and_the_file_is_edited_where_it_fails(
    works: bool, own_home: Path, monkeypatch: pytest.MonkeyPatch
):
    calls, program = own_home / "calls", own_home / "bin" / "claude"
    program.parent.mkdir()
    program.write_text(CLAUDE.format(python=sys.executable, calls=str(calls), works=works))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.defpath}")
    path = own_home / ".claude.json"
    path.write_text('{"mine": 1}')
    done = install("claude")
    assert json.loads(calls.read_text())[:5] == ["mcp", "add-json", "--scope", "user", "flash"]
    found = json.loads(path.read_text())
    assert found["mine"] == 1 and found["mcpServers"]["flash"]["args"][-1] == "serve"
    assert path.read_text() == done.text and ("\n" in done.text) == (not works)
    assert done.backup and done.backup.read_text() == '{"mine": 1}'
    assert not install("claude").changed


@pytest.mark.parametrize(
    ("client", "program", "command"),
    [
        ("gemini", "gemini", "mcp add --scope=user --env=FLASH_HOME={home} flash {script} -- serve"),
        ("vscode", "code", "--add-mcp {entry}"),
    ],
)
def test_gemini_and_vscode_are_asked_by_their_own_commands(
    client: str, program: str, command: str, own_home: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("FLASH_MODELS")
    monkeypatch.delenv("FLASH_DEVICE_LOCKS")
    calls = own_home / "calls"
    monkeypatch.setenv("PATH", f"{own_home}:{os.defpath}")
    (own_home / program).write_text(f'#!/bin/sh\nfor word; do echo "$word" >> {calls}; done\n')
    (own_home / program).chmod(0o755)
    server = entry()
    named = json.dumps({"name": "flash", "type": "stdio", **server})
    words = {"home": server["env"]["FLASH_HOME"], "script": server["command"], "entry": named}
    done = install(client)
    assert calls.read_text().splitlines() == [word.format(**words) for word in command.split()]
    # It said that it did, and did not.
    assert servers_of(client, done.path.read_text())["flash"]["args"] == ["serve"]


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
    assert len(path.read_bytes()) < 2200 and playbook.LOOP.partition("\n\n")[2] in body
    assert f"skill: {path}" in capsys.readouterr().out
    path.write_text("mine")
    assert main.main(words) == 0 and path.read_text().startswith("---")
    (backup,) = path.parent.glob("*.bak")
    assert backup.read_text() == "mine"


ZED = """// Zed settings
{
  "theme": "One", // mine
  /* { "context_servers": { */
  "context_servers": {
    "other": { "command": "http://x//y", "args": [] },
  },
}
"""


def servers_of(client: str, text: str) -> dict:
    """What a client's configuration has under the key of servers."""
    read = tomllib.loads if client == "codex" else json.loads
    return read(text)[CLIENTS[client].key]


@pytest.mark.parametrize("client", list(CLIENTS))
def test_a_first_configuration_starts_this_server_with_this_state_directory(client: str, flash_home: Path):
    done = install(client)
    entry = servers_of(client, done.path.read_text())["flash"]
    if client == "opencode":
        assert entry["type"] == "local"
        command, variables = entry["command"], entry["environment"]
    else:
        command, variables = [entry["command"], *entry["args"]], entry["env"]
    assert Path(command[0]).exists()
    assert command[-1] == "serve"
    assert variables["FLASH_HOME"] == str(flash_home)
    assert (done.changed, done.backup) == (True, None)


@pytest.mark.parametrize("client", list(CLIENTS))
def test_a_second_time_changes_nothing(client: str):
    first = install(client).path.read_bytes()
    again = install(client)
    assert (again.changed, again.backup, again.path.read_bytes()) == (False, None, first)
    assert len(list(again.path.parent.glob(f"*{again.path.name}*"))) == 1


def test_what_is_there_stays_and_the_old_file_is_kept(own_home: Path):
    path = own_home / ".claude.json"
    old = {"theme": "dark", "mcpServers": {"other": {"command": "other"}}, "name": "é"}
    path.write_text(json.dumps(old))
    path.chmod(0o640)
    done = install("claude", name="trainer")
    new = json.loads(path.read_text())
    assert new["mcpServers"].pop("trainer")
    assert new == old
    assert done.backup is not None
    assert json.loads(done.backup.read_text()) == old
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_comments_and_tables_of_a_toml_file_stay_and_an_older_entry_is_replaced(own_home: Path):
    path = own_home / ".codex" / "config.toml"
    path.parent.mkdir()
    path.write_text(CODEX)
    install("codex")
    text = path.read_text()
    assert re.findall("#.*", text) == re.findall("#.*", CODEX.replace("old#1", ""))
    assert "# of the terminal\n[tui]\n" in text
    assert "OLD" not in text
    new, old = tomllib.loads(text), tomllib.loads(CODEX)
    assert new["mcp_servers"].pop("flash")["command"] != old["mcp_servers"].pop("flash")["command"]
    assert new == old


@pytest.mark.parametrize("old", [ZED.replace('/* { "context_servers": { */', ""), "// mine\n{}", '{"theme": "One",}'])
def test_comments_of_a_json_file_stay(old: str):
    path = CLIENTS["zed"].locate()
    path.parent.mkdir(parents=True)
    path.write_text(old)
    install("zed")
    text = path.read_text()
    assert text.count("//") == old.count("//")
    settings = read_json(text)
    assert settings["context_servers"].pop("flash")["args"] == ["serve"]
    assert settings == {"context_servers": {}, **read_json(old)}


def test_a_comment_that_looks_like_the_servers_changes_nothing():
    path = CLIENTS["zed"].locate()
    path.parent.mkdir(parents=True)
    path.write_text(ZED)
    with pytest.raises(FlashError, match="left as it is"):
        install("zed")
    assert path.read_text() == ZED


@pytest.mark.parametrize(
    ("client", "text"),
    [
        ("claude", "{not json"),
        ("cursor", '{"mcpServers": []}'),
        ("cursor", "[]"),
        ("zed", '{"context_servers": {"flash": {"command": "old"}}, // mine\n}'),
        ("codex", "[broken"),
        ("codex", 'mcp_servers = { flash = { command = "old" } }\n'),
    ],
)
def test_a_file_that_is_not_understood_is_left_as_it_is(client: str, text: str):
    path = CLIENTS[client].locate()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    with pytest.raises(FlashError, match="left as it is") as caught:
        install(client)
    assert entry()["command"] in caught.value.fix
    assert path.read_text() == text
    assert list(path.parent.glob("*.bak")) == []


@pytest.mark.parametrize("client", CLIENTS)
def test_a_name_that_a_client_would_not_take_is_refused(client: str):
    with pytest.raises(FlashError, match="no name of a server"):
        install(client, name="my server")


def test_a_link_to_the_configuration_stays_a_link(own_home: Path):
    real = own_home / "dotfiles" / "mcp.json"
    real.parent.mkdir()
    real.write_text("{}")
    (own_home / ".cursor").mkdir()
    (own_home / ".cursor" / "mcp.json").symlink_to(real)
    install("cursor")
    assert (own_home / ".cursor" / "mcp.json").is_symlink()
    assert "flash" in json.loads(real.read_text())["mcpServers"]


def test_print_writes_nothing(own_home: Path, capsys: pytest.CaptureFixture[str]):
    assert main.main(["install", "codex", "--print"]) == 0
    assert "flash" in tomllib.loads(capsys.readouterr().out)["mcp_servers"]
    assert not (own_home / ".codex").exists()


def test_the_command_says_what_it_did(own_home: Path, capsys: pytest.CaptureFixture[str]):
    assert main.main(["install", "cursor", "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert (done["client"], done["changed"], done["path"]) == ("cursor", True, str(own_home / ".cursor" / "mcp.json"))
    assert main.main(["install", "cursor"]) == 0
    assert "has it already" in capsys.readouterr().out


# -- the service -----------------------------------------------------------------------------------


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A systemctl that succeeds, and the file to which it writes each call."""
    calls, program = tmp_path / "calls", tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return calls


def unit(home: Path, name: str = "flash-mcp.service") -> Path:
    return home / ".config" / "systemd" / "user" / name


def test_a_service_supervises_after_a_reboot_and_can_be_removed(
    own_home: Path, flash_home: Path, systemctl: Path, capsys: pytest.CaptureFixture[str]
):
    assert main.main(["install", "service"]) == 0
    assert "loginctl enable-linger" in capsys.readouterr().out
    lines = unit(own_home).read_text().splitlines()
    assert f'Environment="FLASH_HOME={flash_home}"' in lines
    assert {"Restart=on-failure", "KillMode=process", "WantedBy=default.target"} <= {*lines}
    (start,) = [line for line in lines if line.startswith("ExecStart=")]
    program, *_, last = shlex.split(start.removeprefix("ExecStart="))
    assert Path(program).exists()
    assert last == "supervise"
    asked = ["show-environment", "daemon-reload", "enable --now flash-mcp.service"]
    assert systemctl.read_text().splitlines() == [f"--user {words}" for words in asked]

    assert "flash-mcp.service continues runs" in doctor.CHECKS["reboot"]()[1]
    assert main.main(["install", "service"]) == 0
    assert "is there already" in capsys.readouterr().out
    assert main.main(["install", "service", "--remove", "--dry-run"]) == 0
    assert "would remove" in capsys.readouterr().out
    assert unit(own_home).exists()
    assert main.main(["install", "service", "--remove"]) == 0
    assert not unit(own_home).exists()
    assert "--user disable --now flash-mcp.service" in systemctl.read_text().splitlines()
    assert main.main(["install", "service", "--remove"]) == 0
    assert "there is no" in capsys.readouterr().out
    assert "flash-mcp install service" in doctor.CHECKS["reboot"]()[1]


def test_a_dry_run_prints_the_unit_and_changes_nothing(
    own_home: Path, systemctl: Path, capsys: pytest.CaptureFixture[str]
):
    assert main.main(["install", "service", "--name", "lab", "--dry-run"]) == 0
    assert capsys.readouterr().out == unit_text()
    assert not unit(own_home, "lab-mcp.service").exists()
    assert not systemctl.exists()


@pytest.mark.parametrize(
    ("script", "why"), [("", "there is no systemctl"), ("#!/bin/sh\necho no bus >&2; exit 1", "no bus")]
)
def test_a_service_needs_systemd(
    own_home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    script: str,
    why: str,
):
    programs = tmp_path / "bin"
    programs.mkdir()
    if script:
        (programs / "systemctl").write_text(script)
        (programs / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    assert main.main(["install", "service"]) == 2
    error = capsys.readouterr().err
    assert why in error
    assert "flash-mcp supervise" in error
    assert not unit(own_home).exists()


def test_a_server_is_reached_in_one_way(own_home: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main.main(["install", "claude", "--ssh", "box", "--url", "https://box/mcp"])
    assert "--url: not allowed with argument --ssh" in capsys.readouterr().err
    assert not (own_home / ".claude.json").exists()


def test_only_a_service_can_be_removed(own_home: Path, capsys: pytest.CaptureFixture[str]):
    assert main.main(["install", "claude", "--remove"]) == 2
    assert "only a service" in capsys.readouterr().err
    assert not (own_home / ".claude.json").exists()


@pytest.mark.parametrize("name", ["plain", "with space", "100%h", 'quote"$HOME\\n', "new\nline"])
def test_systemd_reads_the_state_directory_as_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    """Its own reader of units says so, where it is installed."""
    home = tmp_path / name
    monkeypatch.setenv("FLASH_HOME", str(home))
    path = tmp_path / "flash-mcp.service"
    path.write_text(unit_text())
    (line,) = [line for line in unit_text().splitlines() if "FLASH_HOME" in line]
    quoted = line.removeprefix("Environment=").replace("%%", "%")
    assert ast.literal_eval(quoted) == f"FLASH_HOME={home}"
    if shutil.which("systemd-analyze"):
        command = ["systemd-analyze", "--user", "--man=no", "verify", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "flash-mcp.service" not in done.stderr, done.stderr


SSH = """#!/bin/sh
# Runs what it is to run there, here.
for last; do :; done
exec sh -c "$last"
"""


@pytest.mark.slow
def test_an_agent_starts_the_server_of_another_machine_over_ssh(own_home: Path, monkeypatch: pytest.MonkeyPatch):
    there = Path(sys.executable).with_name("flash-mcp")
    install("cursor", ssh=f"user@box:{there}")
    server = json.loads((own_home / ".cursor/mcp.json").read_text())["mcpServers"]["flash"]
    assert server["command"] == "ssh" and server["args"][-2:] == ["user@box", f"{shlex.quote(str(there))} serve"]
    program = own_home / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(SSH)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.defpath}")
    monkeypatch.setenv("FLASH_HOME", str(own_home / "state"))
    hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    request = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}
    done = subprocess.run(
        [server["command"], *server["args"]],
        input=json.dumps(request) + "\n",
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    answer = json.loads(done.stdout.splitlines()[0])
    assert answer["result"]["serverInfo"]["name"] == "flash-mcp"


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
    done = install(client, url="https://box.example")
    assert done.path == own_home / name and done.path.stat().st_mode & 0o077 == 0
    text = done.path.read_text()
    settings = tomllib.loads(text) if name.endswith(".toml") else json.loads(text)
    values = {"URL": "https://box.example/mcp", "HEADERS": {"Authorization": "Bearer flash_secret"}}
    expected = {key: values.get(value, value) for key, value in shape.items()}
    assert settings[CLIENTS[client].key]["flash"] == expected
    assert not install(client, url="https://box.example/mcp").changed


@pytest.mark.slow
def test_the_entry_of_a_server_elsewhere_reaches_it(own_home: Path, flash_home: Path, monkeypatch: pytest.MonkeyPatch):
    with team_server() as team:
        monkeypatch.setenv("FLASH_TOKEN", team.token("alice"))
        install("cursor", url=f"{team.url}/mcp")
        server = json.loads((own_home / ".cursor/mcp.json").read_text())["mcpServers"]["flash"]
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
    assert words in caught.value.fix and not (own_home / ".cursor").exists()


@pytest.mark.parametrize("host", ["", "-oProxyCommand=x", "user box", "box;rm"])
def test_what_is_no_host_is_refused(host: str):
    with pytest.raises(FlashError) as caught:
        install("cursor", ssh=host)
    assert "user@box" in caught.value.fix

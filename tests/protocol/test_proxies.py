"""The proxies of the environment, as a company's machine sets them."""

from pathlib import Path

import httpx
import pytest

from flash_mcp.client import Client
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.surroundings import by_way_of, use_proxies
from flash_mcp.tools.shared.rows import read_rows
from tests.teams import team_server

NOWHERE = "127.0.0.1:9"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NO_PROXY", "localhost,127.0.0.1,::1,[::1]"),
        ("no_proxy", "[::1]"),
        ("ALL_PROXY", f"socks5://{NOWHERE}"),
        ("HTTPS_PROXY", NOWHERE),
        ("http_proxy", f"http://user:secret@{NOWHERE}"),
    ],
)
def test_what_companies_set_is_used(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    use_proxies()
    httpx.Client().close()


@pytest.mark.parametrize("value", ["foo://x", "http://[::1", "http://host:port"])
def test_what_is_no_proxy_is_named_without_its_value(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("https_proxy", value)
    with pytest.raises(FlashError, match="https_proxy") as refused:
        read_rows("hub:owner/name")
    assert refused.value.code == "proxy_invalid" and value not in str(refused.value)


def test_an_error_names_the_variable_whose_proxy_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", NOWHERE)
    with pytest.raises(FlashError, match="by way of the proxy in HTTPS_PROXY"):
        read_rows("hub:owner/name")
    monkeypatch.delenv("https_proxy")
    assert by_way_of() == ""


@pytest.mark.slow
def test_a_client_reaches_this_machine_in_spite_of_a_proxy(monkeypatch: pytest.MonkeyPatch, flash_home: Path) -> None:
    for name in ("HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://{NOWHERE}")
    monkeypatch.setenv("NO_PROXY", "")
    with team_server() as team, Client(f"{team.url}/mcp", team.token("alice")) as client:
        assert client.catalog().models

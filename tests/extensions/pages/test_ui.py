"""The live pages: who may open them, what they hold, and that they follow what happens."""

import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from flash_mcp.extensions.pages import ui
from flash_mcp.state import datasets, tokens
from flash_mcp.state.store import open_store
from flash_mcp.tools.shared.run_view import report_on
from tests.extensions.pages.test_report import HOSTILE, Tags, browser, hostile_run
from tests.places import ROOT
from tests.ports import free_port
from tests.samples import finished_run, learn, learning_run, read_in
from tests.server.test_http_server import give
from tests.teams import Team, team_server
from tests.waiting import WAIT_S

__all__ = ["browser"]
pytestmark = pytest.mark.slow
PAGES = ("", "/together?run={run}", "/runs/{run}", "/runs/{run}/rollouts", "/runs/{run}/changes")


@contextmanager
def signed_in(team: Team, token: str) -> Generator[httpx.Client]:
    """A browser's side after signing in: it has a cookie and sends no header of ours."""
    with team.http() as http:
        answer = http.post("/ui/sign-in", data={"token": token})
        assert (answer.status_code, answer.headers["location"]) == (303, "/ui")
        yield http


def test_a_browser_signs_in_with_a_token_and_keeps_a_session_in_a_cookie(team: Team) -> None:
    with team.http() as http:
        asked = http.get("/ui")
        assert asked.status_code == 401 and "Paste a token" in asked.text
        wrong = http.post("/ui/sign-in", data={"token": "flash_wrong"})
        assert wrong.status_code == 401 and "no valid bearer token" in wrong.text
        assert "set-cookie" not in wrong.headers
        token = team.token("alice")
        answer = http.post("/ui/sign-in", data={"token": token})
        assert answer.headers["location"] == "/ui"
        cookie = answer.headers["set-cookie"]
        assert token not in cookie
        words = ("httponly", "samesite=strict", "path=/ui", f"flash_session_{team.port}=")
        assert all(word in cookie.lower() for word in words)
        page = http.get("/ui")
        assert page.status_code == 200 and page.headers["cache-control"] == "no-store"
        assert http.get("/ui/").headers["location"] == "/ui"


def test_signing_out_ends_this_session_alone(team: Team) -> None:
    with signed_in(team, team.token("alice")) as other, signed_in(team, team.token("alice")) as http:
        kept = dict(http.cookies)
        assert 'action="/ui/sign-out"' in http.get("/ui").text
        assert http.get("/ui/sign-out").status_code != 200, "no link signs out"
        assert http.post("/ui/sign-out", headers={"origin": "https://elsewhere"}).status_code == 403
        answer = http.post("/ui/sign-out")
        assert answer.status_code == 200 and "Paste a token" in answer.text and not http.cookies
        for name, value in kept.items():
            http.cookies.set(name, value)
        assert http.get("/ui").status_code == 401, "also for who kept the cookie"
        assert other.get("/ui").status_code == 200


@pytest.mark.hostile("pages")
def test_a_session_opens_the_pages_and_nothing_else(team: Team) -> None:
    with signed_in(team, team.token("alice")) as http:
        name, session = next(iter(http.cookies.items()))
    with team.http(cookie=f"{name}={session}") as http:
        assert http.get("/ui").status_code == 200 and http.get("/metrics").status_code == 401
        assert http.post("/mcp", json={}).status_code == 401
    with team.http(session) as http:
        assert http.get("/metrics").status_code == http.post("/mcp", json={}).status_code == 401
        assert http.get("/ui").status_code == 401


@pytest.mark.hostile("pages")
def test_a_token_is_no_session(team: Team) -> None:
    text = team.token("alice")
    with team.http(cookie=f"flash_session_{team.port}={text}; flash_token={text}") as http:
        assert http.get("/ui").status_code == 401


@pytest.mark.hostile("pages")
def test_a_session_ends_with_its_token(team: Team) -> None:
    with signed_in(team, team.token("alice")) as http:
        assert http.get("/ui").status_code == 200
        tokens.revoke(open_store(), "alice")
        assert http.get("/ui").status_code == 401


@pytest.mark.hostile("pages")
def test_a_token_has_a_few_sessions_and_they_end_after_a_day_s_work(team: Team, monkeypatch: pytest.MonkeyPatch):
    text = team.token("alice")
    with signed_in(team, text) as first:
        for _ in range(ui.SESSIONS_PER_TOKEN - 1):
            with signed_in(team, text):
                pass
        assert first.get("/ui").status_code == 200
        with signed_in(team, text) as last:
            assert first.get("/ui").status_code == 401
            assert last.get("/ui").status_code == 200
    monkeypatch.setattr(ui, "SESSION_S", 0.0)
    with signed_in(team, text) as http:
        assert http.get("/ui").status_code == 401


@pytest.mark.hostile("pages")
def test_no_link_and_no_other_server_s_page_signs_a_visitor_in(team: Team) -> None:
    text = team.token("mallory")
    with team.http() as http:
        for address in (f"/ui?token={text}", f"/ui/sign-in?token={text}", "/ui?code=", "/ui?code=x"):
            answer = http.get(address)
            assert answer.status_code == 401 and "set-cookie" not in answer.headers
        for origin in ("https://evil.example", "http://127.0.0.1:3000", "http://localhost", "null"):
            headers = {"origin": origin}
            answer = http.post("/ui/sign-in", data={"token": text}, headers=headers)
            assert answer.status_code == 403 and "set-cookie" not in answer.headers
    with signed_in(team, text) as http:
        for headers, status in (({"origin": "http://localhost:3000"}, 403), ({"host": "evil.example"}, 421)):
            answer = http.post("/ui/chat/x", data={"message": "hi"}, headers=headers)
            assert answer.status_code == status
        answer = http.post("/ui/chat/x", data={"message": "hi"}, headers={"origin": team.url})
        assert answer.status_code == 404


@pytest.mark.hostile("pages")
def test_a_session_that_came_by_tls_is_sent_by_tls_only(flash_home: Path) -> None:
    def cookie(team: Team, **headers: str) -> str:
        data = {"token": team.token("alice")}
        with team.http(host="127.0.0.1") as http:
            answer = http.post("/ui/sign-in", data=data, headers=headers)
        return answer.headers["set-cookie"].lower()

    with team_server() as team:
        assert "secure" in cookie(team, origin="https://127.0.0.1")
        assert "secure" not in cookie(team, origin="http://127.0.0.1")
        assert "secure" not in cookie(team, **{"x-forwarded-proto": "https"}), "any program's word"
    (flash_home / "settings.toml").write_text('[server]\nproxies = ["127.0.0.1"]\n')
    with team_server() as team:
        assert "secure" in cookie(team, **{"x-forwarded-proto": "https"})


def test_pages_of_anothers_run_read_like_those_of_no_run(team: Team, tmp_path: Path) -> None:
    run_id = finished_run(tmp_path).id
    give("alice", "alices")
    with signed_in(team, team.token("alice", "read")) as http:
        for page in PAGES:
            assert run_id in http.get(f"/ui{page.format(run=run_id)}").text
    with signed_in(team, team.token("bob")) as http:
        assert run_id not in http.get("/ui").text
        for page in PAGES[1:]:
            theirs = http.get(f"/ui{page.format(run=run_id)}")
            nobodys = http.get(f"/ui{page.format(run='run-nothere')}")
            assert (theirs.status_code, nobodys.status_code) == (404, 404)
            assert theirs.text.replace(run_id, "run-nothere") == nobodys.text


def test_the_overview_has_state_success_verdict_and_parent_of_every_run(team: Team, tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    give("alice", "alices")
    open_store().execute("UPDATE main.runs SET used_s = 5400")
    view = report_on(open_store(), run.id).view
    assert view.verdict is not None and view.verdict.outcome == "improved"
    with signed_in(team, team.token("alice")) as http:
        text = Tags(http.get("/ui").text).text
    for word in (run.id, "succeeded", "Worked 1.50 h", "20 % → 90 %", "improved", "alices"):
        assert word in text


def test_a_dataset_shows_labels_lengths_copies_and_rows_as_learnt(flash_home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FLASH_MODELS", str(flash_home / "none"))
    rows: list[dict[str, Any]] = []
    for number in range(60):
        said = [("user", f"text {number % 59}"), ("assistant", "good" if number % 59 % 3 else "bad")]
        rows.append({"messages": [{"role": role, "content": text} for role, text in said], "prompt_messages": 1})
    manifest = {"counts": {"train_rows": 60, "holdout_rows": 1}, "environment": {"name": "e", "digest": "d"}}
    made = datasets.register("mail", rows, rows[:1], manifest)
    with team_server(authenticate=False) as local, local.http() as http:
        reference = f"mail@{made.digest}"
        assert f'href="/ui/datasets/{reference}"' in http.get("/ui").text
        text = " ".join(Tags(http.get(f"/ui/datasets/{reference}").text).text.split())
        assert http.get("/ui/datasets/mail@000000").status_code == 404
    for words in ("60 rows to learn", "1 rows held back", "1 copies of another row", "good39", "assistant: [[bad]]"):
        assert words in text


def test_transcripts_are_searched_ordered_and_paged(team: Team, tmp_path: Path) -> None:
    run_id = finished_run(tmp_path).id
    give("alice", "alices")
    with signed_in(team, team.token("alice")) as http:
        address = f"/ui/runs/{run_id}/rollouts"
        worst = http.get(f"{address}?split=eval&step=20&order=worst").text
        assert "1 to 12 of 100" in worst and "no success" in worst
        assert "13 to 24 of 100" in http.get(f"{address}?split=eval&step=20&page=1").text
        assert "no success" not in http.get(f"{address}?split=eval&step=20&order=best").text
        assert "No such rollouts." in http.get(f"{address}?contains=nowhere").text
        assert http.get(f"{address}?order=up").status_code == 400
        changes = http.get(f"/ui/runs/{run_id}/changes").text
        assert "70 newly solved" in changes and "0 no longer solved" in changes


def test_nothing_that_a_run_wrote_acts_on_a_page(team: Team, tmp_path: Path) -> None:
    run_id = hostile_run(tmp_path).id
    give("alice", "alices")
    with signed_in(team, team.token("alice")) as http:
        texts = [http.get(f"/ui{page.format(run=run_id)}").text for page in PAGES]
    for text in texts:
        found = Tags(text)
        assert [tag for tag, _ in found.found if tag in ("img", "iframe", "meta")] == ["meta"] * 4
        assert HOSTILE[:40] not in text
        names = {name for _, attributes in found.found for name in attributes}
        assert not names & {"onerror", "onload", "style", "src"}
        links = [attributes["href"] for tag, attributes in found.found if tag == "a"]
        assert all(link is not None and link.startswith(("/ui", "?")) for link in links)


def test_events_come_when_something_about_the_run_changes(team: Team, tmp_path: Path) -> None:
    run, writer = learning_run(tmp_path, range(1, 3))
    give("alice", "alices")

    def go_on() -> None:
        learn(writer, range(3, 4))
        read_in(open_store(), run.id)

    with signed_in(team, team.token("alice")) as http, http.stream("GET", f"/ui/events?run={run.id}") as stream:
        lines = stream.iter_lines()
        assert next(lines) == ": connected"
        later = threading.Timer(0.5, go_on)
        later.start()
        said = next(line for line in lines if line.startswith("data:"))
        later.join()
    assert said == "data: changed"


def test_a_chat_with_nothing_says_what_there_is_and_one_that_cannot_be_shown_is_a_page_with_the_error(team: Team):
    with signed_in(team, team.token("alice", "read")) as http:
        page = http.get("/ui/chat/dep-none").text
        assert "<textarea" in page and "There is no such deployment." in page
        answer = http.post("/ui/chat/dep-none", data={"message": "Hello"})
        assert answer.status_code == 404 and "unknown_deployment" in answer.text
        open_store().execute("DROP TABLE main.deployments")
        answer = http.get("/ui/chat/dep-none")
    assert answer.status_code == 500 and "internal" in answer.text and "flash-mcp failed unexpectedly" in answer.text


def test_the_command_prints_an_address_that_opens_the_pages(flash_home: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "flash_mcp.cli", "ui", "--no-browser", "--port", str(port)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            address = httpx.URL(server.stderr.readline().split()[1])
            assert address.host.endswith(".localhost") and len(address.host) > 40, "no other port gets the session"
            here = address.copy_with(host="127.0.0.1")
            named = {"host": address.netloc.decode()}
            transport = httpx.HTTPTransport(retries=10)
            with httpx.Client(trust_env=False, transport=transport) as http:
                assert http.get(here).status_code == 421 and "flash-mcp ui" in http.get(here).text
                answer = http.get(here, headers=named)
                assert (answer.status_code, answer.headers["location"]) == (303, "/ui")
                assert "domain=" not in answer.headers["set-cookie"].lower()
                assert "Runs" in http.get(here.join("/ui"), headers=named).text
            with httpx.Client(trust_env=False) as http:
                assert http.get(here, headers=named).status_code == 401, "the code is used up"
        finally:
            server.terminate()
            server.wait(WAIT_S)


def test_in_a_browser_a_page_follows_its_run(team: Team, tmp_path: Path, browser: Any) -> None:
    run, writer = learning_run(tmp_path, range(1, 3))
    give("alice", "alices")
    page = browser.new_page(viewport={"width": 380, "height": 800})
    said, asked = list[str](), list[str]()
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{team.url}/ui")
    page.fill("[name=token]", team.token("alice"))
    page.click("main button")
    page.wait_for_selector("h1:text('Runs')")
    said.clear()  # of the page that asks for a token, whose status is 401
    page.keyboard.press("Tab")
    page.click(f"a[href$='{run.id}']")
    page.wait_for_selector("text=2 of 20 steps")
    colours = "[document.body, document.querySelector('nav')].map(each => getComputedStyle(each).backgroundColor)"
    before = page.evaluate(colours)
    page.click("#theme")
    assert page.evaluate(colours) != before
    page.fill("nav [name=contains]", run.id[-4:])
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:text('Runs')")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark", "on every page from then on"
    page.click(f"a[href$='{run.id}']")
    page.click("#theme")
    assert page.evaluate(colours) == before
    page.click("summary >> nth=0")
    learn(writer, range(3, 6))
    read_in(open_store(), run.id)
    page.wait_for_selector("text=5 of 20 steps")
    assert page.evaluate("document.querySelector('details').open")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.screenshot(path=tmp_path / "run.png", full_page=True)
    assert said == [] and all(address.startswith(team.url) for address in asked)
    page.close()

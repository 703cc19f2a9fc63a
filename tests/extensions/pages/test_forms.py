"""Every form of the pages, submitted in a real browser; and what a browser shows of a refusal."""

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from flash_mcp.state.owners import Quotas
from flash_mcp.state.store import open_store
from flash_mcp.supervisor.loop import Supervisor
from flash_mcp.tools.evaluate import evaluate
from tests.extensions.pages.test_report import browser
from tests.frozen_calls import play_evaluation
from tests.places import ROOT
from tests.samples import finished_run, push_echo, queued_run, sample_rollout, supervised
from tests.server.test_http_server import give
from tests.supervisor.test_model_servers import new_supervisor, served, stop_all
from tests.teams import Team, team_server

__all__ = ["browser"]
pytestmark = pytest.mark.slow
TEMPLATES = ROOT / "flash_mcp/extensions/pages/templates"
SUBMITTED = {"chat", "overview", "page", "run", "sign_in", "transcripts"}
"""The templates whose forms the tests below, and those of test_buttons.py, submit."""


@pytest.fixture
def deployments(flash_home: Path) -> Iterator[Supervisor]:
    yield new_supervisor(flash_home)
    stop_all(flash_home)


@pytest.fixture
def page(team: Team, browser: Any) -> Iterator[Any]:
    """A page of alice's, who has signed in by the form."""
    opened = browser.new_page()
    opened.goto(team.url)
    assert opened.url == f"{team.url}/ui"
    opened.fill("[name=token]", team.token("alice"))
    opened.click("main button")
    opened.wait_for_selector("h1:text('Runs')")
    yield opened
    opened.close()


def test_every_template_with_a_form_has_a_test_that_submits_it() -> None:
    files = TEMPLATES.glob("*.html.j2")
    assert {file.name.partition(".")[0] for file in files if "<form" in file.read_text()} == SUBMITTED


def test_a_wrong_token_is_refused_on_the_page(team: Team, browser: Any) -> None:
    page = browser.new_page()
    page.goto(team.url)
    page.fill("[name=token]", "flash_wrong")
    page.click("main button")
    page.wait_for_selector("p:has-text('no valid bearer token')")
    page.close()


def test_signing_out_leads_to_the_form(page: Any, team: Team) -> None:
    page.click("button:text('Sign out')")
    page.wait_for_selector("p:has-text('Paste a token')")
    assert page.goto(f"{team.url}/ui").status == 401


def test_a_message_is_sent_and_answered(page: Any, deployments: Supervisor, tmp_path: Path) -> None:
    row, _, _ = served(deployments.store, deployments, tmp_path / "adapter")
    open_store().put_rollouts(str(row.run_id), "train", 3, [sample_rollout(3, 0, 1.0)])
    give("alice", "alices")
    page.reload()
    page.click("a:text('Chat')")
    assert f"of {row.run_id} on" in page.inner_text("body")
    page.fill("textarea", "What is 7 * 6?")
    page.click("button:text('Send')")
    page.wait_for_selector("main pre:text-is('hello')")
    assert "Use <calc> to calculate." in page.inner_text("main")
    page.check("[name=raw]")
    page.click("button:text('Send')")
    page.wait_for_selector("main pre:text-is('hello')")
    assert "Use <calc>" not in page.inner_text("main") and page.is_checked("[name=raw]")


def test_chosen_runs_are_shown_together(page: Any, tmp_path: Path) -> None:
    runs = [finished_run(tmp_path / name).id for name in ("one", "other")]
    give("alice", "alices")
    page.reload()
    for run_id in runs:
        page.check(f"[value={run_id}]")
    page.click("button:text('ticked')")
    page.wait_for_selector("h1:text('2 runs together')")
    text = page.inner_text("main")
    assert all(f"{run_id}: 20 % → 90 % of 100 held-out tasks: improved" in text for run_id in runs)


def test_a_large_chart_shows_values_under_the_pointer(page: Any, team: Team, tmp_path: Path) -> None:
    run_id = finished_run(tmp_path).id
    give("alice", "alices")
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(f"{team.url}/ui/runs/{run_id}")
    assert page.inner_text("h1") == "20 % → 90 % of 100 held-out tasks: improved"
    page.hover("#plot .u-over", position={"x": 5, "y": 50})
    first = page.inner_text("#plot .u-legend")
    assert "success, held out (95 %)0.2" in first
    page.hover("#plot .u-over", position={"x": 200, "y": 50})
    assert page.inner_text("#plot .u-legend") != first
    page.select_option(".controls select", "Loss")
    page.check(".controls [type=checkbox]")
    page.wait_for_selector("#plot canvas")
    assert "training" in page.inner_text("#plot .u-legend")
    assert said == []


def test_runs_are_listed_by_state(page: Any, team: Team, tmp_path: Path) -> None:
    done = finished_run(tmp_path / "done").id
    queued = queued_run(tmp_path / "queued").id
    give("alice", "alices")
    page.reload()
    page.select_option("[name=state]", "queued")
    page.click("button:text('Show')")
    page.wait_for_url("**state=queued*")
    assert queued in page.inner_text("main") and done not in page.inner_text("main")
    page.select_option("[name=state]", "")
    page.click("button:text('Show')")
    page.wait_for_selector(f"main:has-text('{done}')")


def test_an_evaluation_has_attempts_and_no_curves(team: Team, tmp_path: Path) -> None:
    push_echo(tmp_path)
    arguments = {"environment": "echo", "model": "smollm2-135m-instruct", "wait_s": 0}
    run_id = anyio.run(functools.partial(evaluate, **arguments)).run_id
    play_evaluation(run_id, 20)
    give("alice", "alices")
    with team.http(team.token("alice")) as http:
        text = http.get(f"/ui/runs/{run_id}").text
    assert "of 60</b> attempts" in text and "Curves" not in text
    assert '<h1 class="">34 % of 59 tasks solved</h1>' in text


def test_transcripts_are_chosen_by_the_form(page: Any, team: Team, tmp_path: Path) -> None:
    run_id = finished_run(tmp_path).id
    give("alice", "alices")
    page.goto(f"{team.url}/ui/runs/{run_id}/rollouts")
    page.select_option("[name=split]", "eval")
    page.select_option("[name=order]", "best")
    page.click("button:text('Show')")
    page.wait_for_selector("p:has-text('1 to 12 of')")
    assert "split=eval" in page.url and "order=best" in page.url
    page.fill("label [name=contains]", "nowhere")
    page.press("label [name=contains]", "Enter")
    page.wait_for_selector("p:has-text('No such rollouts.')")


def test_what_is_refused_is_a_page_and_never_json(flash_home: Path) -> None:
    with supervised(), team_server(Quotas(requests_per_minute=3)) as team:
        headers = {"authorization": f"Bearer {team.token('alice')}"}
        with team.http() as http:
            answers = [
                http.get("/ui"),
                http.get("/ui", headers={"host": "evil.example"}),
                http.get("/", headers={"host": "evil.example"}),
                http.get("/ui/nothing", headers=headers),
                http.get("/ui/runs/run-none", headers=headers),
                http.get("/ui", headers=headers),
                http.get("/ui", headers=headers),
            ]
            first = http.get("/")
    assert (first.status_code, first.headers["location"]) == (303, "/ui")
    assert [answer.status_code for answer in answers] == [401, 421, 421, 404, 404, 200, 429]
    for answer in answers:
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert re.search(r"<h1>.+</h1>", answer.text)
    assert int(answers[-1].headers["retry-after"]) > 0

"""Every button of a run's page, pressed in a real browser; and who is shown none."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flash_mcp.extensions.export import background
from flash_mcp.extensions.pages import ui
from flash_mcp.state.store import open_store
from flash_mcp.tools import checkpoints
from tests.extensions.pages.test_forms import page
from tests.extensions.pages.test_report import browser
from tests.extensions.pages.test_ui import signed_in
from tests.samples import finished_run, learn, learning_run, read_in, rolled_out, sample_rollout
from tests.server.test_http_server import give
from tests.teams import Team, team_server

__all__ = ["browser", "page"]
pytestmark = pytest.mark.slow


def open_run(page: Any, team: Team, run_id: str) -> None:
    give("alice", "alices")
    page.goto(f"{team.url}/ui/runs/{run_id}")


def press(page: Any, name: str, button: str) -> str:
    """Open a button's form, send it, and return what the page says then."""
    page.click(f"[data-key={name}] summary")
    page.click(f"[data-key={name}] button:text('{button}')")
    page.wait_for_selector(".notice")
    return page.inner_text(".notice")


def test_every_button_is_pressed_by_a_test() -> None:
    source = Path(__file__).read_text()
    for name in ui.ACTIONS:
        assert f"[data-key={name}] button" in source or f'press(page, "{name}"' in source, name


def test_a_run_is_stopped(page: Any, team: Team, tmp_path: Path) -> None:
    run, _ = learning_run(tmp_path, range(1, 4))
    open_run(page, team, run.id)
    page.click("[data-key=stop] summary")
    page.fill("[name=reason]", "the curve is flat")
    page.click("[data-key=stop] button")
    page.wait_for_selector(".notice:has-text('and saving, up to 1 min')")
    kept = open_store().run(run.id)
    assert kept.cancel_requested and kept.cancel_reason == "the curve is flat"


def test_a_form_that_is_open_keeps_what_is_typed_while_the_run_goes_on(page: Any, team: Team, tmp_path: Path) -> None:
    run, writer = learning_run(tmp_path, range(1, 4))
    open_run(page, team, run.id)
    page.click("[data-key=note] summary")
    page.fill("[name=note]", "half a thou")
    learn(writer, range(4, 8))
    read_in(open_store(), run.id)
    page.wait_for_selector("main:has-text('7 of 20 steps')")
    assert page.input_value("[name=note]") == "half a thou"


def test_a_checkpoint_is_served_and_no_longer(page: Any, team: Team, tmp_path: Path) -> None:
    run_id = finished_run(tmp_path).id
    open_run(page, team, run_id)
    page.click("[data-key=deploy] summary")
    page.select_option("select[name=step]", "10")
    page.click("[data-key=deploy] button")
    page.wait_for_selector(".notice:has-text('Step 10 is being served')")
    (row,) = open_store().deployments()
    assert (row.run_id, row.step, row.owner, row.state) == (run_id, 10, "alice", "starting")
    page.wait_for_selector("main:has-text('Step 10 is being served: starting')")
    assert row.id in press(page, "undeploy", "Stop serving")
    assert open_store().deployment(row.id).state in ("stopping", "stopped")


def test_a_deployment_that_is_ready_has_a_link_to_its_chat(page: Any, team: Team, tmp_path: Path) -> None:
    open_run(page, team, finished_run(tmp_path).id)
    press(page, "deploy", "Serve it")
    (row,) = open_store().deployments()
    open_store().update_deployment(row.id, state="ready")
    page.click("a:text('Chat with step 20')")
    page.wait_for_selector(f"h1:text('Chat with {row.id}')")


def test_a_run_is_trained_again_with_another_seed(page: Any, team: Team, tmp_path: Path) -> None:
    first = finished_run(tmp_path)
    open_run(page, team, first.id)
    page.click("[data-key=again] summary")
    page.fill("[name=seed]", "7")
    page.click("[data-key=again] button")
    page.wait_for_selector(".notice:has-text('is queued')")
    (again,) = [run for run in open_store().runs() if run.id != first.id]
    assert (again.spec.seed, again.steps, again.environment_digest) == (7, first.steps, first.environment_digest)
    assert again.sources["seed"] == "argument"


def test_a_name_and_a_note_are_kept(page: Any, team: Team, tmp_path: Path) -> None:
    run_id = finished_run(tmp_path).id
    open_run(page, team, run_id)
    page.click("[data-key=note] summary")
    page.fill("[name=name]", "first try")
    page.fill("[name=note]", "rate <1e-4>\nnext: 2e-4")
    page.click("[data-key=note] button")
    page.wait_for_selector("main pre:has-text('rate <1e-4>')")
    run = open_store().run(run_id)
    assert (run.name, run.note) == ("first try", "rate <1e-4>\nnext: 2e-4")


def test_an_export_of_another_s_machine_goes_to_the_hub_and_needs_its_token(page: Any, team: Team, tmp_path: Path):
    open_run(page, team, finished_run(tmp_path).id)
    page.click("[data-key=export] summary")
    page.fill("[name=push_to]", "alice/model")
    page.click("[data-key=export] button")
    page.wait_for_selector("main:has-text('HF_TOKEN')")
    assert "invalid_argument" in page.title()


@pytest.fixture
def local(flash_home: Path) -> Iterator[Team]:
    with team_server(authenticate=False) as started:
        yield started


def test_the_local_owner_exports_in_a_format(local: Team, browser: Any, tmp_path: Path, monkeypatch):
    """The process that writes the files is the edge of the world: tests/extensions/export/test_export.py has it."""
    folder, exporter = tmp_path / "export", background.Exporter

    def look(self: background.Exporter) -> checkpoints.Export:
        return checkpoints.Export(state="ready", folder=f"{folder}-{self.kind}")

    monkeypatch.setattr(exporter, "look", look)
    run_id = finished_run(tmp_path).id
    page = browser.new_page()
    page.goto(f"{local.url}/ui/runs/{run_id}")
    page.click("[data-key=export] summary")
    page.select_option("[name=kind]", "gguf-q8_0")
    page.click("[data-key=export] button")
    page.wait_for_selector(f".notice:has-text('The export is ready: {folder}-gguf-q8_0')")
    page.close()


@pytest.mark.hostile("pages")
def test_a_token_that_only_reads_has_no_buttons_and_its_forms_are_refused(team: Team, tmp_path: Path) -> None:
    run, _ = learning_run(tmp_path, range(1, 4))
    give("alice", "alices")
    address = f"/ui/runs/{run.id}"
    with signed_in(team, team.token("alice")) as http:
        assert "Save and stop the run" in http.get(address).text
    with signed_in(team, team.token("alice", "read")) as http:
        assert http.get(address).text.count('method="post"') == 1  # to sign out
        for name in ui.ACTIONS:
            answer = http.post(f"{address}/{name}", data={"name": "mine", "deployment": "dep-x"})
            assert answer.status_code == 403 and "this token reads only" in answer.text
    with signed_in(team, team.token("bob")) as http:
        for name in ui.ACTIONS:
            answer = http.post(f"{address}/{name}", data={"deployment": "dep-x", "push_to": "bob/model"})
            assert answer.status_code in (400, 404) and answer.text.count('method="post"') == 1
    with signed_in(team, team.token("alice")) as http:
        assert http.post(f"{address}/stop", headers={"origin": "https://evil.example"}).status_code == 403
        assert http.get(f"{address}/stop").headers["location"] == address
    kept = open_store().run(run.id)
    assert kept.cancel_requested is None and kept.name is None


def test_runs_are_searched_ordered_and_kept_apart(page: Any, team: Team, tmp_path: Path) -> None:
    better = finished_run(tmp_path / "better", solved=95).id
    worse = finished_run(tmp_path / "worse", solved=30).id
    give("alice", "alices")
    page.reload()
    links = ".runs td a"
    assert [worse in link or better in link for link in page.locator(".runs tr").all_inner_texts()[1:]] == [True, True]
    page.select_option("[name=order]", "success")
    page.click("button:text('Show')")
    page.wait_for_url("**order=success*")
    assert better in page.locator(".runs tbody tr").first.inner_text()
    page.fill("[name=contains]", worse)
    page.press("[name=contains]", "Enter")
    page.wait_for_url(f"**contains={worse}*")
    assert page.locator(links).count() == 1
    page.click("a:has-text('Samples')")
    page.wait_for_selector("p:text('No such samples.')")


def test_transcripts_share_their_opening_and_show_the_expected_answer_and_an_agents_tree(page: Any, team, tmp_path):
    rows = [sample_rollout(1, index, 0.9 * index) for index in range(2)]
    for row in rows:
        row["expected"] = "42"
        row["turns"] = 2
        row["branches"] = [{"after": 2, "turns": 1, "messages": [{"role": "assistant", "content": "aside"}]}]
    run = rolled_out(tmp_path, rows)
    give("alice", "alices")
    page.goto(f"{team.url}/ui/runs/{run.id}/rollouts")
    assert page.locator("pre:text-is('Use <calc> to calculate.')").count() == 1
    assert page.locator(".pair pre:text-is('42')").count() == 2
    assert page.locator("article.solved, article.missed").count() == 2
    parts = page.locator("article").first.locator("pre").all_inner_texts()
    assert parts == ["What is 1 * 0?", "aside", "The answer is 84.", "42"]
    assert page.locator("article .branch pre").all_inner_texts() == ["aside", "aside"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_verdict_and_success_first(team: Team, browser: Any, tmp_path: Path, scheme: str) -> None:
    run_id = finished_run(tmp_path).id
    give("alice", "alices")
    page = browser.new_page(color_scheme=scheme, viewport={"width": 390, "height": 844})
    page.goto(f"{team.url}/ui")
    page.fill("[name=token]", team.token("alice"))
    page.click("main button")
    for address, selector in (("", ".runs td:nth-child(3)"), (f"/runs/{run_id}", "h1")):
        page.goto(f"{team.url}/ui{address}")
        first = page.locator(selector).first
        assert first.inner_text() == "20 % → 90 % of 100 held-out tasks: improved"
        box = first.bounding_box()
        assert box["y"] + box["height"] < 500 and box["x"] + box["width"] <= 390
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.close()

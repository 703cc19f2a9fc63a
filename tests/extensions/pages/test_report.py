"""The report page: what it holds, that nothing in a run can act in it, and how it looks in a real browser."""

import json
import shutil
import subprocess
from collections.abc import Generator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from flash_mcp.cli import main
from flash_mcp.extensions.pages.report import html
from flash_mcp.protocol.numbers import number
from flash_mcp.protocol.records import Run
from flash_mcp.state import queue
from flash_mcp.state.references import Subject
from flash_mcp.state.store import open_store
from flash_mcp.tools.shared.resolve import resolve_eval
from flash_mcp.tools.shared.run_view import report_on
from tests.places import ROOT
from tests.samples import (
    end,
    evaluate,
    finished_run,
    learn,
    learning_run,
    push_echo,
    read_in,
    sample_rollout,
    save_adapter,
    start,
    started_run,
    supervised,
)

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
HOSTILE = (
    "</pre></details></style><script>document.title = 'taken'</script>"
    '<img src="https://example.invalid/x.png" onerror="document.title = \'taken\'">'
    '<a href="javascript:document.title=\'taken\'">click</a><meta http-equiv=refresh content="0;url=about:blank">'
    "\"'&amp;<!-- \u202e \x00\x1b[31m ]]>"
)
CONTRAST = """() => {
  const rgb = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(c => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = node => { for (; node; node = node.parentElement) {
    const colour = rgb(getComputedStyle(node).backgroundColor); if (colour.length < 4 || colour[3] > 0) return colour; }
    return [255, 255, 255]; };
  const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + .05) / (y + .05); };
  const low = [];
  for (const node of document.body.querySelectorAll('*')) {
    const style = getComputedStyle(node), svg = node instanceof SVGElement;
    const written = [...node.childNodes].some(child => child.nodeType === 3 && child.data.trim());
    const drawn = svg && !node.matches('.grid, svg, title, text');
    const paint = drawn ? (node.matches('circle') ? style.fill : style.stroke) : svg ? style.fill : style.color;
    if (!(written && node.localName !== 'title') && !drawn) continue;
    const found = ratio(rgb(paint), ground(node));
    if (found < (drawn ? 3 : 4.5)) low.push([node.outerHTML.slice(0, 80), paint, found]);
  }
  return low;
}"""


class Tags(HTMLParser):
    """Every element with its attributes, and all text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(autouse=True)
def no_supervisor(flash_home: Path) -> Generator[None, None, None]:
    with supervised():
        yield


def hostile_run(folder: Path) -> Run:
    """A run of 20 steps in which every text that a model, an environment or a user can write is hostile."""
    run, writer = started_run(folder / "environment", environment_args={"note": HOSTILE}, kl_penalty_coef=0.1)
    kl = {"kl": 0.02, "sampling_kl": 0.001, "eval_loss": 0.4, "groups/solved_share": 0.3, f"reward/{HOSTILE}": 0.5}
    evaluate(writer, 0, 20)
    learn(writer, range(1, 21), **{"rollouts/truncated_share": 0.6, **kl})
    row = sample_rollout(20, 0, 0.0, HOSTILE)
    row |= {"task_id": HOSTILE, "reason": HOSTILE, "metrics": {HOSTILE: 0.0}, "index": 0, "finish": HOSTILE}
    error = {"error": {"code": "environment_error", "what": HOSTILE}}
    writer.rollouts(20, [row, {**sample_rollout(20, 1, 0.5, HOSTILE), **error}, sample_rollout(20, 2, 0.9)])
    writer.event("warning", HOSTILE)
    save_adapter(writer, 20, folder)
    evaluate(writer, 20, 60)
    Path(writer.folder.path("log.1")).write_bytes(HOSTILE.encode(errors="replace"))
    writer.commit_result("failed", 20)
    read_in(open_store(), run.id)
    error = {"code": "environment_error", "what": HOSTILE, "fix": HOSTILE, "values": {"task": HOSTILE}}
    queue.finish(open_store(), run.id, 1, "failed", step=20, error=error)
    return open_store().run(run.id)


@pytest.mark.parametrize("lost", [False, True])
def test_the_first_screen_has_a_task_before_and_after_with_what_was_expected(tmp_path: Path, lost: bool):
    run, writer = started_run(tmp_path, eval_before=True, eval_after=True)
    for step, text in ((0, "about <b>60"), (20, "it is 70")):
        rows = [{**sample_rollout(step, index, float(step > 0), text), "expected": "70"} for index in range(3)]
        summary = {"n": 3, "success": float(step > 0), "reward_mean": 0.5, "error_share": 0.0}
        writer.evaluation(step, summary, rows)
    learn(writer, range(1, 21))
    run = end(writer, run.id, 20)
    if lost:
        open_store().execute("DELETE FROM rollouts WHERE split = 'eval' AND step = 0 AND position < 3")
    page = html(open_store(), run.id)
    first = page[page.index('class="tiles"') : page.index("<h2>")]
    shown = 0 if lost else 3
    assert first.count("it is 70") == first.count("about &lt;b&gt;60") == first.count('name="task"') == shown
    assert first.count("before: wrong") == first.count("after: right") == shown
    assert "<b>20 of 20</b> steps" in first and first.count("<figure>") == 1


def test_the_page_has_the_figures_of_status(tmp_path: Path):
    run = finished_run(tmp_path, solved=90)
    page = Tags(html(open_store(), run.id))
    view = report_on(open_store(), run.id, detailed=True).view
    assert view.verdict is not None and view.outlook is not None and view.lineage is not None
    for text in (
        *view.verdict.explanation.split(", by "), view.outlook, "0.200 (0.133 to 0.289)", "0.900 (0.826 to 0.945)",
        f"flash-mcp {view.lineage.code}", "echo@0123456789abcdef", "step 10: ", "group_size", "recipe",
        "Step 20: 8 rollouts", "Held out, step 20: 100 rollouts, success 90 %; failures: wrong 10",
        "The answer is 84.", *(view.metrics or {}),
    ):  # fmt: skip
        assert text in page.text
    assert len([attributes for tag, attributes in page.found if tag == "polyline"]) >= 6


def test_a_page_has_flags_large_numbers_labels_and_the_best_constant(tmp_path: Path):
    run, writer = learning_run(tmp_path, range(1, 12), **{"rollouts/truncated_share": 0.6})
    queue.label(open_store(), run, queue.Label("<i>mine</i>", "<script>1</script>"))
    writer.rollouts(11, [sample_rollout(11, 0, 12345.0)])
    writer.evaluation(11, {"n": 100, "success": 0.9, "constant_success": 0.1234, "constant_n": 40}, [])
    read_in(open_store(), run.id)
    open_store().execute("UPDATE runs SET started = 1, ended = 11521 WHERE id = ?", [run.id])
    page = html(open_store(), run.id)
    assert '<td class="number">0.1234</td>' in page
    text, tags = Tags(page).text, {tag for tag, _ in Tags(page).found}
    assert f"{run.id}: <i>mine</i>" in text and "<script>1</script>" in text and not {"i", "script"} & tags
    assert "reward 12,345" in text and "3 h 12 min time" in text
    assert "truncation" in text and "60 % of the rollouts of steps 2 to 11" in text and "max_tokens" in text


def test_a_large_evaluation_is_not_judged_by_its_best_part(tmp_path: Path):
    run, writer = started_run(tmp_path)
    rollouts = [sample_rollout(0, index, float(index % 4 == 0)) for index in range(1000)]
    writer.evaluation(0, {"n": 1000, "success": 0.25, "reward_mean": 0.25, "error_share": 0.0}, rollouts)
    read_in(open_store(), run.id)
    text = Tags(html(open_store(), run.id)).text
    assert "Held out, step 0: 1000 rollouts, success 25 %; failures of 256 drawn at random: wrong 1" in text
    assert "no success (wrong)" in text


def test_an_evaluation_has_its_success_as_a_bar_and_its_scores_in_words(tmp_path: Path):
    environment = push_echo(tmp_path)
    subject = Subject("smollm2-135m-instruct", 8192, 0)
    resolved = resolve_eval(subject, environment, split="eval", tasks=list(range(60)), attempts=1, arguments={})
    with open_store().transaction():  # a supervisor of the test's would claim it first
        run, _ = queue.enqueue(open_store(), resolved, environment)
        writer = start(run.id)
    rows = [sample_rollout(0, index, float(index % 10 < 7)) for index in range(60)]
    writer.evaluation(0, {"n": 60, "success": 0.7, "reward_mean": 0.7, "error_share": 0.0}, rows)
    end(writer, run.id, 60)
    page = html(open_store(), run.id)
    assert 'class="bar"' in page and 'aria-label="0.700, between 0.534 and 0.826"' in page
    assert "pass at1: 0.7, 2: 0.867, 4: 1" in Tags(page).text


@pytest.mark.parametrize("solved", [0, 1])
def test_a_page_never_says_that_nothing_warns_where_nothing_succeeded(tmp_path: Path, solved: int):
    run, writer = started_run(tmp_path)
    evaluate(writer, 0, solved, of=64)
    read_in(open_store(), run.id)
    page = html(open_store(), run.id)
    assert ("No warning signs." in page, "Nothing succeeded." in page) == (bool(solved), not solved)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is not installed")
def test_the_large_chart_writes_values_as_the_tables_do() -> None:
    values = (12345, -12345.6, 100.4, 99.5, 12.345, 0.5, 0.00123456, 0)
    page = "const addEventListener = () => {}, matchMedia = () => ({ addEventListener });"
    page += "const document = { getElementById: () => null };"
    chart = (ROOT / "flash_mcp/extensions/pages/templates" / "chart.js").read_text()
    program = f"{page}{chart}console.log(JSON.stringify({list(values)}.map(numberText)))"
    printed = subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True).stdout
    assert json.loads(printed) == [number(value, 4) for value in values]


def test_nothing_that_a_run_wrote_becomes_part_of_the_page(tmp_path: Path):
    page = Tags(html(open_store(), hostile_run(tmp_path).id))
    tags = {tag for tag, _ in page.found}
    assert not tags & {"script", "img", "a", "iframe", "object", "embed", "link", "form", "base"}
    assert not {name for _, attributes in page.found for name in attributes} & {
        "onerror", "onload", "href", "src", "style",
    }  # fmt: skip
    assert page.text.count("<script>document.title = 'taken'</script>") >= 9
    policy = next(attributes["content"] for _, attributes in page.found if "http-equiv" in attributes)
    assert policy is not None and policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert not any(character in page.text for character in "\x00\x1b")


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_run_that_has_hardly_begun_has_a_page(tmp_path: Path, steps: int):
    run, _ = learning_run(tmp_path, range(1, steps + 1))
    assert ("No steps yet." in Tags(html(open_store(), run.id)).text) == (steps == 0)


def test_the_command_writes_the_page_and_says_where(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]):
    run_id = finished_run(tmp_path).id
    monkeypatch.chdir(tmp_path)
    assert main.main(["report", run_id]) == 0 and capsys.readouterr().out.strip() == f"{run_id}.html"
    assert Path(f"{run_id}.html").read_text().startswith("<!doctype html>")
    assert main.main(["report", run_id, "--to", "other.html", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": str(Path("other.html").absolute())}
    assert Path("other.html").is_file()
    assert main.main(["report", "run-none"]) == 1
    assert "unknown_run" in capsys.readouterr().err
    assert main.main(["report", run_id, "--out", "/nonexistent/x.html"]) == 2
    assert "--out" in capsys.readouterr().err


@pytest.fixture
def browser() -> Generator[Any, None, None]:
    sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if BROWSER is None:
        pytest.skip("no Chromium or Chrome on this machine; with Debian: apt-get install chromium")
    with sync.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.slow
def test_in_a_browser_the_page_is_legible_and_nothing_in_it_acts(tmp_path: Path, browser: Any):
    file = tmp_path / "report.html"
    file.write_text(html(open_store(), hostile_run(tmp_path).id), encoding="utf-8")
    for scheme, width in (("light", 1100), ("dark", 1100), ("light", 360)):
        page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
        said: list[str] = []
        asked: list[str] = []
        page.on("console", lambda message: said.append(message.text))  # noqa: B023
        page.on("pageerror", lambda error: said.append(str(error)))  # noqa: B023
        page.on("request", lambda request: asked.append(request.url))  # noqa: B023
        page.goto(file.as_uri())
        page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        page.screenshot(path=tmp_path / f"report-{scheme}-{width}.png", full_page=True)
        assert (said, asked) == ([], [file.as_uri()])
        assert (
            page.title().startswith("run-") and page.evaluate("document.scripts.length + document.images.length") == 0
        )
        assert page.evaluate("[...document.querySelectorAll('pre')].some(each => each.innerText.includes('<script>'))")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "wider than its window"
        assert page.evaluate("getComputedStyle(document.body).maxWidth") != "none", "the policy refused the style sheet"
        assert page.evaluate(CONTRAST) == [] and page.locator("figure > svg").count() >= 8
        sizes = page.evaluate(
            "[...document.querySelectorAll('figure > svg')].map(e => e.getBoundingClientRect().height)"
        )
        assert min(sizes) > 100
        page.close()

"""What pages and lists cost: little, however many runs are queued and however many browsers look."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from flash_mcp.extensions.pages import live
from flash_mcp.state.store import Store, open_store
from flash_mcp.tools.status import status
from tests.extensions.pages.test_ui import signed_in
from tests.samples import finished_run, learn, queued_run, read_in, started_run, supervised
from tests.server.test_http_server import give
from tests.teams import team_server

pytestmark = pytest.mark.slow
QUEUED = 120


def add_queued(count: int) -> None:
    store = open_store()
    template = store.query("SELECT * FROM runs WHERE state = 'queued'")[0]
    template.pop("gpus")  # the database computes it
    with store.transaction():
        for number in range(count):
            store.insert("runs", {**template, "id": f"run-q{number:07d}", "idempotency_key": None})


async def test_a_list_and_a_report_read_few_rows_though_many_runs_are_queued(tmp_path: Path, monkeypatch):
    with supervised():
        ended = finished_run(tmp_path / "ended")
        queued_run(tmp_path / "queued")
        add_queued(QUEUED)
        sizes: list[int] = []
        query = Store.query

        def counted(store: Store, *arguments: Any) -> list[Any]:
            rows = query(store, *arguments)
            sizes.append(len(rows))
            return rows

        monkeypatch.setattr(Store, "query", counted)
        listed = await status()
        assert listed.runs and len(listed.runs) == 15
        assert max(sizes) < QUEUED / 2 and len(sizes) < 15 * 6
        sizes.clear()
        assert (await status(run_id=ended.id)).run
        assert max(size for size in sizes) <= QUEUED  # the pairs of 100 examples


def test_a_page_that_many_browsers_show_is_rendered_once_a_change_and_owner(flash_home: Path, tmp_path, monkeypatch):
    rendered: list[None] = []
    overview = live.overview

    def counted(*arguments: Any) -> str:
        rendered.append(None)
        return overview(*arguments)

    monkeypatch.setattr(live, "overview", counted)
    with supervised(), team_server() as team:
        run, writer = started_run(tmp_path)
        give("alice", "alices")
        with (
            signed_in(team, team.token("alice")) as alice,
            signed_in(team, team.token("bob")) as bob,
            ThreadPoolExecutor(8) as browsers,
        ):

            def load() -> list[str]:
                return [page.text for page in browsers.map(alice.get, ["/ui"] * 8)]

            first = load()
            assert len(rendered) == 1 and len(set(first)) == 1 and run.id in first[0]
            assert run.id not in bob.get("/ui").text and len(rendered) == 2
            learn(writer, range(1, 4))
            read_in(open_store(), run.id)
            assert "3/20" in load()[0] and len(rendered) == 3

"""Results label by label, of evaluations whose gold answers are labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flash_mcp.judgement.labels import NO_LABEL, label_said
from flash_mcp.state.store import open_store
from tests.calls import call
from tests.samples import end, push_echo, read_in, sample_rollout, started_run

pytestmark = pytest.mark.usefixtures("no_supervisor")

GOLDS = ["ship"] * 30 + ["bill"] * 24 + ["log in"] * 6


def labelled(step: int, answers: list[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for index, (gold, answer) in enumerate(zip(GOLDS, answers, strict=True)):
        row = sample_rollout(step, index, float(gold == answer), f"I think <answer>{answer}</answer>")
        rows.append({**row, "task_id": f"eval-{index}", "expected": gold, "split": "eval"})
    return rows


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>Ship</answer>", "ship"),
        ("ship or bill? <answer> log_in </answer>", "log in"),
        ("It says:\nBILL.", "bill"),
        ("This is about a bill, surely", "bill"),
        ("ship or bill", NO_LABEL),
        ("shipping", NO_LABEL),
        ("", NO_LABEL),
    ],
)
def test_the_label_that_an_answer_names(text: str, expected: str):
    assert label_said(text, {"ship": "ship", "bill": "bill", "log in": "log in"}) == expected


async def test_results_are_shown_by_label_wherever_an_evaluation_is(tmp_path: Path, html: Any):
    folder = tmp_path / "echo"
    (folder / "datasets").mkdir(parents=True)
    words = {"ship": "my parcel is late", "bill": "the invoice is wrong", "log in": "i lost my password"}
    for split, count in (("train", 20), ("eval", 4)):
        rows = [{"input": f"{text} {n}", "output": label} for label, text in words.items() for n in range(count)]
        (folder / "datasets" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    push_echo(folder)
    run, writer = started_run(folder)
    answers = {0: ["ship"] * 60, 20: ["ship"] * 30 + ["bill"] * 20 + ["ship"] * 3 + ["what?"] + ["bill"] * 6}
    for step, said in answers.items():
        rows = labelled(step, said)
        share = sum(row["success"] for row in rows) / 60
        writer.evaluation(step, {"n": 60, "success": share, "reward_mean": share, "error_share": 0.0}, rows)
    read_in(open_store(), run.id)
    end(writer, run.id, 20)

    view = (await call("status", run_id=run.id))["run"]
    found = view["by_label"]
    assert "counting words does as well" in view["verdict"]["explanation"]
    worst = found["labels"][0]
    assert (worst["label"], worst["n"], worst["right"], worst["taken_for"]) == ("log in", 6, 0.0, {"bill": 6})
    bill = next(row for row in found["labels"] if row["label"] == "bill")
    assert bill["taken_for"] == {"ship": 3, NO_LABEL: 1}
    assert found["few"] == "fewer than 20 tasks: log in 6"
    assert found["balanced"] == pytest.approx((1 + 20 / 24 + 0) / 3, abs=1e-3)
    assert "by words: 100 % of the 12 eval rows" in found["baseline"]

    compared = await call("compare", base=run.id)
    assert [compared[side]["by_label"]["step"] for side in ("base", "other")] == [0, 20]
    assert compared["other"]["by_label"]["labels"] == found["labels"]
    page = html(open_store(), run.id)
    assert "By label" in page and "bill 6" in page and found["baseline"] in page

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from environments.host import EnvironmentHost
from tests.attempts import Attempt, make_run
from tests.tiny import make_tokenizer
from worker.sft import IGNORED, gold_rows
from worker.transcript import ChatTemplate

CALCULATOR = Path(__file__).parent.parent / "environments" / "calculator"


@pytest.mark.anyio
async def test_every_assistant_token_of_a_gold_conversation_is_learnt_and_no_other() -> None:
    template = ChatTemplate(make_tokenizer())
    decode = template.tokenizer.decode
    async with await EnvironmentHost.start(CALCULATOR) as host:
        rows = await gold_rows(host, template, "eval", 4096)
        for index, row in enumerate(rows):
            opening = await host.open("eval", index)
            await host.close(opening.episode)
            gold = await host.gold("eval", index)
            whole = template.tokenizer.apply_chat_template([*opening.messages, *gold], tokenize=False)
            assert decode(row["input_ids"]) + "\n" == whole
            learnt = [token for token in row["labels"] if token != IGNORED]
            said = [message["content"] for message in gold if message["role"] == "assistant"]
            assert decode(learnt) == "".join(f"{text}<|im_end|>" for text in said)
            assert all(label in (IGNORED, token) for token, label in zip(row["input_ids"], row["labels"], strict=True))
    assert len(rows) == 200


@pytest.mark.timeout(300)
def test_a_fine_tuned_adapter_warms_a_grpo_run(tiny_model: Path, tmp_path: Path) -> None:
    calculator: dict[str, Any] = {"environment": CALCULATOR, "max_length": 1024, "eval_examples": 4}
    tuned = make_run(
        tmp_path / "sft", tiny_model, algorithm="sft", group_size=None, steps=6, save_every=3, eval_after=True,
        **calculator,
    )  # fmt: skip
    with Attempt(tuned) as attempt:
        assert attempt.wait() == 0, attempt.log_path.read_text()
    result = tuned.result()
    assert result and result["state"] == "succeeded", result
    losses = [tuned.metrics(step)["metrics"]["loss"] for step in range(1, 7)]  # pyright: ignore[reportOptionalSubscript]
    assert losses[-1] < losses[0] - 0.5
    assert tuned.checkpoint_steps() == [3, 6] and list(tuned.eval_steps()) == [6] and not tuned.rollout_steps()

    start = {"init_adapter": {"path": tuned.path("checkpoints", "6"), "run_id": "sft", "step": 6, "digest": ""}}
    warmed = make_run(tmp_path / "grpo", tiny_model, job=start, steps=1, max_tokens=8, **calculator)
    with Attempt(warmed) as attempt:
        assert attempt.wait() == 0, attempt.log_path.read_text()
    assert warmed.checkpoint_steps() == [1]

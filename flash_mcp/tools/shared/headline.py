"""A run in one line, for people: the numbers that decide first."""

from __future__ import annotations

from flash_mcp.judgement.health import WORSE_ELSEWHERE
from flash_mcp.protocol.numbers import number, percent
from flash_mcp.tools.shared.run_view import RunView


def headline(view: RunView) -> str:
    """Such as "10 % → 100 % of 200 held-out tasks: improved"."""
    if any(flag.name == WORSE_ELSEWHERE for flag in view.flags or ()):
        return f"{_change(view)}, worse at other kinds of tasks"
    return _change(view)


def _change(view: RunView) -> str:
    if view.held_out:
        newest = view.held_out[-1]
        text = percent(newest.success)
        if len(view.held_out) > 1 and view.held_out[0].step == 0:
            text = f"{percent(view.held_out[0].success)} → {text}"
        text += f" of {newest.n} held-out tasks"
        if not newest.step:
            text += " before training"
            if view.state != "running":
                text += f": {view.state}"
        if view.verdict:
            text += f": {view.verdict.outcome.replace('_', ' ')}"
        return text
    subject = "Evaluation" if view.algorithm == "eval" else "Training"
    if view.state == "queued":
        place = "queued"
        if view.queued_ahead:
            place += f", {view.queued_ahead} before it"
        return f"{view.name or subject}: {place}"
    if view.state in ("failed", "cancelled"):
        return f"{subject}: {view.state}"
    if view.scores and view.scores.success is not None:
        return f"{percent(view.scores.success)} of {view.scores.tasks} tasks solved"
    if view.success:
        moved = f"{percent(view.success.first)} → {percent(view.success.last)}"
        return f"{moved} success in training"
    if view.held_out_loss:
        first, last = view.held_out_loss.first, view.held_out_loss.last
        return f"Held-out loss {number(first)} → {number(last)}"
    if view.loss:
        return f"Training loss {number(view.loss.first)} → {number(view.loss.last)}"
    return f"{subject}: {view.state}"

"""recordings: what a deployment was asked and answered."""

from __future__ import annotations

from collections.abc import Callable

from flash_mcp.cli.output import answer, render_all
from flash_mcp.cli.parsing import JSON, Arguments, Command, flag, option
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.recordings import Recording, pseudonym, rating_of
from flash_mcp.protocol.records import Json, text_of
from flash_mcp.state.store import open_store
from flash_mcp.tools.shared.truncation import shorten, utc

QUESTION_CHARACTERS = 80


def recordings(arguments: Arguments) -> None:
    """List what a deployment recorded, newest first, or delete it with --delete.

    The options narrow it down: an answer has to match all of them."""
    store = open_store()
    recording = Recording(store.base, store.deployment(arguments.deployment).id)
    matches = _matcher(arguments)
    if arguments.delete:
        deleted = recording.delete(matches)
        answer(arguments, {"deleted": deleted}, f"deleted {deleted}")
        return
    rows: list[Json] = []
    for line in filter(matches, recording.answers()):
        question = shorten(text_of(line["messages"][-1]), QUESTION_CHARACTERS)
        shown = {name: line.get(name) for name in ("id", "user", "rating")}
        rows.insert(0, {"time": utc(line.get("time", 0.0)), **shown, "question": question})
    answer(arguments, rows, "\n".join(render_all(rows, "")) if rows else "nothing matches")


def _matcher(arguments: Arguments) -> Callable[[Json], bool]:
    user = arguments.user
    names = None if user is None else (user, pseudonym(user))
    rating = rating_of(arguments.rating)
    if arguments.rating not in (None, "none") and rating is None:
        what = f"--rating: {arguments.rating!r:.40} is no rating"
        raise FlashError("invalid_argument", what, fix="give up, down, none or a number")

    def matches(line: Json) -> bool:
        is_users = names is None or line.get("user") in names
        return is_users and (arguments.rating is None or line["rating"] == rating)

    return matches


COMMAND = Command(
    recordings,
    (
        "flash-mcp recordings dep-4k2j9x1c --rating down",
        "flash-mcp recordings dep-4k2j9x1c --user alice@example.com --delete",
    ),
    (
        option("deployment", "a deployment that records its requests", "DEPLOYMENT"),
        option("--user", "of this user", "USER"),
        option("--rating", "rated so: up, down, a number, or none", "RATING"),
        flag("--delete", "delete them and their ratings"),
        JSON,
    ),
)

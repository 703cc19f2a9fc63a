"""`flash-mcp remove`: what it would remove, the question, and the removal."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import asdict

from flash_mcp.cli.output import answer, say
from flash_mcp.cli.parsing import Arguments
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.paths import home
from flash_mcp.state import removal
from flash_mcp.state.disk import in_words, spend_reserve
from flash_mcp.state.owners import LOCAL_OWNER
from flash_mcp.state.removal import Removed, ended_runs
from flash_mcp.state.store import Store, open_store

AGE = re.compile(r"(\d+)([hdw])")
SECONDS = {"h": 3600.0, "d": 86_400.0, "w": 604_800.0}
NAMED = 5
"""Ids that are named in a line."""


def remove(arguments: Arguments) -> None:
    """Delete runs, exports, environment versions and datasets that nothing else depends on.

    On a terminal, and for --older-than and --failed, it shows first what goes and asks; --yes
    answers. With these options it leaves out what is in use. Afterwards the database shrinks."""
    spend_reserve(home())
    store = open_store()
    age_s = _seconds(arguments.older_than)
    is_filtered = age_s is not None or arguments.failed
    if not arguments.references and not is_filtered:
        fix = "name what to remove, or pass --older-than or --failed; see flash-mcp remove --help"
        raise FlashError("invalid_argument", "nothing was named", fix=fix)
    results: list[str] = []
    if is_filtered:
        results = ended_runs(store, older_than_s=age_s, only_failed=arguments.failed)
    references = [*arguments.references, *results]
    asks = (is_filtered or sys.stdin.isatty()) and not arguments.yes
    if arguments.dry_run or asks:
        skips = references if is_filtered or asks else []
        count = _show(arguments, store, references, skips)
        if arguments.dry_run or not count:
            return
        _ask(len(references))
    freed = 0
    for gone in _removed(store, references, references if asks else results):
        freed += gone.freed_bytes
        answer(arguments, asdict(gone), f"removed {_line(gone)}")
    shrunk = store.shrink()
    if is_filtered and not arguments.json:
        say(f"freed {in_words(freed)}; the database shrank by {in_words(shrunk)}")


def _show(arguments: Arguments, store: Store, references: list[str], skips: list[str]) -> int:
    """Say what would be removed; how many that is."""
    sizes: list[int] = []
    for gone in _removed(store, references, skips, dry_run=True):
        sizes.append(gone.freed_bytes)
        answer(arguments, asdict(gone), f"would remove {_line(gone)}")
    if len(references) > 1 and not arguments.json:
        say(f"{len(sizes)} of {len(references)}, {in_words(sum(sizes))}")
    if not references:
        sys.stderr.write("no such run has ended\n")
    return len(sizes)


def _removed(
    store: Store, references: list[str], skips: list[str], *, dry_run: bool = False
) -> Iterator[Removed]:
    """Remove them one by one; say of those in `skips` that are in use that they stay."""
    for reference in references:
        try:
            gone = removal.remove(store, reference, dry_run=dry_run)
        except FlashError as error:
            if error.code != "in_use" or reference not in skips:
                raise
            sys.stderr.write(f"{error.what}\n")
        else:
            yield gone


def _ask(count: int) -> None:
    """FlashError(invalid_argument) unless a person says yes."""
    if sys.stdin.isatty():
        sys.stderr.write(f"Remove {'it' if count == 1 else 'these'} for good? [y/N] ")
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            return
    raise FlashError("invalid_argument", "nothing was removed", fix="repeat it with --yes")


def _line(gone: Removed) -> str:
    whose = f" of {gone.owner}" if gone.kind == "run" and gone.owner != LOCAL_OWNER else ""
    text = f"{gone.kind} {gone.reference}{whose}, {in_words(gone.freed_bytes)}"
    if gone.used_by:
        more = f" and {len(gone.used_by) - NAMED} more" if len(gone.used_by) > NAMED else ""
        text += f"; {', '.join(gone.used_by[:NAMED])}{more} started from it"
    if gone.elsewhere:
        text += f"; its files stay at {gone.elsewhere}, which is not in the state directory"
    return text


def _seconds(age: str | None) -> float | None:
    if age is None:
        return None
    match = AGE.fullmatch(age)
    if match is None:
        fix = "write hours, days or weeks, as in 12h, 30d or 8w"
        raise FlashError("invalid_argument", f"--older-than cannot be {age!r:.100}", fix=fix)
    return int(match[1]) * SECONDS[match[2]]

"""Pages that many browsers show at once: each is rendered once for a change and an owner."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
from anyio.to_thread import run_sync

from flash_mcp.state.owners import caller
from flash_mcp.state.store import open_store

MARK_S = 0.5
"""Of streams. A look for changes is shared by those who ask within this time."""
PAGE_S = 15.0
"""A page is rendered anew after this time though nothing changed: it shows how long runs take."""
MOST = 256
"""Pages and marks that are kept."""


@dataclass
class _Shared:
    """A value, and the lock of who makes it."""

    lock: anyio.Lock = field(default_factory=anyio.Lock)
    mark: Any = None
    value: Any = None
    made_at: float = float("-inf")


class SharedPages:
    """The pages of one server. Owners share nothing."""

    def __init__(self) -> None:
        self._values: OrderedDict[tuple[str, ...], _Shared] = OrderedDict()

    async def mark(self, run_id: str | None, max_age_s: float = MARK_S) -> object:
        """What differs once something about a run changed, or about anything of the caller's."""
        requested_at = time.monotonic()
        shared = self._of("mark", run_id or "")
        async with shared.lock:
            if requested_at - shared.made_at > max_age_s:
                began = time.monotonic()
                shared.value = await run_sync(lambda: open_store().change_mark(run_id))
                shared.made_at = began
            return shared.value

    async def page(self, address: str, run_id: str | None, render: Callable[[], str]) -> bytes:
        """The page at an address, which shows a run or several."""
        shared = self._of("page", address)
        # No older than the request: a page has to show what was there before it was opened.
        mark = await self.mark(run_id, max_age_s=0.0)
        async with shared.lock:
            is_old = time.monotonic() - shared.made_at > PAGE_S
            if is_old or shared.mark != mark:
                # What changes meanwhile has another mark.
                text = await run_sync(render)
                shared.value = text.encode()
                shared.mark, shared.made_at = mark, time.monotonic()
            return shared.value

    def _of(self, *key: str) -> _Shared:
        # A token that only reads is shown no buttons.
        name = (caller().owner, caller().access, *key)
        shared = self._values.setdefault(name, _Shared())
        self._values.move_to_end(name)
        if len(self._values) > MOST:
            self._values.popitem(last=False)
        return shared

"""The calls of an agent as one row of tokens.

Each call has a transcript of its own: what the model was shown, and what it sampled. A call that
continues an earlier one begins with that one's tokens. `merged` puts all of them into one
transcript, in which a token that several calls share is there once, and each sampled token is
trained once, in the context that it was sampled in."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from environments.agents.calls import NO_OPTIONS, CallOptions
from environments.base import Json
from worker.rollouts.transcript import Transcript, with_experts


@dataclass
class Call:
    number: int
    parent: Call | None
    transcript: Transcript
    shown: int
    """Tokens before the answer."""
    options: CallOptions = NO_OPTIONS
    finish: str = "stop"
    """Why the answer ended: stop or length."""
    has_grammar: bool = False

    @property
    def policies(self) -> Counter[int]:
        """Those that sampled the answer; the transcript's are also those of its parents."""
        before = self.parent.transcript.policies if self.parent else Counter[int]()
        return self.transcript.policies - before

    @property
    def line(self) -> list[Call]:
        """The calls from the first one of this conversation to this one."""
        calls: list[Call] = []
        call: Call | None = self
        while call is not None:
            calls.append(call)
            call = call.parent
        return calls[::-1]

    def described(self, conversation: int, last: int) -> Json:
        """The call as records.Rollout has it. `last` is the place of its last token."""
        held: Json = {}
        if self.has_grammar:
            answer = slice(self.shown - len(self.transcript.prompt_ids), None)
            held = {"trained_tokens": sum(self.transcript.mask[answer])}
        return {
            "number": self.number,
            "parent": self.parent.number if self.parent else None,
            "conversation": conversation,
            "role": self.options.role,
            "trained": self.options.is_trained,
            "prompt_tokens": self.shown,
            "completion_tokens": len(self.transcript) - self.shown,
            "finish": self.finish,
            "last": last,
            **held,
        }


def merged(calls: Sequence[Call]) -> Transcript:
    """The calls, in the order of their numbers, as one transcript, whose messages are those of the
    last call. A call that is continued comes before those that continue it.
    """
    row = _Row()
    for call in calls:
        row.add(call)
    main = calls[-1]
    created = copy.copy(main.transcript)
    first = calls[0].shown
    created.prompt_ids = row.ids[:first]
    created.completion_ids = row.ids[first:]
    created.mask = row.mask[first:]
    created.logprobs = row.logprobs[first:]
    created.forks = row.forks
    created.experts = row.experts
    created.truncated = any(call.transcript.truncated for call in calls)
    created.policies = sum((call.policies for call in calls), Counter[int]())
    places = {call.number: 0 for call in main.line}
    created.branches = list(_branches(calls, main, places))
    created.calls = [call.described(places[call.number], row.last_of(call)) for call in calls]
    return created


class _Row:
    """Tokens, and where each call's are among them."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.mask: list[int] = []
        self.logprobs: list[float] = []
        self.forks: list[tuple[int, int]] = []
        self.experts: Any = None
        self._added: list[tuple[Call, list[int]]] = []

    def add(self, call: Call) -> None:
        transcript = call.transcript
        ids = transcript.ids
        shown = ids[: call.shown]
        places = self._shared(call, shown)
        for number in range(len(places), len(ids)):
            at = number - len(transcript.prompt_ids)
            is_trained = number >= call.shown and bool(transcript.mask[at])
            last = places[-1] + 1 if places else 0
            if last != len(self.ids):
                self.forks.append((len(self.ids), last))
            places.append(len(self.ids))
            self.ids.append(ids[number])
            self.mask.append(int(is_trained))
            self.logprobs.append(transcript.logprobs[at] if is_trained else 0.0)
        self._added.append((call, places))
        self.experts = with_experts(self.experts, len(self.ids), places, transcript.experts)

    def last_of(self, call: Call) -> int:
        return next(places[-1] for added, places in self._added if added is call)

    def _shared(self, call: Call, shown: Sequence[int]) -> list[int]:
        """Where the tokens that the call was shown are already: those of its parent, and as many
        more as another call that continues that parent, or also begins anew, was shown.
        """
        best: list[int] = []
        for other, places in self._added:
            if other is call.parent and len(places) > len(best):
                best = places
            if other.parent is not call.parent:
                continue
            theirs = [self.ids[place] for place in places[: other.shown]]
            same = _shared_beginning(theirs, shown)
            if same > len(best):
                best = places[:same]
        return [*best]


def _branches(calls: Sequence[Call], main: Call, places: dict[int, int]) -> Iterator[Json]:
    """The conversations that end beside that of `main`. `places` says which conversation each call
    is of; calls of new ones are added.
    """
    continued = {call.parent.number for call in calls if call.parent}
    earlier = [main.transcript.messages]
    for call in calls:
        if call.number in places or call.number in continued:
            continue
        messages = call.transcript.messages
        shared = [_shared_beginning(messages, other) for other in earlier]
        after = max(shared)
        earlier.append(messages)
        own = [item.number for item in call.line if item.number not in places]
        places.update(dict.fromkeys(own, max(places.values()) + 1))
        yield {
            "of": shared.index(after),
            "after": after,
            "turns": len(own),
            "messages": messages[after:],
            "tools": call.transcript.template.tools,
        }


def _shared_beginning(one: Sequence[Any], other: Sequence[Any]) -> int:
    pairs = zip(one, other, strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))

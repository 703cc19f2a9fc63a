"""Rollouts whose calls form trees: trained as their separate calls would be, each token once."""

import random
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from flash_mcp.extensions.pages.render import Node, dialogue
from worker.rollouts.calls import Call, merged
from worker.rollouts.scheduler import PlayedRollout, RolloutTask
from worker.rollouts.transcript import ChatTemplate, Transcript
from worker.rollouts.turns import Completion
from worker.training import packing


def make_calls(template: ChatTemplate, rng: random.Random, question: str) -> list[Call]:
    """Calls that continue any earlier one, sample it again, or begin anew with its first message."""
    calls: list[Call] = []
    start = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
    for number in range(rng.randint(2, 7)):
        parent = rng.choice([None, *calls]) if calls else None
        if parent:
            transcript = parent.transcript.copy()
            transcript.add_environment([{"role": "user", "content": rng.choice("ab")}])
        else:
            summary = [{"role": "user", "content": rng.choice(["so far", "so on"])}]
            opening = start if number == 0 or rng.random() < 0.4 else [start[0], *summary]
            transcript = Transcript(template, opening)
        call = Call(number, parent, transcript, len(transcript))
        sampled = [rng.choice((65, 66)) for _ in range(rng.randint(1, 5))]
        chances = [-4.5 + rng.gauss(0, 0.5) for _ in sampled]
        experts = experts_of(transcript.ids + sampled[:-1])
        transcript.add_answer(Completion(sampled, chances, "stop", experts=experts))
        calls.append(call)
    return calls


def experts_of(ids: list[int]) -> Any:
    """Of each token, by all tokens up to it: two layers, one expert."""
    passed = [[[sum(ids[: at + 1]) % 101], [at]] for at in range(len(ids))]
    return np.array(passed, dtype=np.int16)


def test_a_tree_holds_each_token_once_and_each_call_exactly(fp32_model: Path) -> None:
    template = ChatTemplate(AutoTokenizer.from_pretrained(fp32_model))
    rng = random.Random(1)
    for _ in range(50):
        calls = make_calls(template, rng, "question")
        row = merged(calls)
        assert sum(row.mask) == sum(len(call.transcript) - call.shown for call in calls)
        paths = list(packing.paths_of(len(row), row.forks))
        found = [[row.ids[place] for place in path] for path in paths]
        for path, ids in zip(paths, found, strict=True):
            known = [at for at, place in enumerate(path) if place < len(row.experts) and row.experts[place, 0, 0] >= 0]
            assert (row.experts[[path[at] for at in known]] == experts_of(ids)[known]).all()
            unknown = {place for at, place in enumerate(path) if at not in set(known)}
            assert unknown <= {call["last"] for call in row.calls}, "the last of an answer that nothing continues"
        for call in calls:
            ids = call.transcript.ids
            assert any(path[: len(ids)] == ids for path in found)
        assert sum(branch["turns"] for branch in row.branches) == len(calls) - len(calls[-1].line)
        assert row.messages == calls[-1].transcript.messages
        whole = whole_conversations(row)
        for number, branch in enumerate(row.branches, 1):
            assert any(call.transcript.messages == whole[number] for call in calls)
            # No message that an earlier conversation has is there again.
            begins = whole[number][: branch["after"] + 1]
            assert not branch["messages"] or all(other[: len(begins)] != begins for other in whole[:number])


def whole_conversations(record: Any) -> list[Any]:
    whole = [record.messages]
    for branch in record.branches:
        whole.append(whole[branch["of"]][: branch["after"]] + branch["messages"])
    return whole


def depth(nodes: list[Node]) -> int:
    return max((1 + depth(node.messages) for node in nodes if node.role == "branch"), default=0)


def test_a_record_of_a_tree_counts_its_turns_and_shows_every_conversation(fp32_model: Path) -> None:
    template = ChatTemplate(AutoTokenizer.from_pretrained(fp32_model))
    rng = random.Random(2)
    deepest = 0
    for _ in range(50):
        calls = make_calls(template, rng, "question")
        record = PlayedRollout(RolloutTask("train", 0, 0, 0, 0), "t", merged(calls), turns=len(calls)).record(1)
        start = len(record.messages) - 2 * len(calls[-1].line) + 1
        assert record.prompt_messages == start, "what the model was shown first"
        assert record.answers == [message["content"] for message in record.messages[start::2]]
        shown = [message["role"] for message in record.shown_messages]
        assert shown.count("branch") == len(record.branches)
        depths = [0]
        for branch in record.branches:
            depths.append(depths[branch["of"]] + 1)
        deepest = max(deepest, *depths)
        page = dialogue(record, 0)
        assert depth(page.before + page.answer) == max(depths)
        for part, messages in zip(record.conversations, whole_conversations(record), strict=True):
            assert part.messages == messages
        assert len(shown) == len(record.messages) + sum(1 + len(branch["messages"]) for branch in record.branches)
        talks = record.conversations
        assert [call["number"] for call in record.calls] == [call.number for call in calls]
        for talk in talks:
            own = [call for call in record.calls if call["conversation"] == talk.conversation]
            assert talk.turns == len(own) == len(talk.answers)
            assert talk.messages == calls[own[-1]["number"]].transcript.messages
        assert sum(talk.turns for talk in talks) == len(calls)
        assert sum(call["completion_tokens"] for call in record.calls) == record.completion_tokens
    assert deepest > 1

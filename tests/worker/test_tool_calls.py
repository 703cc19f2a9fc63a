"""Tool calls: shown by the chat template, sampled, read by vLLM's parser, answered, and learnt."""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trl
from vllm.tool_parsers import ToolParserManager

from environments.process.host import EnvironmentHost
from environments.tools import text_of
from flash_mcp.protocol.base_models import FORMS, tool_form, with_tools
from flash_mcp.protocol.errors import FlashError
from tests.places import ROOT, TOOL_CALCULATOR
from tests.tiny import CHATML, make_tokenizer
from tests.virtual import FakeEngine, rolled
from worker.rollouts.gold import IGNORED, dataset_rows
from worker.rollouts.metrics import summarize
from worker.rollouts.scheduler import PlayedRollout, RolloutTask, TalkLimits
from worker.rollouts.transcript import ChatTemplate, Transcript
from worker.rollouts.turns import Completion, Sampling
from worker.training.sft import gold_rows

QUESTION = [{"role": "user", "content": "What is 12 * 7?"}]
PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
TOOLS = [{"type": "function", "function": {"name": "calculate", "parameters": PARAMETERS}}]
RESULT = {"role": "tool", "tool_call_id": "call00000", "name": "calculate", "content": "84"}
MODELS_PAGE = ROOT / "docs" / "models.md"
TEMPLATES = Path(trl.__file__).parent / "chat_templates"


def template(text: str = CHATML, **options: Any) -> ChatTemplate:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = text
    return ChatTemplate(tokenizer, **options)


def call(name: str, arguments: Any, number: int = 0) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"call{number:05}", "type": "function", "function": function}


def written(chat: ChatTemplate, text: str) -> Completion:
    ids = chat.tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False)
    return Completion(ids, [-0.5] * len(ids), "stop")


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", ["ours", "qwen2_5", "qwen3", "qwen3_instruct_2507"])
def test_calls_are_read_as_the_template_writes_them_and_history_reads_as_it_renders(name: str, thinking: bool) -> None:
    text = CHATML if name == "ours" else (TEMPLATES / f"{name}.jinja").read_text()
    chat = template(text, thinking=thinking)
    transcript = Transcript(chat, QUESTION, TOOLS)
    calls = [call("calculate", {"text": 'a "b"\né'}), call("calculate", {"text": "</x>"}, 1)]
    for content in ("", "So:\n"):
        turn = transcript.add_answer(transcript.template.answer(content.strip(), calls))
        assert (turn.content, turn.bad_tool_call) == (content, None)
        assert [each["function"] for each in turn.tool_calls] == [each["function"] for each in calls]
        transcript.add_environment([RESULT, {**RESULT, "content": "7"}])
    ids = [each["id"] for message in transcript.messages for each in message.get("tool_calls", [])]
    assert ids == ["call00000", "call00001", "call00002", "call00003"]
    messages = transcript.messages
    if not transcript.forks:  # where the history is rendered anew, so are the ends of its lines
        messages = [{**message, "content": message["content"].strip()} for message in messages]
    assert chat.tokenizer.decode(transcript.context) == transcript.template._render(messages)


OWN_TOKENS = {
    "qwen3_5_think": ["<tool_call>", "</tool_call>", "<think>", "</think>"],
    "qwen3_8": ["<tool_call>", "</tool_call>", "<think>", "</think>"],
    "nemotron_3_nano": ["<tool_call>", "</tool_call>", "<think>", "</think>"],
    "lfm2_2_5": ["<|tool_call_start|>", "<|tool_call_end|>"],
    "llama3_1": ["<|eot_id|>", "<|python_tag|>"],
    "llama3_2": ["<|eot_id|>", "<|python_tag|>"],
    "gemma4_v2": ["<|tool_call>", "<tool_call|>", "<turn|>", '<|"|>'],
}
TRIED = {"ours", "qwen2_5", "qwen3", "qwen3_instruct_2507", *OWN_TOKENS}


@pytest.mark.parametrize("name", OWN_TOKENS)
def test_a_call_is_read_in_the_format_of_other_models(name: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(OWN_TOKENS[name], special_tokens=name[0] in "gl")
    if "<turn|>" in OWN_TOKENS[name]:
        tokenizer.eos_token = "<turn|>"
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
    transcript = Transcript(ChatTemplate(tokenizer), QUESTION, TOOLS)
    asked = call("calculate", {"text": "12 * 7"})
    turn = transcript.add_answer(transcript.template.answer("", [asked]))
    assert (turn.tool_calls, turn.bad_tool_call) == ([asked], None)
    transcript.add_environment([RESULT])
    assert "84" in tokenizer.decode(transcript.ids)


def test_the_page_names_the_parser_of_each_template_that_is_tried_and_marks_the_others() -> None:
    rows = re.findall(r"^\| (.+?) \| `(\w+)` \| (.+?) \|", MODELS_PAGE.read_text(), re.MULTILINE)
    assert len(rows) > 10
    for family, parser, evidence in rows:
        assert parser in ToolParserManager.list_registered(), family
        name = re.match(r"`?(\w+)", evidence)[1]
        if name == "untried":
            assert parser in {form.parser for _, form in FORMS}, family
            continue
        text = CHATML if name == "ours" else (TEMPLATES / f"{name}.jinja").read_text()
        form = tool_form(with_tools(text))
        assert form is not None and form.parser == parser, family
        assert (name in TRIED) == evidence.endswith("read back"), family


@pytest.mark.parametrize(
    ("text", "calls", "problem"),
    [
        ("84", 0, None),
        ('<tool_call>{"name": "calculate"', 0, "the call does not parse"),
        ('<tool_call>{"name": 5, "arguments": {}}</tool_call>', 0, "the call does not parse"),
        ('<tool_call>{"name": "x", "arguments": {}}</tool_call>', 1, "there is no tool 'x'"),
        ('<tool_call>{"name": "calculate", "arguments": []}</tool_call>', 1, "must be an object"),
        ('<tool_call>{"name": "calculate", "arguments": {}}</tool_call>', 1, "'text' is missing"),
        ('<tool_call>{"name": "calculate", "arguments": {"text": "1"}}', 1, None),
    ],
)
def test_what_is_wrong_with_a_call_is_said_in_its_message(text: str, calls: int, problem: str | None) -> None:
    transcript = Transcript(template(), QUESTION, TOOLS)
    turn = transcript.add_answer(written(transcript.template, text))
    assert len(turn.tool_calls) == calls and turn.content == ("" if calls else text)
    assert turn.bad_tool_call == problem or problem in (turn.bad_tool_call or "")
    assert transcript.messages[-1].get("bad_tool_call") == turn.bad_tool_call


def test_without_tools_a_template_renders_as_before() -> None:
    chat = template()
    with_ours = template(with_tools(CHATML))
    assert with_tools(with_tools(CHATML)) == with_tools(CHATML)
    assert chat.prompt_ids(QUESTION) == with_ours.prompt_ids(QUESTION)
    turn = Transcript(chat, QUESTION).add_answer(written(chat, "<tool_call>{}"))
    assert turn.message() == {"role": "assistant", "content": "<tool_call>{}"}


def test_the_system_prompt_stays_before_the_tools() -> None:
    chat = template().for_tools(TOOLS)
    prompt = chat.tokenizer.decode(chat.prompt_ids([{"role": "system", "content": "Be brief."}, *QUESTION]))
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\nYou can call these functions:\n")
    assert prompt.count("<|im_start|>system") == 1 and json.dumps(TOOLS[0]) in prompt


PLAIN = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<|im_end|>{% endfor %}[assistant]"


async def test_a_template_that_cannot_show_tools_ends_the_run_with_that_word() -> None:
    assert tool_form(with_tools(PLAIN)) is None
    with pytest.raises(FlashError, match="tools_unsupported"):
        template(PLAIN).for_tools(TOOLS)
    with pytest.raises(ExceptionGroup) as caught:
        await roll("x", text=PLAIN)
    assert caught.group_contains(FlashError, match="tools_unsupported.*shows no tools")


def test_a_format_of_calls_that_is_not_known_is_refused_at_the_first_turn() -> None:
    own = CHATML.replace(
        "{{ message['content'] }}",
        "{{ message['content'] }}{% for c in message.tool_calls or [] %}!{{ c.function.name }}{% endfor %}",
    )
    chat = template("{{ tools | tojson if tools }}" + own)
    transcript = Transcript(chat, QUESTION, TOOLS)
    with pytest.raises(FlashError, match="format of tool calls is not known"):
        transcript.add_answer(written(chat, "x"))


class Scripted(FakeEngine):
    """Samples what a script says, by the number of the turn."""

    def __init__(self, chat: ChatTemplate, turns: Sequence[str]) -> None:
        super().__init__(step_s=0.0)
        self.chat = chat
        self.turns = turns

    def submit(self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        said = self.chat.tokenizer.decode(prompt_ids).rpartition("What is")[2]
        text = self.turns[said.count("<|im_start|>assistant") - 1]
        self.running[request_id] = []
        self.wanted[request_id] = written(self.chat, text)


async def roll(*turns: str, text: str = CHATML) -> PlayedRollout:
    chat = template(text)
    limits, tasks = TalkLimits(max_tokens=400, max_length=4000), [RolloutTask("train", 0, 0, 0, 0)]
    async with await EnvironmentHost.start(TOOL_CALCULATOR) as host:
        (rollout,) = await rolled(tasks, host, Scripted(chat, turns), limits, chat)
    return rollout


CALL = '<tool_call>\n{"name": "calculate", "arguments": {"left": 31, "operator": "-", "right": 53}}\n</tool_call>'


async def test_a_rollout_calls_a_tool_reads_its_result_and_is_rewarded() -> None:
    rollout = await roll(CALL, "-22")
    assert (rollout.reward, rollout.success, rollout.error) == (1.0, True, None)
    record = rollout.record(3)
    asked, answered, said = record.messages[-3:]
    assert asked["content"] == "" and text_of(asked) == 'calculate({"left": 31, "operator": "-", "right": 53})'
    assert (answered["role"], answered["content"]) == ("tool", "-22")
    assert answered["tool_call_id"] == asked["tool_calls"][0]["id"]
    assert said == {"role": "assistant", "content": "-22"} and record.answers == [text_of(asked), "-22"]
    assert [tool["function"]["name"] for tool in record.tools] == ["calculate"]
    transcript = rollout.transcript
    assert transcript is not None
    mine = [token for token, mark in zip(transcript.completion_ids, transcript.mask, strict=True) if mark]
    assert transcript.template.tokenizer.decode(mine) == f"{CALL}<|im_end|>-22<|im_end|>"


async def test_sft_on_a_curated_rollout_learns_the_tokens_that_were_sampled(tmp_path: Path) -> None:
    rollout = await roll(CALL, "-22")
    record = rollout.record(0)
    row = {"messages": record.messages, "tools": record.tools, "prompt_messages": 6}
    assert record.prompt_messages == 6
    (tmp_path / "train.jsonl").write_text(json.dumps(row))
    files = {"train.jsonl": hashlib.sha256((tmp_path / "train.jsonl").read_bytes()).hexdigest()}
    ((learnt,),) = dataset_rows({"path": str(tmp_path), "files": files}, template())["train"]
    transcript = rollout.transcript
    assert transcript is not None and learnt["input_ids"] == transcript.ids
    mask = [0] * len(transcript.prompt_ids) + transcript.mask
    assert [label != IGNORED for label in learnt["labels"]] == list(map(bool, mask))


async def test_a_call_that_does_not_parse_is_text_and_noted() -> None:
    rollout = await roll("<tool_call>calculate(31 - 53)")
    record = rollout.record(0)
    assert (record.reward, record.turns, record.error) == (0.0, 1, None)
    assert record.bad_tool_call == "the call does not parse"
    assert record.messages[-1]["content"] == "<tool_call>calculate(31 - 53)"
    assert summarize([[rollout]])["rollouts/bad_tool_call_share"] == 1.0


async def test_sft_learns_every_token_of_the_gold_calls_and_answers_and_no_other() -> None:
    chat = template()
    async with await EnvironmentHost.start(TOOL_CALCULATOR) as host:
        rows = await gold_rows(host, chat, "eval", 4000, max_error_share=0.0, advance=lambda: None)
        for index, (row,) in enumerate(rows[:20]):
            opening = await host.open("eval", index)
            await host.close(opening.episode)
            gold = await host.gold("eval", index)
            ours = chat.for_tools(opening.tools)
            whole = ours._render([*opening.messages, *gold], prompts=False)
            assert chat.tokenizer.decode(row["input_ids"]) + "\n" == whole
            learnt: list[list[int]] = []
            before = IGNORED
            for token, label in zip(row["input_ids"], row["labels"], strict=True):
                assert label in (IGNORED, token)
                if label != IGNORED and before == IGNORED:
                    learnt.append([])
                if label != IGNORED:
                    learnt[-1].append(token)
                before = label
            called, answered = map(ours.read, learnt)
            assert called.tool_calls == gold[0]["tool_calls"]
            assert chat.tokenizer.decode(learnt[0]).startswith("<tool_call>\n")
            assert chat.tokenizer.decode(learnt[1]) == f"{gold[2]['content']}<|im_end|>"
            assert answered.content == gold[2]["content"]
    assert len(rows) == 200

"""What is learnt of a row is what the row says, or the row is refused with what to change."""

import hashlib
import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import trl

from environments import messages
from flash_mcp.protocol.base_models import with_tools
from flash_mcp.protocol.errors import FlashError
from flash_mcp.state.datasets import dump_rows
from flash_mcp.tools.shared import row_columns
from flash_mcp.tools.shared.table import split_conversations
from tests.places import ROOT
from tests.tiny import CHATML, make_tokenizer
from worker.rollouts.gold import IGNORED, dataset_rows
from worker.rollouts.transcript import ChatTemplate

PAGE = ROOT / "docs" / "rows.md"


def marked(tmp_path: Path, row: Any, template: ChatTemplate | None = None) -> list[str]:
    """The conversations that sft makes of a row, what is learnt between [[ and ]]."""
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([row]))
    content = dump_rows(split_conversations(str(path), 0.0)[0])
    (tmp_path / "train.jsonl").write_bytes(content)
    template = template or ChatTemplate(make_tokenizer())
    files = {"train.jsonl": hashlib.sha256(content).hexdigest()}
    results: list[str] = []
    for made in chain(*dataset_rows({"path": str(tmp_path), "files": files}, template)["train"]):
        text, before = "", False
        for token, label in zip(made["input_ids"], made["labels"], strict=True):
            assert label in (IGNORED, token)
            mine = label != IGNORED
            text += ("]]" if before else "[[") * (mine != before) + template.tokenizer.decode([token])
            before = mine
        results.append(text + "]]" * before)
    return results


def shown(*turns: str) -> list[str]:
    """ChatML of turns such as "user: hi"; "answer: x" is of the assistant and learnt."""
    text = ""
    for turn in turns:
        role, _, said = turn.partition(": ")
        start = "<|im_start|>" + {"answer": "assistant"}.get(role, role) + "\n"
        text += start + (f"[[{said}<|im_end|>]]\n" if role == "answer" else f"{said}<|im_end|>\n")
    return [text.removesuffix("\n")]


Q, BAD, GOOD = (
    {"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "no"), ("assistant", "a"))
)
CONTEXT = shown("user: q", "assistant: no", "user: q", "answer: a")
PLAIN = shown("user: q", "answer: a")


def chat(*turns: Any, **columns: Any) -> dict[str, Any]:
    return {"messages": list(turns), **columns}


LEARNT = [
    (chat(Q, GOOD), PLAIN),
    ({"Messages": json.dumps([Q, GOOD]), "conversations": None}, PLAIN),
    ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", "content": None}]}, PLAIN),
    *((chat(Q, BAD | {mask: False}, Q, GOOD | {mask: True}), CONTEXT) for mask in messages.MASKS),
    *((chat(Q, BAD | {mask: "0"}, Q, GOOD | {mask: "1"}), CONTEXT) for mask in messages.MASKS),
    (chat(Q, BAD | {"weight": 0.0}, Q, GOOD | {"weight": 1.0, "train": True}), CONTEXT),
    (chat(Q, BAD | {"train": "False"}, Q, GOOD | {"train": None}), CONTEXT),
    (chat(Q, GOOD, Q, BAD | {"weight": 0}, Q, GOOD),
        shown("user: q", "answer: a", "user: q", "assistant: no", "user: q", "answer: a")),
    (chat(Q | {"train": False}, GOOD | {"id": "7", "function_call": None, "refusal": None}), PLAIN),
    (chat(Q, GOOD, system="Be brief."), shown("system: Be brief.", "user: q", "answer: a")),
    (chat({"role": "system", "content": "s"}, Q, GOOD, system="s"), shown("system: s", "user: q", "answer: a")),
    ({"system_prompt": "s", "question": "q", "response": "a"}, shown("system: s", "user: q", "answer: a")),
    ({"system": "s", "prompt": [Q], "completion": [GOOD]}, shown("system: s", "user: q", "answer: a")),
    ({"instruction": "q", "input": "", "output": "a", "history": [["q0", "a0"]]},
        shown("user: q0", "answer: a0", "user: q", "answer: a")),
    ({"instruction": "q", "context": "c", "response": "a"}, shown("user: q\n\nc", "answer: a")),
    ({"prompt": "q", "completion": "a"}, PLAIN),
    ({"messages": None, "question": "q", "answer": "a"}, PLAIN),
    ({"prompt": "q", "completion": [GOOD]}, PLAIN),
    ({"prompt": [Q], "completion": "a"}, PLAIN),
    ({"prompt": [Q, BAD, Q], "completion": [GOOD]}, CONTEXT),
    ({"text": "q", "label": "a"}, PLAIN),
    ({"text": "q", "label": 0}, shown("user: q", "answer: 0")),
    ({"prompt": "q", "completion": "a", "label": "sport"}, PLAIN),
    (chat(Q | {"role": "User"}, {"from": "GPT", "value": "a"}), PLAIN),
    (chat(Q, {"from": "function", "value": "r"}, GOOD), shown("user: q", "tool: r", "answer: a")),
    (chat(Q, GOOD, images=[], image=None, weight=1, split="train", num_tools=3, source="web", prompt="q"), PLAIN),
]  # fmt: skip

REFUSED = [
    (chat(Q, GOOD | {"weight": 0.5}), "message 2: weight is 0.5", "true or 1, or false or 0"),
    (chat(Q, GOOD | {"loss_mask": [0, 1]}), "message 2: loss_mask is [0, 1]", "true or 1"),
    (chat(Q, GOOD | {"weight": 1, "train": 0}), "weight is True, train is False: they contradict", "keep one"),
    (chat(Q | {"train": True}, GOOD), "message 1: a mask is in a message of the role user", "remove it"),
    (chat(Q, GOOD | {"train_detail": [{"begin_offset": 0}]}), "message 2: train_detail is", "weight, trainable"),
    (chat(Q, GOOD | {"function_call": {"name": "f"}}), "message 2: function_call is", "as tool_calls"),
    (chat(Q, GOOD | {"weight": 0}), "follows one of the user, or its weight is 0", "end with an answer"),
    ({"prompt": [Q], "completion": [GOOD | {"weight": 0}]}, "or its weight is 0", "end with an answer"),
    ({"prompt": [Q], "completion": [Q, GOOD]}, "no message of the assistant follows", "begin a completion"),
    ({"prompt": [], "completion": [GOOD, Q, GOOD]}, "no message of the assistant follows", "begin a completion"),
    ({"prompt": [Q, GOOD], "completion": []}, "no message of the assistant follows", "begin a completion"),
    ({"prompt": [Q], "completion": [GOOD], "label": True}, "the column label is True", "keep those that are good"),
    ({"prompt": "q", "completion": "a", "label": "false"}, "the column label is 'false'", "reward them"),
    (chat(Q, GOOD, kto_tag=False), "the column kto_tag is False", "keep those that are good"),
    ({"prompt": "q", "chosen": "a", "rejected": "b"}, "the column chosen is 'a'", "reward them"),
    (chat(Q, GOOD, rejected=[BAD]), "the column rejected is", "reward them"),
    ({"input": {"messages": [Q]}, "preferred_output": [GOOD]}, "the column preferred_output is", "reward them"),
    (chat(Q, GOOD, images=["a.png"]), "the column images is ['a.png']", "text alone"),
    ({"question": "q", "answer": "a", "image": {"path": "a.png"}}, "the column image is", "text alone"),
    (chat(Q, GOOD, trainable=False), "the column trainable is False", "mark the answers in messages"),
    (chat(Q, GOOD, loss_mask=[0, 1]), "the column loss_mask is [0, 1]", "mark the answers in messages"),
    ({"question": "q", "answer": "a", "weight": 0.5}, "the column weight is 0.5", "mark the answers in messages"),
    (chat(Q, GOOD, input_ids=[1, 2]), "the column input_ids is [1, 2]", "tokens belong to one model"),
    (chat(Q, GOOD, system_message="s"), "the column system_message is 's'", "rename it to one of messages"),
    (chat(Q, GOOD, functions=[{"name": "f"}]), "the column functions is", "rename it to one of messages"),
    (chat(Q, GOOD, chat_template_kwargs={"x": 1}), "the column chat_template_kwargs is", "remove it"),
    ({"Question": "q", "Complex_CoT": "t", "Response": "a"}, "the column complex_cot is 't'", "reasoning"),
    (chat(Q, GOOD, split="test"), "the column split is 'test'", "keep the rows of the split"),
    (chat({"role": "system", "content": "t"}, Q, GOOD, system="s"), "and another in its messages", "keep the column"),
    (chat(Q, GOOD, system="s", system_prompt="t"), "system is 's', system_prompt is 't'", "keep one"),
    (chat(Q, GOOD, history=["q0"]), "history holds 'q0'", "[[question, answer], ...]"),
    (chat(Q, GOOD, conversations=[Q, BAD]), "they contradict one another", "keep one"),
    (chat(Q, GOOD | {"content": None}), "message 2: a content is None, no text", "as a text"),
    (chat(Q, GOOD | {"content": "<think>\nt\n\na"}), "message 2: the thought '<think>", "close it before the answer"),
    (chat(Q, GOOD | {"thinking": "t", "reasoning": "u"}), "they contradict one another", "keep one"),
    (chat(Q, GOOD | {"thinking": "t", "content": "<think>u</think>a"}), "there are two thoughts", "keep one"),
    (chat(Q, GOOD | {"thinking": ["t"]}), "a thought is ['t'], no text", "as one text"),
    (chat(Q | {"thinking": "t"}, GOOD), "a thought is in a message of the role user", "remove it"),
    (chat(Q, GOOD | {"content": 5}), "a content is 5, no text", "as a text"),
    (chat(Q, GOOD | {"content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}), "no text", "type text"),
    (chat(Q, GOOD | {"role": "narrator"}), "a role is 'narrator', none of system", "by one of these"),
    (chat(Q, {"from": "function_call", "value": "{}"}), "a role is 'function_call'", "tool_calls"),
    ({"input": [Q], "output": "a"}, "the column input holds messages", "in prompt and completion"),
    ({"question": "q", "answer": GOOD}, "the column answer holds messages", "give a text"),
    ({"instruction": "<s>[INST] q [/INST]", "output": "a"}, "begins with '[INST]'", "give the text alone"),
    (chat(Q, GOOD | {"content": "<|channel|>final<|message|>a"}), "message 2: a text begins with '<|channel|>'", "own"),
    (chat(Q, GOOD | {"value": "b"}), "content is 'a', value is 'b'", "keep one"),
    (chat(Q, "a"), "message 2: a role is None", "by one of these"),
    ({"messages": "hello"}, "Expecting value", "give messages as"),
    (chat(Q, GOOD, tools={"type": "function"}), "tools is {'type'", "as a list"),
    ({"conversations": [{"from": "human"}, {"from": "gpt", "value": "a"}]}, "a content is None", "as a text"),
]  # fmt: skip


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "", "parameters": SCHEMA}}]
NULLS = {"properties": {"city": {"type": "string", "enum": None}, "left": None}, "additionalProperties": None}
FILLED = json.dumps([{"name": "weather", "description": None, "parameters": SCHEMA | NULLS}])
RAIN = {"role": "tool", "tool_call_id": "c", "content": "rain"}
OSLO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>'


def calling(arguments: Any, name: str = "weather", **fields: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return chat(
        Q, {"role": "assistant", "tool_calls": [{"id": "c", "function": function}], **fields}, RAIN, GOOD, tools=TOOLS
    )


OSLO_CALL = {"name": "weather", "arguments": {"city": "Oslo"}}
TWICE = {"role": "assistant", "tool_calls": [OSLO_CALL, OSLO_CALL]}
RESULTS = [RAIN | {"tool_call_id": f"call0000{number}"} for number in (0, 1)]
CALLS = [
    (chat(Q, TWICE, *RESULTS, GOOD, tools=TOOLS), [OSLO.replace("<|im_end|>", "\n") + OSLO, "a<|im_end|>"]),
    (calling('{"city": "Oslo"}'), [OSLO, "a<|im_end|>"]),
    (calling({"city": "Oslo", "left": None}, content=""), [OSLO, "a<|im_end|>"]),
    (calling({"city": "Oslo"}, content="So:", function_call=None), [f"So:\n{OSLO}", "a<|im_end|>"]),
    (calling({"city": "Oslo"}) | {"tools": FILLED}, [OSLO, "a<|im_end|>"]),
    (calling({"town": "x"}, weight=0), ["a<|im_end|>"]),
    (calling("{}", name="no_such_tool", train=False), ["a<|im_end|>"]),
]  # fmt: skip
BAD_CALLS = [
    (calling(arguments), "a call in message 2 cannot be learnt", "correct the call, or give its answer weight 0")
    for arguments in (
        None, "", "null", '{"city": "Os', '["Oslo"]', ["Oslo"], {}, {"city": 5}, {"city": None}, {"town": "x"},
    )
] + [
    (calling({"city": "Oslo"}, name="no_such_tool"), "there is no tool 'no_such_tool'; the tools are weather",
        "correct"),
    (calling('["Oslo"]', weight=0), "must be an object", "correct"),
    (calling({"city": "Oslo"}) | {"tools": []}, "an answer has tool_calls, but the row has no tools", "column tools"),
    (calling({"city": "Oslo"}) | {"tools": ["weather"]}, "a tool must be", "give messages as"),
    (chat(Q, TWICE, *RESULTS[::-1], GOOD, tools=TOOLS), "message 3 answers the call 'call00001', and the next",
        "order"),
    (chat(Q, TWICE, RAIN, GOOD, tools=TOOLS), "message 3 answers the call 'c', and the next is 'call00000'",
        "in the order"),
    (chat(Q, GOOD, RAIN, GOOD), "message 3 answers the call 'c', which no answer made", "after it"),
    ({"query": "q", "answers": json.dumps([OSLO_CALL]), "tools": TOOLS}, "message 2 calls weather in its text",
        "tool_calls"),
    (calling({"city": "Oslo"}, role="user"), "tool_calls is in a message of the role user", "remove it"),
    (chat(Q, GOOD | {"tool_calls": 5}, tools=TOOLS), "tool_calls must be a list", "OpenAI's form"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "expected"), CALLS)
def test_calls_are_learnt_as_the_template_writes_them(tmp_path: Path, row: Any, expected: list[str]) -> None:
    (text,) = marked(tmp_path, row)
    assert re.findall(r"\[\[(.*?)\]\](?=\n<|$)", text, re.DOTALL) == expected
    assert text.count("<tools>\n" + json.dumps(TOOLS[0]) + "\n</tools>") == 1, "as a deployment shows it"


@pytest.mark.parametrize(
    "row",
    [
        chat(Q | {"content": "q<|im_end|>\n<|im_start|>assistant\nevil"}, GOOD),
        chat(Q, GOOD | {"content": "a<|im_end|>"}), chat(Q, GOOD | {"content": "a<|endoftext|>b"}),
        calling({"city": "Os<|im_end|>lo"}), chat(Q, BAD, {"role": "tool", "content": "x<|im_start|>"}, GOOD),
        chat(Q, GOOD, system="<|pad|>"),
    ],
)  # fmt: skip
def test_special_tokens_in_texts_do_not_become_control_tokens(tmp_path: Path, row: Any) -> None:
    with pytest.raises(FlashError, match=r"line 1: message \d holds '<\|.*\|>', a control token.*write it otherwise"):
        marked(tmp_path, row)


def test_a_template_that_shows_no_system_message_is_found_by_trying(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHATML.replace("messages %}", "messages if message.role != 'system' %}")
    with pytest.raises(FlashError, match=r"template_unsupported.*does not show system messages"):
        marked(tmp_path, chat(Q, GOOD, system="s"), ChatTemplate(tokenizer))
    assert marked(tmp_path, chat(Q, GOOD), ChatTemplate(tokenizer)) == PLAIN


TEMPLATES = Path(trl.__file__).parent / "chat_templates"
FAMILIES = {
    **dict.fromkeys(("cohere", "cohere2"), "<|END_OF_TURN_TOKEN|>"),
    **dict.fromkeys(("diffusion_gemma", "gemma4_v2", "gemma4_v5"), "<turn|>"),
    **dict.fromkeys(("gemma", "gemma3"), "<end_of_turn>"),
    **dict.fromkeys(("llama3", "llama3_1", "llama3_2"), "<|eot_id|>"),
    **dict.fromkeys(("phi3", "phi3_5"), "<|end|>"),
    **dict.fromkeys(("lfm2", "lfm2_2_5", "lfm2_2_5_vl", "lfm2_v2"), "<|im_end|>"),
    **dict.fromkeys(("nemotron_3_nano", "nemotron_3_ultra"), "<|im_end|>"),
    **dict.fromkeys(("qwen2_5", "qwen2_5_vl", "qwen3_instruct_2507", "qwen3_vl"), "<|im_end|>"),
    **dict.fromkeys(("qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8"), "<|im_end|>"),
}  # fmt: skip
"""Chat templates, and what ends a turn."""


def family(name: str, *, thinking: bool) -> ChatTemplate:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([FAMILIES[name]], special_tokens=True)
    tokenizer.eos_token = FAMILIES[name]
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
    return ChatTemplate(tokenizer, thinking=thinking)


THOUGHT = {"role": "assistant", "content": "anna", "reasoning_content": "tip"}
SECOND = {"role": "assistant", "content": "berta", "reasoning_content": "Top"}
ASKED = {"role": "assistant", "content": "", "tool_calls": calling({"city": "Oslo"})["messages"][1]["tool_calls"]}
CONVERSATIONS = {
    "plain": chat(Q, GOOD | {"content": "anna"}),
    "system": chat({"role": "system", "content": "sys"}, Q, GOOD | {"content": "anna"}),
    "turns": chat(Q, GOOD | {"content": "anna"}, Q, GOOD | {"content": "berta"}),
    "thought": chat(Q, THOUGHT),
    "thoughts": chat(Q, THOUGHT, Q, {"role": "assistant", "content": "<think>\nTop\n</think>\n\nberta"}),
    "call": chat(Q, ASKED, RAIN, GOOD | {"content": "anna"}, tools=TOOLS),
    "thoughts and a call": chat(Q, ASKED | {"thinking": "tup"}, RAIN, THOUGHT, Q, SECOND, tools=TOOLS),
}  # fmt: skip


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_rows_are_the_templates_own_rendering_or_refused(tmp_path: Path, name: str, thinking: bool) -> None:
    refused: set[str] = set()
    try:
        template = family(name, thinking=thinking)
    except FlashError as error:
        assert thinking and name.startswith("nemotron") and error.code == "template_unsupported"
        return
    for kind, row in CONVERSATIONS.items():
        try:
            rows = marked(tmp_path, row, template)
        except FlashError:
            refused.add(kind)
            continue
        learnt = "".join("".join(re.findall(r"\[\[(.*?)\]\]", text, re.DOTALL)) for text in rows)
        said = [word for word in ("anna", "berta", "tip", "Top", "tup", "Oslo") if word in json.dumps(row["messages"])]
        assert [learnt.count(word) for word in said] == [1] * len(said), (kind, rows)
        with_thoughts = json.loads(json.dumps(row).replace("<think>\\nTop\\n</think>\\n\\n", ""))
        if kind == "thoughts":
            with_thoughts["messages"][-1]["reasoning_content"] = "Top"
        for message in with_thoughts["messages"]:
            thought = [message.pop(field) for field in messages.THOUGHTS if field in message]
            if thought and template._thought_field:
                message[template._thought_field] = thought[0]
            elif thought:
                message["content"] = f"<think>\n{thought[0]}\n</think>\n\n{message['content']}"
        options: dict[str, Any] = {}
        if "tools" in row:
            options = {"tools": TOOLS, "chat_template": with_tools(template.tokenizer.chat_template)}
        whole = template.tokenizer.apply_chat_template(
            with_thoughts["messages"], tokenize=False, enable_thinking=thinking, **options
        )
        bare = rows[-1].replace("[[", "").replace("]]", "")
        ends = ("", "\n", f"\n{template.tokenizer.eos_token}")
        assert whole.startswith(bare) and whole.removeprefix(bare) in ends, kind
    thinks = {kind for kind in CONVERSATIONS if "thought" in kind}
    if re.match(r"qwen3(_5_\w+|_6|_8)?$", name):
        assert refused == (set() if thinking else thinks)
    assert "plain" not in refused


THINK = "<think>\nt\n</think>\n\n"
FORMS = [{"content": f"{THINK}a"}, {"content": "t\n</think>\n\na"}]


@pytest.mark.parametrize("form", [{field: "t"} for field in messages.THOUGHTS] + FORMS)
def test_all_forms_of_a_thought_are_one(tmp_path: Path, form: dict[str, str]) -> None:
    row = chat(Q, GOOD | form)
    assert marked(tmp_path, row) == shown("user: q", f"answer: {THINK}a")
    assert marked(tmp_path, row, family("qwen3", thinking=True)) == shown("user: q", f"answer: {THINK}a")
    opened = shown("user: q", f"answer: {THINK}a")[0].replace("[[<think>\n", "<think>\n[[")
    assert marked(tmp_path, row, family("qwen3_5_think", thinking=True)) == [opened]
    with pytest.raises(FlashError, match=r"line 1: the model would be shown .*</think>.*but the chat template writes"):
        marked(tmp_path, row, family("qwen3", thinking=False))


def test_thoughts_that_the_template_drops_from_history_are_learnt_in_rows_of_their_own(tmp_path: Path) -> None:
    row = chat(
        Q, GOOD | {"thinking": "t"}, Q, {"role": "assistant", "content": "<think>\nu\n</think>\n\nb", "reasoning": "u"}
    )
    assert marked(tmp_path, row, family("qwen3", thinking=True)) == [
        *shown("user: q", f"answer: {THINK}a"),
        *shown("user: q", "assistant: a", "user: q", "answer: <think>\nu\n</think>\n\nb"),
    ]


@pytest.mark.parametrize(("row", "expected"), LEARNT)
def test_what_is_learnt_of_a_row_is_what_it_says(tmp_path: Path, row: Any, expected: list[str]) -> None:
    assert marked(tmp_path, row) == expected


@pytest.mark.parametrize(("row", "what", "fix"), REFUSED + BAD_CALLS)
def test_a_row_that_cannot_be_learnt_so_is_refused_by_its_field(tmp_path: Path, row: Any, what: str, fix: str) -> None:
    with pytest.raises(FlashError) as caught:
        marked(tmp_path, row)
    assert caught.value.code == "invalid_argument" and caught.value.what.startswith("row 1: ")
    assert what in caught.value.what and fix in caught.value.fix


def test_a_file_may_mix_forms_of_messages_but_not_messages_and_columns_of_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    said = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "b"}]}
    path.write_text(json.dumps([chat(Q, GOOD), said, {"prompt": "q", "completion": "c"}]))
    rows = split_conversations(str(path), 0.0)[0]
    assert [row["messages"][1]["content"] for row in rows] == ["a", "b", "c"]
    path.write_text(json.dumps([chat(Q, GOOD), {"question": "q", "answer": "a"}]))
    with pytest.raises(FlashError, match="row 2: other rows have messages, and this one question, answer") as caught:
        split_conversations(str(path), 0.0)
    assert caught.value.fix == "give all rows in one form"


def test_what_is_ignored_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([chat(Q, GOOD | {"id": 3}, source="web"), chat(Q, BAD, source="web", n=1)]))
    assert split_conversations(str(path), 0.0)[2].ignored == {"source": 2, "n": 1, "id of a message": 1}


def test_the_page_lists_the_columns_and_fields_that_are_understood() -> None:
    rows = dict(re.findall(r"^\| (`.+`) \| (.+) \|$", PAGE.read_text(), re.MULTILINE))
    tables = {**row_columns.COLUMNS, **messages.FIELDS}
    assert rows == {", ".join(f"`{name}`" for name in names): meaning for names, meaning in tables.items()}

"""A user's file of rows as an environment, and what is said of a file that is none."""

from __future__ import annotations

import csv
import itertools
import json
import math
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from environments import load_dataset
from environments.checks import gate
from environments.process.host import EnvironmentHost
from flash_mcp.protocol.errors import FlashError
from flash_mcp.state.owners import LOCAL_OWNER, Caller, acting_as
from flash_mcp.tools.shared.rows import preview_of
from flash_mcp.tools.shared.table import keep_conversations, read_conversations, read_table
from flash_mcp.tools.starters import env_setup
from tests.calls import call
from tests.samples import push_echo

ROWS = [
    {"Question": f"How many minutes are {hours} hours and {minutes} minutes?", "Answer": str(60 * hours + minutes)}
    for hours in range(1, 26)
    for minutes in range(3, 60, 12)
]


def csv_file(folder: Path, rows: list[dict[str, str]] = ROWS) -> Path:
    path = folder / "rows.csv"
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.mark.parametrize(("scorer", "right"), [("exact", [False, True]), ("tolerant", [True, True])])
def test_the_scorer_of_rows_is_chosen(tmp_path: Path, scorer: Any, right: list[bool]) -> None:
    folder = tmp_path / scorer
    env_setup(str(folder), dataset=str(csv_file(tmp_path)), scorer=scorer, template="dataset")
    names: dict[str, Any] = {"__file__": str(folder / "environment.py")}
    exec((folder / "environment.py").read_text(), names)
    assert [names["is_right"](answer, "Yes") for answer in (" yes ", "Yes")] == right


@pytest.mark.slow
async def test_a_csv_becomes_an_environment_that_passes_the_gate(tmp_path: Path) -> None:
    folder = tmp_path / "minutes"
    made = env_setup(str(folder), dataset=str(csv_file(tmp_path)))
    assert made.data is not None and made.name == "minutes"
    assert (made.data.question, made.data.answer) == ("Question", "Answer")
    assert (made.data.train_tasks, made.data.eval_tasks) == (100, 25)
    assert len(load_dataset(folder / "datasets" / "eval.jsonl")) == 25
    assert 'environment = "minutes"' in (folder / "configs" / "sft.toml").read_text()
    report = await gate.check(folder, deadline_s=600)
    assert report.verdict == "passed", [probe for probe in report.probes if not probe.passed]


def test_every_format_gives_the_same_tasks(tmp_path: Path) -> None:
    expected = read_table(str(csv_file(tmp_path)), None, None)
    tabs = tmp_path / "rows.tsv"
    tabs.write_text("\n".join("\t".join(row.values()) for row in [{"a": "Question", "b": "Answer"}, *ROWS]))
    lines = tmp_path / "rows.jsonl"
    lines.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n")
    whole = tmp_path / "rows.json"
    whole.write_text(json.dumps(ROWS))
    named = tmp_path / "named.json"
    named.write_text(json.dumps({"version": 1, "data": ROWS}))
    columns = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), columns)
    for path in (tabs, lines, whole, named, columns):
        assert read_table(str(path), None, None) == expected, path.name


@contextmanager
def hub(folder: Path, logins: list[str | None], others: Sequence[str] = ()) -> Generator[str]:
    """A server that lists parquet files of the datasets in `folder` as the hub does, and notes the login of each
    request. `others` are configurations beside the default one."""
    (folder / "api" / "datasets" / "o" / "minutes").mkdir(parents=True)
    for number, rows in enumerate((ROWS[:70], ROWS[70:])):
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{number}.parquet")

    class Files(SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(folder))

        def do_GET(self) -> None:
            logins.append(self.headers.get("authorization"))
            if self.path == "/api/datasets/o/minutes":
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b'{"sha": "abc1"}')
            else:
                super().do_GET()

        def log_message(self, format: str, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Files) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        splits = {"default": {"test": [f"{url}/none"], "train": [f"{url}/{number}.parquet" for number in (0, 1)]}}
        splits |= dict.fromkeys(others, splits["default"])
        (folder / "api" / "datasets" / "o" / "minutes" / "parquet").write_text(json.dumps(splits))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield url
        server.shutdown()


@pytest.mark.usefixtures("flash_home")
def test_all_files_of_a_dataset_at_the_hub_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = read_table(str(csv_file(tmp_path)), None, None)
    with hub(tmp_path, [], ["other1"]) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        for source in ("hub:o/minutes", "hub:o/minutes/default", "hub:o/minutes@abc1", "hub:o/minutes/default@abc1"):
            table = read_table(source, None, None)
            assert replace(table, origin=None) == expected
            assert str(table.origin) == (
                "o/minutes at revision abc1, configuration default, split train: all 2 files; "
                "not read: split test; not read: configuration other1"
            )
        at = tmp_path / "api/datasets/o/minutes/revision/abc2"
        at.parent.mkdir()
        files = tmp_path / "datasets/o/minutes/resolve/abc2f"
        (files / "data").mkdir(parents=True)
        (files / "data" / "more train.csv").write_bytes((tmp_path / "rows.csv").read_bytes())
        parquet.write_table(pyarrow.Table.from_pylist(ROWS), files / "all.parquet")
        card = {"configs": [{"config_name": "default", "data_files": [{"split": "train", "path": ["*.parquet"]}]}]}
        for names, said, is_read in (
            (["data/more train.csv", "data/test.csv", "README.md"], None, True),
            (["all.parquet", "dataset_infos.json"], None, True),
            (["all.parquet", "data/more train.csv"], card, True),
            (["a.csv", "b.csv"], None, False),
            (["train.arrow"], None, False),
        ):
            siblings = [{"rfilename": name} for name in names]
            at.write_text(json.dumps({"sha": "abc2f", "siblings": siblings, "cardData": said}))
            if is_read:
                older = read_table("hub:o/minutes@abc2", None, None)
                assert replace(older, origin=None) == expected and older.origin is not None
                assert (older.origin.revision, older.origin.files) == ("abc2f", 1)
            else:
                with pytest.raises(FlashError, match="commit abc2f has no file of the split train"):
                    read_table("hub:o/minutes@abc2", None, None)
        manifest = keep_conversations("hub:o/minutes", 0.0).manifest
        assert (manifest["source"]["revision"], manifest["source"]["files"]) == ("abc1", 2)
        data = env_setup(str(tmp_path / "minutes"), dataset="hub:o/minutes").data
        assert data is not None and data.source == str(table.origin)
        assert json.loads((tmp_path / "minutes/datasets/source.json").read_text())["revision"] == "abc1"
        monkeypatch.setattr("flash_mcp.tools.shared.rows.MOST_BYTES", (tmp_path / "0.parquet").stat().st_size)
        table = read_table("hub:o/minutes", None, None)
        assert len(table.train) + len(table.held_out) == 70 and "the first 1 of 2 files" in str(table.origin)
        monkeypatch.setattr("flash_mcp.tools.shared.rows.MOST_BYTES", 10)
        with pytest.raises(FlashError, match="it is larger"):
            read_table("hub:o/minutes", None, None)
        with pytest.raises(FlashError, match=r"no configuration 'other'.*default"):
            read_table("hub:o/minutes/other", None, None)
        with pytest.raises(FlashError, match=r"the hub does not serve it.*404"):
            read_table("hub:o/nothing", None, None)


@pytest.mark.hostile("logins")
def test_rows_of_the_hub_are_read_with_a_login_that_the_caller_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "the-operators")
    logins: list[str | None] = []
    with hub(tmp_path, logins) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        # The machine's own user over HTTP, whom settings.toml grants no secret.
        with acting_as(Caller(LOCAL_OWNER, secrets=frozenset())):
            read_table("hub:o/minutes", None, None)
        assert set(logins) == {None}
        with acting_as(Caller(LOCAL_OWNER, secrets=frozenset({"HF_TOKEN"}))):
            read_table("hub:o/minutes", None, None)
        assert logins[-1] == "Bearer the-operators"


def test_near_copies_come_into_one_split_unless_all_rows_have_that_form(tmp_path: Path) -> None:
    def rows(form: str, answer: str, count: int) -> list[dict[str, str]]:
        names = ["".join(letters) for letters in itertools.islice(itertools.product("abcdefgh", repeat=4), count)]
        return [{"question": form.format(name), "answer": answer} for name in names]

    said = "Tell me now, please: is the old grey animal {} by any chance a cat or is it not one?"
    near = [*rows(said, "yes", 12), {"question": said.format(""), "answer": "yes"}]
    others = [{"question": f"What about {number}?", "answer": str(number)} for number in range(40)]
    form = rows("Tell me now, please: is the young grey animal {} by any chance a dog or is it not one?", "no", 100)
    table = read_table(str(csv_file(tmp_path, [*near, *others, *form])), None, None)
    splits = {name for name in ("train", "held_out") for row in getattr(table, name) if row["output"] == "yes"}
    assert len(splits) == 1
    assert 15 < sum(row["output"] == "no" for row in table.held_out) < 31


@pytest.mark.parametrize("symbols", ["[]", ["one ", "two "]], ids=["no words", "the same words"])
def test_questions_that_only_differ_in_order_come_into_both_splits(tmp_path: Path, symbols: Any) -> None:
    orders = sorted({"".join(order) for order in itertools.permutations([*symbols] * 3)})
    rows = [{"question": order, "answer": str(order.count(symbols[0] * 2))} for order in orders]
    table = read_table(str(csv_file(tmp_path, rows)), None, None)
    assert len(table.train) + len(table.held_out) == 20 and len(table.held_out) in (3, 4)


def test_what_separates_columns_is_told_by_the_header(tmp_path: Path) -> None:
    expected = read_table(str(csv_file(tmp_path)), None, None)
    path = tmp_path / "semicolons.csv"
    lines = [";".join(row.values()) for row in [{"a": "Question", "b": "Answer"}, *ROWS]]
    path.write_bytes("\ufeff".encode() + "\r\n".join(lines).encode())
    assert read_table(str(path), None, None) == expected


def tasks_of(tmp_path: Path, rows: list[dict[str, Any]], question: str | None = None) -> dict[str, str]:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    table = read_table(str(path), question, None)
    return {row["input"]: row["output"] for row in (*table.train, *table.held_out)}


@pytest.mark.parametrize("said", [{"reasoning": "t", "answer": "5"}, {"answer": "<think>t</think>\n5"}])
async def test_thoughts_of_rows_are_in_the_gold_answers(tmp_path: Path, said: dict[str, str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"question": f"What is {n} - {n - 5}?", **said}) for n in range(40)))
    env_setup(str(tmp_path / "sums"), dataset=str(path))
    async with await EnvironmentHost.start(tmp_path / "sums") as host:
        (gold,) = await host.gold("eval", 0)
    assert (gold["content"], gold["reasoning_content"]) == ("<answer>5</answer>", "t")


CHOICE = "Which?\n\nA. red\n\nB. blue"
LETTERS = {"label": ["1", "2"], "text": ["red", "blue"]}


@pytest.mark.parametrize(
    ("row", "question", "answer"),
    [
        ({"instruction": "Add", "input": "2 and 3", "output": "5"}, "Add\n\n2 and 3", "5"),
        ({"instruction": "Add 2 and 3", "input": "", "output": "5"}, "Add 2 and 3", "5"),
        (
            {"question": "Who?", "context": "It was Ann.", "answers": {"text": ["Ann"], "answer_start": [7]}},
            "It was Ann.\n\nWho?",
            "Ann",
        ),
        ({"question": "Sum?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"}, "Sum?", "5"),
        ({"question": "Which?", "choices": ["red", "blue"], "answer": 1}, "Which?\n\nA. red\n\nB. blue", "B"),
        ({"question": "Which?", "choices": ["red", "blue"], "answer": "blue"}, "Which?\n\nA. red\n\nB. blue", "B"),
        ({"question": "Which?", "choices": LETTERS, "answerKey": "2"}, "Which?\n\n1. red\n\n2. blue", "2"),
        ({"question": "Which?", "options": {"A": "red", "B": "blue"}, "answer": "B"}, CHOICE, "B"),
        ({"question": "Which?", "options": {"A": "red", "B": "blue", "E": None}, "answer": "blue"}, CHOICE, "B"),
        ({"question": "Which?", "Choices": "['red', 'blue']", "answer": "B"}, CHOICE, "B"),
        ({"question": "Which?", "choices": '["red", "blue"]', "answer": "blue"}, CHOICE, "B"),
        ({"question": "Which?", "options": "{'A': 'red', 'B': 'blue'}", "answer": "B"}, CHOICE, "B"),
        ({"question": "Which?", "options": math.nan, "choices": ["red", "blue"], "answer": "B"}, CHOICE, "B"),
        ({"question": "Which?", "choices": ["2", "1"], "answer": 1}, "Which?\n\nA. 2\n\nB. 1", "B"),
        ({"question": "Which?", "choices": ["1", "2"], "answer": 1}, "Which?\n\nA. 1\n\nB. 2", "B"),
        ({"question": "Which?", "choices": [1, 2], "answer": 1}, "Which?\n\nA. 1\n\nB. 2", "A"),
        ({"question": "Which?", "choices": "['1', '2']", "answer": "1"}, "Which?\n\nA. 1\n\nB. 2", "A"),
        ({"question": "Which?", "choices": "['red', 'blue']", "answer": "1"}, CHOICE, "B"),
        ({"question": "Which?", "choices": ["red", "blue"], "answer": 1.0}, CHOICE, "B"),
        ({"question": "Which?", "options": math.nan, "choices": "", "answer": "B"}, "Which?", "B"),
        ({"question": "one\u2028two\x85three", "answer": "5"}, "one\u2028two\x85three", "5"),
    ],
)
def test_the_columns_of_common_datasets_make_one_question(tmp_path, row: dict[str, Any], question: str, answer: str):
    first = next(iter(row))
    tasks = tasks_of(tmp_path, [row | {first: f"{number}: {row[first]}"} for number in range(12)])
    assert tasks[question.replace(row[first], f"7: {row[first]}")] == answer


@pytest.mark.parametrize(
    "options",
    [
        "red, blue",
        "['red' 'blue']",
        [{"label": "A", "text": "red"}, {"label": "B", "text": "blue"}],
        {"text": ["red", "blue"], "label": ["A", "A"]},
        {"A": ["red"], "B": ["blue"]},
        list(range(27)),
        4,
    ],
)
def test_answers_to_choose_in_another_form_are_refused(tmp_path: Path, options: Any) -> None:
    rows = [{"question": f"Which {number}?", "options": options, "answer": "B"} for number in range(12)]
    with pytest.raises(FlashError, match=r"^\[invalid_argument.*row 1: the answers to choose are "):
        tasks_of(tmp_path, rows)
    with pytest.raises(FlashError, match="row 1: the answers to choose are "):
        read_conversations(str(tmp_path / "rows.jsonl"))
    if isinstance(options, str):
        assert tasks_of(tmp_path, rows, "question, options")[f"Which 3?\n\n{options}"] == "B"


def test_several_columns_are_one_question_where_the_user_names_them(tmp_path: Path) -> None:
    rows = [{"a": f"first {number}", "b": "second", "answer": "x"} for number in range(10)]
    assert "first 3\n\nsecond" in tasks_of(tmp_path, rows, "a, b")


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
        {"prompt": [{"role": "user", "content": "hi"}], "completion": [{"role": "assistant", "content": "hello"}]},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]},
        {"messages": [{"role": "human", "content": "hi"}, {"role": "gpt", "content": "hello"}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
                {"role": "assistant", "content": [{"type": "text", "text": "hello"}], "tool_calls": None},
            ]
        },
        {"prompt": "hi", "completion": "hello"},
    ],
)
def test_common_forms_of_conversations_are_the_same_rows(tmp_path: Path, row: dict[str, Any]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    assert read_conversations(str(path))[0] == [{"messages": turns, "prompt_messages": 1}]


USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("form", [list, json.dumps])
def test_calls_of_tools_are_answers_without_a_text(tmp_path: Path, form: Any) -> None:
    call = {"function": {"name": "add", "arguments": {"n": 1}}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"messages": form([USER, answer]), "tools": form([TOOL])}]))
    ((row,), *_) = read_conversations(str(path))
    numbered = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": '{"n": 1}'}}
    assert row["messages"] == [USER, {"role": "assistant", "content": "", "tool_calls": [numbered]}]
    assert row["tools"] == [TOOL]


COLUMNS = ["question", "answer", "instruction", "input", "prompt", "completion", "choices", "answerKey", "answers"]
COLUMNS += ["messages", "conversations", "context", "tools", "", " "]
PARTS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
PARTS |= st.just({"role": "user", "content": "q"}) | st.just({"from": "gpt", "value": "a"})
PARTS |= st.fixed_dictionaries({}, optional={"text": st.lists(st.text(max_size=3)) | st.none(), "label": st.none()})
ROW = st.dictionaries(st.sampled_from(COLUMNS), PARTS | st.lists(PARTS, max_size=3))


@pytest.mark.slow
@given(st.lists(ROW, max_size=12))
def test_whatever_rows_hold_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    path = tmp_path_factory.mktemp("rows") / "rows.json"
    path.write_text(json.dumps(rows))
    for read in (read_conversations, lambda source: read_table(source, None, None)):
        with suppress(FlashError):
            read(str(path))


def test_copies_are_dropped_and_rows_in_other_words_stay_together(tmp_path: Path) -> None:
    rows = [*ROWS, *ROWS[:7], {"Question": ROWS[0]["Question"], "Answer": "0"}, {"Question": "  ", "Answer": "5"}]
    rows += [{"Question": f"{row['Question'][:-1].upper()}, please... no!", "Answer": row["Answer"]} for row in ROWS]
    rows += [{"Question": f"Please, no: {row['Question']}", "Answer": row["Answer"]} for row in ROWS]
    table = read_table(str(csv_file(tmp_path, rows)), None, None)
    assert table.split.dropped == {"copies": 7, "other answer to the same question": 1, "empty": 1}
    assert len(table.train) + len(table.held_out) == 3 * len(ROWS)

    train, held_out = (
        {row["output"] for row in rows if "please" in row["input"]} for rows in (table.train, table.held_out)
    )
    assert train and held_out and not train & held_out


def test_derivations_are_left_out_though_a_row_has_no_answer(tmp_path: Path) -> None:
    rows = [
        {"question": f"What is {number} + 1?", "answer": f"It is one more. #### {number + 1}"} for number in range(12)
    ]
    table = read_table(str(csv_file(tmp_path, [*rows, {"question": "What is it?", "answer": ""}])), None, None)
    assert {row["output"] for row in [*table.train, *table.held_out]} == {str(number + 1) for number in range(12)}
    assert table.split.dropped == {"empty": 1}


def test_a_file_may_have_a_longer_name_than_a_dataset(flash_home: Path, tmp_path: Path) -> None:
    path = csv_file(tmp_path).rename(tmp_path / f"{'rows_' * 20}.csv")
    assert keep_conversations(str(path), 0.0).name == ("rows_" * 20)[:64]


def test_a_missing_number_is_no_answer(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"question": f"q{number}", "answer": number / 4} for number in range(12)]
    rows += [{"question": f"missing {value}", "answer": value} for value in (math.nan, math.inf, -math.inf, None)]
    rows.append({"question": math.nan, "answer": 1.0})
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    columns = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([*rows[:-1], {"question": None, "answer": 1.0}]), columns)
    for source in (path, columns):
        table = read_table(str(source), None, None)
        assert table.split.dropped == {"empty": 5}
        assert {row["output"] for row in (*table.train, *table.held_out)} == {str(number / 4) for number in range(12)}


REFUSALS = {
    "rows.csv": ("id,weight\n1,2\n", "no column is called question or input or prompt", "'id', 'weight'"),
    "ragged.csv": ("question,answer\na, b,c\n", "line 2 has more fields than the header line", "a header line"),
    "few.csv": ("question,answer\na,b\n", "there are 1 different questions", "at least 10"),
    "bad.jsonl": ('{"question": 1}\n[2]\n', "row 2 is no object", "JSONL (an object a line)"),
    "half.jsonl": ('{"question": 1}\n{"question": "\\ud83d"}', "row 2 holds '\\ud83d', which is half", "in UTF-8"),
    "deep.json": ("[" * 100_000, "cannot be read: maximum recursion depth", "in UTF-8"),
    "cut.json": ("[{", "cannot be read", "in UTF-8"),
    "object.json": ("{}", "it holds no list of rows", "in UTF-8"),
    "bad.parquet": ("PAR0", "is no parquet file", "closed"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_file_that_holds_no_tasks_is_refused_with_what_to_do(tmp_path: Path, name: str) -> None:
    content, what, fix = REFUSALS[name]
    (tmp_path / name).write_text(content)
    with pytest.raises(FlashError) as caught:
        env_setup(str(tmp_path / "new"), dataset=str(tmp_path / name))
    assert caught.value.code == "invalid_argument" and what in str(caught.value) and fix in caught.value.fix
    assert not (tmp_path / "new").exists()


def test_columns_are_named_where_their_names_do_not_tell(tmp_path: Path) -> None:
    rows = [{"frage": row["Question"], "antwort": row["Answer"]} for row in ROWS]
    path = csv_file(tmp_path, rows)
    assert read_table(str(path), "frage", "antwort").answer == "antwort"
    named = read_conversations(str(path), "frage", "antwort")[0]
    path.write_text(path.read_text().replace("frage,antwort", "question,answer"))
    assert named == read_conversations(str(path))[0]
    chat = tmp_path / "chat.json"
    chat.write_text(json.dumps(named))
    with pytest.raises(FlashError, match="its rows are conversations"):
        read_conversations(str(chat), "frage")
    path = csv_file(tmp_path, rows)
    with pytest.raises(FlashError, match="did you mean 'frage'"):
        read_table(str(path), "fragen", "antwort")
    with pytest.raises(FlashError, match="no rows to make tasks of"):
        env_setup(str(tmp_path / "new"), question="frage")
    with pytest.raises(FlashError, match="folder is needed"):
        env_setup(dataset=str(path))
    with pytest.raises(FlashError, match="no rows to make tasks of"):
        env_setup(str(tmp_path / "new"), template="dataset")


def test_classes_that_parquet_has_as_numbers_are_read_by_their_names(tmp_path: Path) -> None:
    names = ["World", "Sports", "Business", "Science", "Art", "Food"]
    rows = [{"text": f"{names[n % 6]} and {chr(97 + n % 26) * 3} {n}", "label": n % 6} for n in range(60)]
    feature = {"_type": "ClassLabel", "names": names}
    schema = json.dumps({"info": {"features": {"label": feature, "text": {"_type": "Value"}}}})
    table = pyarrow.Table.from_pylist([*rows, {"text": "nobody knows", "label": -1}])
    parquet.write_table(table.replace_schema_metadata({"huggingface": schema}), tmp_path / "news.parquet")
    read = read_table(str(tmp_path / "news.parquet"), None, None)
    assert read.split.labels is not None and set(read.split.labels.counts) == set(names)
    assert read.split.dropped == {"empty": 1}


def test_labels_are_read_as_a_job_of_a_classifier(tmp_path: Path) -> None:
    kinds = {"shipping": ("parcel", 80), "billing": ("invoice", 40), "praise": ("thank", 12)}
    rows = [
        {"message": f"my {word} {number} {chr(97 + number % 26) * 3} is here {number * 7}", "label": label}
        for label, (word, count) in kinds.items()
        for number in range(count)
    ]
    rows[0]["label"], rows[90]["label"], rows[20]["label"] = "Shipping ", "biling", "praise"
    rows += [
        {"message": rows[3]["message"].upper() + "!!", "label": "shipping"},
        {"message": f"Hello, {rows[4]['message']}", "label": "billing"},
        {"message": rows[5]["message"], "label": "praise"},
        {"message": " ", "label": "praise"},
    ]
    folder = tmp_path / "mail"
    data = env_setup(str(folder), dataset=str(csv_file(tmp_path, rows))).model_dump()["data"]
    found = data["labels"]
    assert data["dropped"] == {"empty": 1, "copies": 1, "other answer to the same question": 2}
    assert data["dropped_examples"]["copies"][0].startswith("row 133, as row 4: 'MY PARCEL")
    assert data["alike"].startswith("1 rows are another one in other words") and "row 134" in data["alike"]
    assert found["counts"] == {"shipping": (63, 15), "billing": (32, 9), "praise": (10, 3)}
    assert found["merged"] == {"Shipping": "'shipping': 1", "biling": "'billing': 1"}
    assert "'shipping' (row 6), 'praise' (row 135); left out" in found["contradictions"][0]
    assert any(line.startswith("row 21, 'praise'") for line in found["likely_wrong"])
    assert found["baselines"][0].startswith("always 'shipping': 56 % of the 27 eval rows")
    assert "'billing' 9, 'praise' 3" in found["warnings"][0]
    names: dict[str, Any] = {"__file__": str(folder / "environment.py")}
    exec((folder / "environment.py").read_text(), names)
    environment = names["load_environment"]()
    asked = environment.build_prompt_messages(environment.dataset[0])[0]["content"]
    assert "\nThe answer is one of: shipping, billing, praise.\n" in asked
    splits = {name for name in ("train", "eval") if "Hello, " in (folder / f"datasets/{name}.jsonl").read_text()}
    texts = (folder / f"datasets/{splits.pop()}.jsonl").read_text()
    assert rows[4]["message"] in texts.replace(f"Hello, {rows[4]['message']}", "")


def row(*said: tuple[str, str], prompt: int = 1, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text} for role, text in said], "prompt_messages": prompt, **more}


def test_what_is_learnt_of_a_row_stands_between_brackets():
    rows = [row(("user", "hi"), ("assistant", "yo")) for _ in range(18)]
    context = row(
        ("system", "Be kind."), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), prompt=4
    )
    unlearnt = row(("user", "x" * 700), ("assistant", "no"), ("user", "c"), ("assistant", "yes"))
    unlearnt["messages"][1]["weight"] = 0
    shown = preview_of([*rows, context, unlearnt])
    assert shown is not None and shown.by.startswith("estimated from characters (for any model)")
    assert (shown.rows, shown.tokens_about) == (20, {"median": 1, "p95": 202, "longest": 202})
    assert shown.shortest == shown.typical == "user: hi\nassistant: [[yo]]"
    assert "assistant: no\nuser: c\nassistant: [[yes]]" in shown.longest and len(shown.longest) < 1000
    only = preview_of([context])
    assert only is not None and "assistant: b\nuser: c\nassistant: [[d]]" in only.longest
    thought = row(("user", "a"), ("assistant", "b"))
    thought["messages"][1]["reasoning_content"] = "hm"
    seen = preview_of([thought])
    assert seen is not None and seen.longest == "user: a\nassistant: [[<think>hm</think> b]]"
    assert preview_of([]) is None


@pytest.mark.usefixtures("no_supervisor")
async def test_rows_are_shown_before_they_are_trained_on(tmp_path: Path):
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps({"question": f"What is {n}?", "answer": f"It is {n}."}) for n in range(12)))
    dry = await call("curate", runs=[str(path)], dry_run=True)
    assert dry["preview"]["rows"] == 12 and "[[It is " in dry["preview"]["typical"]
    push_echo(tmp_path / "echo")
    plan = await call(
        "train", environment="echo", algorithm="sft", dataset=str(path), validate_only=True, max_length=32
    )
    assert "[[It is " in plan["preview"]["longest"] and "cut" not in plan["preview"]
    assert plan["preview"]["columns_used"] == ["question", "answer"]

"""Gold answers and rows of datasets as the tokens that are learnt.

They are tokenized by the same Transcript that rollouts use, so that what is learnt here is what is
sampled later, token for token; only the assistant's tokens carry a label."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from environments.base import ChatMessage
from environments.tools import problem_of
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Json
from worker.rollouts.transcript import ChatTemplate, Transcript

Row = dict[str, list[int]]
COLUMNS = ("input_ids", "labels")
IGNORED = -100


def dataset_rows(dataset: Json, template: ChatTemplate) -> dict[str, list[list[Row]]]:
    """{"train": rows, "holdout": rows} of the curated dataset that job.json names, by conversation
    like those of `gold_rows`.

    FlashError(dataset_invalid) if a file changed since the run was created.
    """
    rows: dict[str, list[list[Row]]] = {}
    for file, checksum in dataset["files"].items():
        path = Path(dataset["path"], file)
        content = path.read_bytes() if path.is_file() else b""
        if hashlib.sha256(content).hexdigest() != checksum:
            what = "the file is gone or was changed since"
            fix = "curate it again and start another run"
            raise FlashError("dataset_invalid", what, path=path, fix=fix)
        lines = [json.loads(line) for line in content.decode().split("\n") if line]
        rows[path.stem] = []
        for number, line in enumerate(lines, start=1):
            rows[path.stem].append(rows_of_line(f"{file} line {number}", line, template))
    return rows


def rows_of_line(name: str, line: Json, template: ChatTemplate) -> list[Row]:
    """Those of a line of a dataset; `name` and errors as of `rows_of`."""
    count = line["prompt_messages"]
    prompt, gold = line["messages"][:count], line["messages"][count:]
    return rows_of(name, template.for_tools(line.get("tools", ())), prompt, gold)


def learnable_of(conversations: list[list[Row]], max_length: int) -> list[list[Row]]:
    """The rows, cut, without those that have no token left to learn."""
    kept: list[list[Row]] = []
    for rows in conversations:
        cut = [{name: values[:max_length] for name, values in row.items()} for row in rows]
        kept.append([row for row in cut if any(label != IGNORED for label in row["labels"])])
    return list(filter(None, kept))


def rows_of(
    name: str, template: ChatTemplate, prompt: list[ChatMessage], gold: list[ChatMessage]
) -> list[Row]:
    """Tokens of a prompt and its gold answers; FlashError(dataset_invalid) with `name` if they
    cannot be learnt.

    It is one row, unless the template shows an answer otherwise once it is history: Qwen3 drops its
    thought when the user speaks again. Then what follows is learnt in a row of its own, which shows
    the history as a deployment does.
    """
    check_texts(name, [*prompt, *gold], template)
    transcript = Transcript(template, prompt)
    finished: list[Transcript] = []
    between: list[Json] = []
    answered = False
    for message in gold:
        if message["role"] != "assistant":
            between.append(message)
            continue
        check_gold(name, message, [] if answered else between, template)
        try:
            if answered:
                before = transcript.copy()
                # Even if nothing was said in between: each answer of a rollout has its own turn.
                transcript.add_environment(between)
                if transcript.forks or transcript.unlike_template(prompts=True):
                    finished.append(before)
                    transcript = Transcript(template, transcript.messages)
            transcript.add_gold(message)
            between = []
            answered = True
            if error := transcript.unlike_template(prompts=False):
                raise error
        except FlashError as error:
            raise FlashError(error.code, f"{name}: {error.what}", fix=error.fix) from error
    learnt = [each for each in [*finished, transcript] if any(each.mask)]
    return list(map(_row, learnt or [transcript]))


def check_texts(name: str, messages: list[ChatMessage], template: ChatTemplate) -> None:
    for number, message in enumerate(messages, start=1):
        if token := template.control_token(message):
            what = f"{name}: message {number} holds {token!r}, a control token of this model"
            fix = "remove it from the text, or write it otherwise, such as with a space"
            raise FlashError("dataset_invalid", what, fix=fix)


def _row(transcript: Transcript) -> Row:
    labels = [IGNORED] * len(transcript.prompt_ids)
    for token, mine in zip(transcript.completion_ids, transcript.mask, strict=True):
        labels.append(token if mine else IGNORED)
    return {"input_ids": transcript.ids, "labels": labels}


def check_gold(name: str, answer: ChatMessage, before: list[Json], template: ChatTemplate) -> None:
    """FlashError(dataset_invalid) if no rollout could hold this gold answer; `before` are the
    gold's messages before its first answer."""
    content = answer.get("content")
    problems: list[str | None] = []
    if "bad_tool_call" not in answer and answer.get("weight") != 0:  # else it is not learnt anew
        problems = [problem_of(call, template.tools) for call in answer.get("tool_calls") or ()]
    if before:
        wrong = f"the gold begins with a {before[0]['role']} message"
    elif answer.get("tool_calls") and not template.tools:
        wrong = "an answer has tool_calls, but the task has no tools"
    elif not isinstance(content, str):
        wrong = f"an answer's content is {content!r:.50}, no string"
    elif problem := next(filter(None, problems), None):
        wrong = f"an answer's call cannot be learnt: {problem}"
    else:
        return
    fix = "begin with an answer, and let every answer be text or calls of declared tools"
    raise FlashError("dataset_invalid", f"{name}: {wrong}", fix=fix)

"""Adapters for environments that were written for other contracts.

freesolo runs folders for that SDK unchanged. reasoning_gym has datasets by name. gym wraps objects
with reset and step. trl takes environment classes. `load_environment` may also return an object of
verifiers or Inspect, which `adapted` recognises. Each adapter imports its package on use."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from environments import doors
from environments.base import ChatMessage, TaskExample, UnsupportedError
from environments.settings import read_small
from environments.tools import as_list, as_object, text_of

ADAPTERS = "flash_mcp.adapters"
"""The entry points of adapters: by the package whose objects it takes, a function of the object."""
SDK = "freesolo"
SDK_IMPORT = re.compile(rb"^\s*(from|import)\s+freesolo\b", re.MULTILINE)
HELD_OUT_EVERY = 5  # without a split for evaluation, each fifth task is held out

Row = Mapping[str, Any]


def imports_sdk(folder: Path) -> bool:
    """Whether the code in the folder imports the freesolo SDK."""
    for path in folder.rglob("*.py"):
        with suppress(OSError):
            if SDK_IMPORT.search(read_small(path)):
                return True
    return False


def load(folder: Path, load_environment: Callable[..., Any], args: Mapping[str, Any]) -> Any:
    """Call the `load_environment` of a folder. Adapt what it returns to this contract."""
    if imports_sdk(folder):
        freesolo = importlib.import_module("environments.adapters.freesolo")
        return freesolo.load(folder, load_environment, args)
    return adapted(load_environment(**args))


def adapted(loaded: Any) -> Any:
    """An environment of this contract for an object of another one; other values as they are."""
    loaded_class = cast("type[Any]", loaded if isinstance(loaded, type) else type(loaded))
    packages = [kind.__module__.partition(".")[0] for kind in loaded_class.__mro__]
    if "environments" in packages:
        return loaded
    for package in packages:
        if package in doors.brought(ADAPTERS):
            return doors.find(ADAPTERS, package)(loaded)
        if package == "openreward":
            fix = "write an EnvironmentMultiTurn that calls the tools of its object"
            raise UnsupportedError(f"classes of openreward have no adapter: {fix}")
    return loaded


def tasks_of(
    rows: Sequence[Row],
    held_out: Iterable[Row],
    question: Callable[[Row], str],
    without: Iterable[str] = (),
) -> tuple[list[TaskExample], list[TaskExample]]:
    """The train and eval tasks of dataset rows.

    A task's id is a digest of its row but for the fields `without`, which number it. Rows that
    repeat are left out, and so are train rows that are held out. Without any `held_out` it is every
    fifth row, and without `rows` the same share of `held_out` remains for evaluation. A row's
    `completion`, a text or messages, is its gold answer."""
    eval_tasks = _by_id(held_out, question, {*without})
    train_tasks = _by_id(rows, question, {*without})
    if not eval_tasks or not train_tasks:
        every = list((train_tasks or eval_tasks).items())
        eval_tasks = dict(every[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])
        train_tasks = dict(every)
    train = [task for id, task in train_tasks.items() if id not in eval_tasks]
    return train, list(eval_tasks.values())


def _by_id(
    rows: Iterable[Row], question: Callable[[Row], str], without: set[str]
) -> dict[str, TaskExample]:
    results: dict[str, TaskExample] = {}
    for row in rows:
        fields = {name: value for name, value in row.items() if name not in without}
        text = json.dumps(fields, sort_keys=True, default=str)
        id = hashlib.sha256(text.encode()).hexdigest()[:16]
        gold: Any = row.get("completion")
        if gold is not None and not isinstance(gold, str):
            # A table of messages has each key in all of them.
            gold = [{key: part for key, part in item.items() if part is not None} for item in gold]
        task = TaskExample(record=row, input=question(row), id=id, output=gold)
        results.setdefault(id, task)
    inputs = [task.input for task in results.values()]
    if len(set(inputs)) == len(inputs):
        return results
    # Games open alike for every task. What is asked tells tasks apart, so it names the task.
    return {id: replace(task, input=f"{task.input}\n(task {id})") for id, task in results.items()}


def prompt_messages(row: Row) -> list[ChatMessage]:
    """The messages of a row's `prompt`. A text is the user's."""
    prompt: Any = row.get("prompt") or ""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    for message in prompt:
        parts = as_list(message.get("content"))
        refuse_images(as_object(part).get("type", "text") for part in parts)
    return [dict(message) for message in prompt]


def refuse_images(kinds: Iterable[str]) -> None:
    """Raises UnsupportedError for content of another kind than text."""
    for kind in kinds:
        if kind in ("image", "image_url", "input_image", "audio", "input_audio", "video"):
            raise UnsupportedError(f"its prompts hold content of type {kind}: models see text only")


def prompt_text(row: Row) -> str:
    """What the messages of a row's `prompt` say."""
    return "\n\n".join(map(text_of, prompt_messages(row)))


def takes_keyword(function: Callable[..., Any], name: str) -> bool:
    """Whether `function` can be called with the keyword `name`."""
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return takes_any or name in parameters

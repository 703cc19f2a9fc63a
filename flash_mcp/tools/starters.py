"""env_setup: an environment to start from, of a template, of rows, or of a published version."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

import environments
from environments.base import DatasetError, UnsupportedError
from flash_mcp.protocol import extensions
from flash_mcp.protocol.errors import FlashError, disk_error, expanded
from flash_mcp.state.owners import refuse_server_side
from flash_mcp.state.store import open_store
from flash_mcp.state.versions import NAME, folder_files
from flash_mcp.tools.shared import playbook
from flash_mcp.tools.shared.splitting import LabelsRead
from flash_mcp.tools.shared.table import read_table
from flash_mcp.tools.shared.tool_base import Result, ResultModel
from flash_mcp.tools.shared.truncation import json_characters, shorten

Template = Literal[
    "calculator",
    "sort_words",
    "dataset",
    "multi_turn",
    "tool_use",
    "mcp_server",
    "agent",
    "terminal",
]
Scorer = Literal["tolerant", "exact", "judge"]

TEMPLATES = Path(environments.__file__).parent / "examples"
FOLDERS = {"multi_turn": "calculator", "tool_use": "tool_calculator", "agent": "agent_calculator"}
"""The folder of a template, where it has another name."""
HARBOR = "harbor:"
"""Before a folder of tasks in Harbor's form."""
HARBOR_DOOR = ("flash_mcp.tasks", "harbor")
PROGRAMS = {".py": "python", ".js": "node", ".mjs": "node", ".cjs": "node"}
BUNDLE = (
    "make one file of it: npm install esbuild PACKAGE; npx esbuild node_modules/PACKAGE/FILE "
    "--bundle --platform=node --format=esm --outfile=server.mjs, where FILE is its bin in "
    "package.json; then server='server.mjs'"
)
INLINE = ("environment.py", "datasets/eval.jsonl", "datasets/train.jsonl", "configs/rl.toml")
"""Files of a starter that are returned where none can be written, in order of their worth."""
INLINE_CHARACTERS = 7_550
INLINE_ROWS = 3
CUT_CHARACTERS = 200
TEXTS = {".py", ".toml", ".jsonl", ".txt", ".md", ".json"}


class DataRead(ResultModel):
    """What env_setup made of rows."""

    source: str | None = None
    columns: list[str]
    question: str
    answer: str
    train_tasks: int
    eval_tasks: int
    dropped: dict[str, int] | None = None
    dropped_examples: dict[str, list[str]] | None = None
    alike: str | None = None
    labels: LabelsRead | None = None
    example: dict[str, str]


class EnvSetup(Result):
    """A starter project."""

    folder: str | None = None
    """The folder, absolute."""
    name: str
    """The environment's name in its configs; push it under this name."""
    files: list[str]
    """Its files, relative to the folder."""
    data: DataRead | None = None
    """With dataset: what was read of it."""
    contents: dict[str, str] | None = None
    """Without folder: the texts of the files that a starter needs; of the datasets the first rows.
    """


def env_setup(
    folder: Annotated[str | None, Field(min_length=1)] = None,
    template: Template | None = None,
    environment: Annotated[str | None, Field(min_length=1)] = None,
    dataset: Annotated[str | None, Field(min_length=1)] = None,
    question: str | None = None,
    answer: str | None = None,
    scorer: Scorer | None = None,
    server: Annotated[str | None, Field(min_length=1)] = None,
) -> EnvSetup:
    """Write a starter project that trains as it is: environment.py, configs, the playbook
    TRAINING.md, and where the template has rows, datasets. Without folder, return its files.

    If one of its files exists, nothing is written. Change environment.py and its tasks to yours.
    Then check them with env_test and publish them with env_push.

    Args:
        folder: Folder on the server to write to; created if missing. A remote caller leaves it out.
        template: calculator (default) or multi_turn: a tool that the environment answers for.
            sort_words: one prompt, one answer. agent: your program that calls a model's API.
            mcp_server: an MCP server's tools. dataset: rows of data. terminal: bash.
        environment: Instead of template: NAME@DIGEST, to get a published version's files back.
        dataset: File of rows on the server (CSV, TSV, JSON, JSONL, parquet), hub:OWNER/NAME or
            harbor:FOLDER.
        question: Column of the questions, if its name does not tell.
        answer: Column of the answers.
        scorer: How answers are compared; default tolerant.
        server: With mcp_server: its file or its command.
    """
    of_rows = {"dataset": dataset, "question": question, "answer": answer, "scorer": scorer}
    if environment is not None:
        _exclude("environment", template=template, server=server, **of_rows)
        return _pulled(folder, environment)
    for name, value in {"dataset": dataset, "server": server}.items():
        if value is not None:
            instead = "write rows into datasets/*.jsonl of a starter"
            refuse_server_side(name, instead, **{name: value})
    if template == "mcp_server":
        _exclude(f"template={template!r}", **of_rows)
        return _of_server(folder, server)
    if server is not None:
        fix = "pass template='mcp_server' too"
        raise FlashError("invalid_argument", "server is that of an MCP server", fix=fix)
    if template not in (None, "dataset"):
        _exclude(f"template={template!r}", **of_rows)
    if dataset is not None and dataset.startswith(HARBOR):
        _exclude(f"dataset={dataset!r}", question=question, answer=answer, scorer=scorer)
        return _of_tasks(folder, expanded(dataset.removeprefix(HARBOR)))
    if dataset is not None:
        return _of_rows(folder, dataset, question, answer, scorer or "tolerant")
    if template == "dataset" or any(value is not None for value in of_rows.values()):
        fix = "pass dataset='/path/of/rows.csv' or dataset='hub:OWNER/NAME' too"
        raise FlashError("invalid_argument", "there are no rows to make tasks of", fix=fix)
    template = template or "calculator"
    name = _name(folder, template)
    files = _starter(template, name)
    changed = "environment.py"
    if "datasets/train.jsonl" in files:
        changed += " and datasets/"
    change = f"change {changed} to your task (see TRAINING.md)"
    return _written(folder, name, files, change)


def _exclude(option: str, **others: str | None) -> None:
    for name, value in others.items():
        if value is not None:
            what = f"{option} does not go with {name}={value!r}"
            raise FlashError("invalid_argument", what, fix=f"leave out {name} or {option}")


def _pulled(folder: str | None, reference: str) -> EnvSetup:
    version = open_store().environment(reference)
    files: dict[str, bytes] = {}
    for path, source in folder_files(Path(version.path)).items():
        files[path] = source if isinstance(source, bytes) else source.read_bytes()
    result = _written(folder, version.name, files, f"these are the files of {version.reference}")
    shown = result.contents
    if shown is None:
        return result
    partial = [path for path in result.files if shown.get(path, "").encode() != files[path]]
    if partial:
        result.cut = shorten(f"not here, or not whole: {', '.join(partial)}", CUT_CHARACTERS)
        whole = f"env_setup(environment={version.reference!r}, folder=...) writes all of it"
        result.next = f"do not push these files, of which parts are missing: on the server {whole}"
    return result


def _of_server(folder: str | None, server: str | None) -> EnvSetup:
    """A starter with the tools of an MCP server: its own one, or `server`."""
    name = _name(folder, "mcp_server")
    files = _starter("mcp_server", name)
    packages = "name the server's packages in requirements.txt, if it has any"
    if server is not None:
        del files["server.py"]
        path = expanded(server)
        if path.suffix in PROGRAMS and path.is_file():
            program = f"server{path.suffix}"
            files[program] = path.read_bytes()
            command = [PROGRAMS[path.suffix], program]
        else:
            command = _command(server)
        if command[0] == "uvx":
            # The requirement that `uvx [--from PACKAGE] PROGRAM ...` installs, and the command
            # itself
            words = command[1:]
            package = ""
            if words[:1] == ["--from"]:
                package = words[1] if len(words) > 1 else ""
                words = words[2:]
            if not words or words[0].startswith("-"):
                fix = "write uvx PROGRAM or uvx --from PACKAGE PROGRAM"
                raise FlashError("invalid_argument", "uvx names no program", server=server, fix=fix)
            program, _, version = words[0].partition("@")
            pinned = f"{program}=={version}" if version and version != "latest" else program
            requirement, command = package or pinned, [program, *words[1:]]
            files["requirements.txt"] = f"{requirement}\n".encode()
            packages = f"requirements.txt names {requirement}"
        elif command[0] == "npx":
            what = "npx fetches a package, and an environment has no network"
            raise FlashError("invalid_argument", what, server=server, fix=BUNDLE)
        _set(files, "SERVER", repr(command))
    return _written(folder, name, files, packages)


def _command(server: str) -> list[str]:
    words: list[str] = []
    with suppress(ValueError):  # a quotation is not closed
        words = shlex.split(server)
    what = "it is no command"
    if words:
        is_path = "/" in words[0] or Path(words[0]).suffix in PROGRAMS
        if not is_path or expanded(words[0]).exists():
            return words
        what = f"there is no such file: {words[0]}"
    fix = "name the server's file on this machine, or the command that starts it"
    raise FlashError("invalid_argument", what, server=server, fix=fix)


def _of_rows(
    folder: str | None, dataset: str, question: str | None, answer: str | None, scorer: Scorer
) -> EnvSetup:
    if folder is None:
        fix = "pass folder='/path/to/write/to'"
        raise FlashError("invalid_argument", "with dataset, folder is needed", fix=fix)
    table = read_table(dataset, question, answer)
    name = _name(folder, "dataset")
    files = _starter("dataset", name) | table.files()
    _set(files, "SCORER: str", f'"{scorer}"')
    if table.split.labels:
        _set(
            files, "LABELS: list[str]", json.dumps([*table.split.labels.counts], ensure_ascii=False)
        )
    change = "if an answer is right in other forms too, change is_right in environment.py first"
    if scorer == "judge":
        files["environment.toml"] = b"network = true\n"
        change = "name the judge in JUDGE of environment.py, and allow it the network"
    result = _written(folder, name, files, change)
    result.data = DataRead(
        source=str(table.origin) if table.origin else None,
        columns=table.columns,
        question=table.question,
        answer=table.answer,
        train_tasks=len(table.train),
        eval_tasks=len(table.held_out),
        dropped=dict(table.split.dropped) or None,
        dropped_examples=table.split.examples or None,
        alike=table.split.alike,
        labels=table.split.labels,
        example={key: shorten(value, 300) for key, value in table.train[0].items()},
    )
    return result


def _of_tasks(folder: str | None, tasks: Path) -> EnvSetup:
    """The starter of an agent in a terminal, with the tasks of this folder in place of its own."""
    name = _name(folder, "terminal")
    files = _starter("terminal", name)
    files = {path: content for path, content in files.items() if not path.startswith("tasks/")}
    try:
        extensions.find(*HARBOR_DOOR)(tasks)
        for path in tasks.rglob("*"):
            if path.is_file():
                files[f"tasks/{path.relative_to(tasks).as_posix()}"] = path.read_bytes()
    except (DatasetError, UnsupportedError, OSError) as error:
        fix = "mend or leave out that task; docs/terminal.md says which tasks can run here"
        raise FlashError("dataset_invalid", str(error), folder=str(tasks), fix=fix) from None
    return _written(folder, name, files, "the tasks are in tasks/ as they were")


def _name(folder: str | None, template: str) -> str:
    name = expanded(folder).absolute().name if folder else template
    return name if NAME.fullmatch(name) else template


def _starter(template: str, name: str) -> dict[str, bytes]:
    if template == "terminal":
        extensions.find(*HARBOR_DOOR)
    source = TEMPLATES / FOLDERS.get(template, template)
    files = {"TRAINING.md": playbook.text().encode()}
    for path in source.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            files[path.relative_to(source).as_posix()] = path.read_bytes()
    named = f'environment = "{name}"'.encode()
    for path in ("configs/rl.toml", "configs/sft.toml"):
        files[path] = re.sub(rb'(?m)^environment = ".*"$', named, files[path])
    return files


def _set(files: dict[str, bytes], name: str, value: str) -> None:
    """Give a constant of environment.py another value."""
    line = f"{name} = {value}".encode()
    pattern = rf"(?m)^{re.escape(name)} = .*$".encode()
    # A function, as re.sub would interpret the backslashes of a text.
    files["environment.py"] = re.sub(pattern, lambda _: line, files["environment.py"])


# -- files -----------------------------------------------------------------------------------------


def _written(folder: str | None, name: str, files: dict[str, bytes], change: str) -> EnvSetup:
    """The result, with the files in `folder`, or without it in `contents`."""
    paths = sorted(files)
    if folder is None:
        first = [path for path in INLINE if path in files]
        order = list(dict.fromkeys([*first, *paths]))
        contents = _inline(files, order, INLINE_ROWS)
        if not contents.keys() >= set(first):  # fewer rows, before a file is left out
            contents = _inline(files, order, 1)
        return EnvSetup(
            name=name,
            files=paths,
            contents=contents,
            next=f"{change}; then env_push(name={name!r}, files={{path: text}}); the resource "
            f"{playbook.ADDRESS}/environment has the contract",
        )
    target = expanded(folder).absolute()
    what = ""
    if taken := [path for path in sorted(files) if os.path.lexists(target / path)]:
        what = f"{', '.join(taken)} exists in {target} already; nothing was written"
    elif os.path.lexists(target) and not target.is_dir():
        what = f"{target} is no folder; nothing was written"
    if what:
        fix = "choose another folder, or move these files away"
        raise FlashError("invalid_argument", what, folder=target, fix=fix)
    written: list[Path] = []
    try:
        for path, content in files.items():
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            with (target / path).open("xb") as stream:
                written.append(target / path)
                stream.write(content)
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        if isinstance(error, (PermissionError, FileNotFoundError, NotADirectoryError)):
            fix = "choose a folder that the server may write to"
            what = f"cannot write there: {error}"
            raise FlashError("invalid_argument", what, folder=target, fix=fix) from error
        raise disk_error(error, target) from error
    following = f"{change}; then env_test(folder={str(target)!r})"
    return EnvSetup(folder=str(target), name=name, files=paths, next=following)


def _inline(files: Mapping[str, bytes], paths: Iterable[str], rows: int) -> dict[str, str]:
    """Texts as env_push takes them, as many as fit into a result; of datasets the first `rows`."""
    contents: dict[str, str] = {}
    room = INLINE_CHARACTERS
    for path in paths:
        if Path(path).suffix not in TEXTS or path == "TRAINING.md":
            continue
        lines = files[path].decode(errors="replace").splitlines(keepends=True)
        if path.endswith(".jsonl"):
            lines = lines[:rows]
        text = "".join(lines)
        if json_characters(text) <= room:
            room -= json_characters(text)
            contents[path] = text
    return contents

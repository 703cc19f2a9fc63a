"""Rows of a user's file or of a dataset at the hub, with the columns that they have."""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, cast
from urllib.parse import quote

import httpx
from fsspec import utils as fsspec_utils  # pyright: ignore[reportMissingTypeStubs]

from environments.messages import THOUGHTS
from environments.tools import as_list, as_object
from flash_mcp.judgement.attempts import DEFAULT_MAX_LENGTH
from flash_mcp.protocol.base_models import ModelCard, find
from flash_mcp.protocol.errors import FlashError, expanded
from flash_mcp.protocol.packages import how_to_install
from flash_mcp.protocol.paths import models_dir
from flash_mcp.protocol.records import Json, text_of
from flash_mcp.protocol.result_model import ResultModel
from flash_mcp.protocol.spec import DEFAULT_MODEL
from flash_mcp.protocol.surroundings import HUB as LOGIN
from flash_mcp.protocol.surroundings import by_way_of, environment_for, said, use_proxies
from flash_mcp.state.owners import caller
from flash_mcp.supervisor.process import PYTHON
from flash_mcp.tools.shared.truncation import shorten

log = logging.getLogger(__name__)

HUB = re.compile(
    r"hub:(?P<name>[\w.-]+/[\w.-]+)(?:/(?P<config>[\w.-]+))?(?:@(?P<pinned>\w{4,40}))?"
)
"""hub:OWNER/NAME, or hub:OWNER/NAME/CONFIG; @COMMIT takes the rows of that commit."""
HUB_TIMEOUT_S = 20.0
MOST_BYTES = 64 * 2**20
SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".parquet")

MOST_CONFIGS = 20

Row = Json


@dataclass(frozen=True)
class Origin:
    """What was read of a dataset at the hub."""

    dataset: str
    revision: str | None
    config: str
    split: str
    files: int
    of_files: int
    other_configs: Sequence[str]
    other_splits: Sequence[str]

    def __str__(self) -> str:
        files = f"all {self.files} files"
        if self.of_files == 1:
            files = "1 file"
        elif self.files < self.of_files:
            most = f"{MOST_BYTES >> 20} MiB"
            files = f"the first {self.files} of {self.of_files} files, since all are over {most}"
        parts = [
            f"{self.dataset} at revision {self.revision or 'unknown'}, configuration "
            f"{self.config}, split {self.split}: {files}"
        ]
        if self.other_splits:
            parts.append(f"not read: split {', '.join(self.other_splits[:MOST_CONFIGS])}")
        if self.other_configs:
            parts.append(f"not read: configuration {', '.join(self.other_configs[:MOST_CONFIGS])}")
        return "; ".join(parts)


def is_rows(reference: str) -> bool:
    """Whether it names rows, and not a dataset that was curated."""
    return bool(HUB.fullmatch(reference)) or Path(reference).suffix.lower() in SUFFIXES


def read_rows(source: str) -> tuple[list[Row], list[str], Origin | None]:
    """All rows, the names of their columns, and of a dataset at the hub which it was. Raises
    FlashError(invalid_argument)."""
    origin = None
    if named := HUB.fullmatch(source):
        rows, origin = _from_hub(source, **named.groupdict())
    else:
        path = expanded(source).absolute()
        try:
            if path.stat().st_size > MOST_BYTES:
                raise _too_large(source)
            content = path.read_bytes()
        except OSError as error:
            what = f"cannot read it: {error.strerror}"
            raise refusal(source, what, "name a file, or hub:OWNER/NAME") from error
        rows = _rows(source, path.suffix.lower(), content)
    return rows, list(dict.fromkeys(name for row in rows for name in row)), origin


def _from_hub(
    source: str, name: str, config: str | None, pinned: str | None
) -> tuple[list[Row], Origin]:
    """The files of the train split, or else of the first one: all of them, or as many of the first
    as are not too large. Of the newest commit they are what the hub converts to parquet."""
    use_proxies()
    hub = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    token = environment_for(caller().secrets, os.environ).get(LOGIN)
    headers: dict[str, str] = {}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    try:
        with httpx.Client(headers=headers, timeout=HUB_TIMEOUT_S, follow_redirects=True) as client:
            about = f"{hub}/api/datasets/{name}"
            newest = revision = _revision(client, about)
            if not pinned or (newest or "").startswith(pinned):
                listed = client.get(f"{about}/parquet").raise_for_status().json()
            else:
                commit = client.get(f"{about}/revision/{pinned}").raise_for_status().json()
                revision = str(commit["sha"])
                listed = _files_at(commit, f"{hub}/datasets/{name}/resolve/{revision}")
            chosen = _config_of(source, name, config, list(listed))
            split = "train"
            if split not in listed[chosen]:
                split, *_ = listed[chosen]
            files = listed[chosen][split]
            if not files:
                what = f"commit {revision} has no file of the split {split} that can be read"
                fix = f"leave the commit out, or download its files ({', '.join(SUFFIXES)})"
                raise refusal(source, what, fix)
            rows: list[Row] = []
            room = MOST_BYTES
            read = 0
            for file in files:
                content = _downloaded(client, file, room)
                if content is None:
                    break
                rows += _rows(source, Path(file).suffix.lower(), content)
                room -= len(content)
                read += 1
            if not read:
                raise _too_large(source)
            if revision == newest and _revision(client, about) != newest:
                raise refusal(source, "it changed while it was read", "call again")
    except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
        fix = "check the name; set HF_TOKEN if the dataset asks for it; or give a file"
        what = f"the hub does not serve it: {str(error) or type(error).__name__:.200}"
        what += f"{by_way_of()}{said('HF_ENDPOINT')}"
        raise refusal(source, what, fix) from error
    others = [other for other in listed if other != chosen]
    splits = [other for other in listed[chosen] if other != split]
    return rows, Origin(name, revision, chosen, split, read, len(files), others, splits)


def _files_at(commit: Json, address: str) -> dict[str, dict[str, list[str]]]:
    """{configuration: {split: files}} of an earlier commit, as its card lists them; without a list
    those with the word "train" in their names, or the only one."""
    paths: list[str] = []
    for file in commit["siblings"]:
        path = Path(file["rfilename"])
        if path.suffix.lower() in SUFFIXES and path.name != "dataset_infos.json":
            paths.append(str(path))
    train = [path for path in paths if "train" in re.findall("[a-z]+", path.lower())]
    listed = {"default": {"train": train or paths[: len(paths) == 1]}}
    if configs := as_list(as_object(commit.get("cardData")).get("configs")):
        listed = {str(config["config_name"]): _listed_files(config, paths) for config in configs}
    for splits in listed.values():
        for split, files in splits.items():
            splits[split] = [f"{address}/{quote(path)}" for path in files]
    return listed


def _listed_files(config: Json, paths: Sequence[str]) -> dict[str, list[str]]:
    """{split: files} of a configuration of a dataset's card."""
    translate: Any = cast(Any, fsspec_utils).glob_translate
    parts: list[Any] = as_list(config["data_files"]) or [config["data_files"]]
    if not as_object(parts[0]):
        parts = [{"split": "train", "path": parts}]
    splits: dict[str, list[str]] = {}
    for part in parts:
        globs = as_list(part["path"]) or [part["path"]]
        pattern = re.compile("|".join(map(translate, globs)))
        splits[str(part["split"])] = [path for path in paths if pattern.match(path)]
    return splits


def _config_of(source: str, name: str, config: str | None, listed: Sequence[str]) -> str:
    if config is None and len(listed) == 1:
        return listed[0]
    what = f"{name} has {len(listed)} configurations"
    if config is not None:
        what = f"{name} has no configuration {config!r}"
    config = config or "default"
    if config in listed:
        return config
    shown = ", ".join(f"hub:{name}/{other}" for other in listed[:MOST_CONFIGS])
    raise refusal(source, what, f"name one of: {shown}")


def _revision(client: httpx.Client, url: str) -> str | None:
    """The commit of the dataset; None where a mirror does not say."""
    with suppress(httpx.HTTPStatusError, ValueError, KeyError, TypeError):
        return str(client.get(url).raise_for_status().json()["sha"])
    return None


def _downloaded(client: httpx.Client, url: str, room: int) -> bytes | None:
    """The file; None if it has more bytes than `room`."""
    with client.stream("GET", url) as response:
        content = bytearray()
        for part in response.raise_for_status().iter_bytes():
            content += part
            if len(content) > room:
                return None
        return bytes(content)


def _rows(source: str, suffix: str, content: bytes) -> list[Row]:
    if suffix == ".parquet":
        return _parquet(source, content)
    try:
        return _parsed(suffix, content.decode("utf-8-sig"))
    except (ValueError, RecursionError, csv.Error) as error:  # JSON's and UTF-8's are ValueErrors
        fix = (
            "give CSV with a header line, TSV, JSON, JSONL (an object a line) or parquet, in UTF-8"
        )
        raise refusal(source, f"it cannot be read: {error}", fix) from error


def _parsed(suffix: str, text: str) -> list[Row]:
    if suffix in (".csv", ".tsv"):
        return _separated(text.lstrip("\r\n"))
    if suffix == ".json":
        rows: Any = json.loads(text)
        if isinstance(rows, dict):  # such as {"version": 1, "data": [...]}
            lists: list[Any] = []
            for part in cast("Json", rows).values():
                if isinstance(part, list):
                    lists.append(part)
            rows = lists[0] if len(lists) == 1 else None
    else:
        # Not splitlines(): a text in JSON may hold the line ends that Unicode has besides.
        rows = [json.loads(line) for line in text.split("\n") if line.strip()]
    if not isinstance(rows, list):
        raise ValueError("it holds no list of rows")
    for number, row in enumerate(cast("list[Any]", rows), start=1):
        if not isinstance(row, dict):
            raise ValueError(f"row {number} is no object")
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:  # as of an emoji that was cut in two
            half = error.object[error.start]
            raise ValueError(f"row {number} holds {half!r}, which is half a character") from error
    return cast("list[Row]", rows)


def _separated(text: str) -> list[Row]:
    """Rows of a file whose header line tells what separates them: spreadsheets also write
    semicolons. Raises ValueError and csv.Error.
    """

    def header(delimiter: str) -> list[str]:
        lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
        return next(lines) if text else []

    delimiter = max(",;\t|", key=lambda candidate: len(header(candidate)))
    rows: list[Row] = []
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)
    for row in reader:
        if None in row:  # where DictReader puts what has no column
            raise ValueError(f"line {reader.line_num} has more fields than the header line")
        rows.append(row)
    return rows


def _parquet(source: str, content: bytes) -> list[Row]:
    try:
        parquet: Any = import_module("pyarrow.parquet")  # only there with the extra cpu or gpu
    except ImportError as error:
        fix = f"{how_to_install()}, or give CSV or JSONL"
        raise refusal(source, "parquet needs pyarrow, which is not installed", fix) from error
    try:
        table = parquet.read_table(io.BytesIO(content))
        return _named_classes(table.to_pylist(), table.schema.metadata or {})
    except (ValueError, OSError) as error:  # ArrowInvalid is a ValueError
        what = f"it is no parquet file: {error}"
        raise refusal(source, what, "give the file that its writer has closed") from error


def _named_classes(rows: list[Row], metadata: Mapping[bytes, bytes]) -> list[Row]:
    """The rows with the names of classes, where the datasets library wrote their numbers."""
    names: dict[str, list[str]] = {}
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        for column, feature in features.items():
            if feature.get("_type") == "ClassLabel" and feature.get("names"):
                names[column] = list(map(str, feature["names"]))
    for row in rows:
        for column, classes in names.items():
            number = row.get(column)
            if isinstance(number, int) and 0 <= number < len(classes):
                row[column] = classes[number]
            elif number == -1:  # a row without a label
                row[column] = None
    return rows


def _too_large(source: str) -> FlashError:
    what = f"it is larger than {MOST_BYTES >> 20} MiB"
    return refusal(source, what, "take a sample of its rows")


def refusal(source: str, what: str, fix: str) -> FlashError:
    return FlashError("invalid_argument", what, dataset=source, fix=fix)


# -- rows of a dataset as text, with what is learnt of them marked ---------------------------------

CHARACTERS_PER_TOKEN = 3.5
"""For English text in common vocabularies; the server has no tokenizer."""
SHOWN_CHARACTERS = 600
"""Of each row that is shown."""


PREVIEW_S = 10.0
"""How long rows are rendered for a preview."""
PREVIEW_LIMIT_S = 28.0
"""With the imports of the process that renders them."""


class Preview(ResultModel):
    """Rows to learn. What is learnt of each stands between [[ and ]]."""

    rows: int
    by: str
    tokens: dict[str, int] | None = None
    tokens_about: dict[str, int] | None = None
    cut: int | None = None
    left_out: int | None = None
    columns_used: list[str] | None = None
    columns_ignored: dict[str, int] | None = None
    typical: str
    shortest: str
    longest: str


def preview_of(rows: Sequence[Json], counts: Json | None = None, **render: Any) -> Preview | None:
    """None without rows. `counts` are those of the dataset's manifest; `render` is as of
    `_rendered`, and without it the server's own estimate is shown."""
    if not rows:
        return None
    made, why = _rendered(rows, **render) if render else (None, "for any model")
    preview = made or _estimated(rows, render.get("max_length"), why)
    if counts:
        preview.columns_used = counts.get("used") or None
        preview.columns_ignored = counts.get("ignored") or None
    return preview


def preview_by_default(
    rows: Sequence[Json], counts: Json | None = None, seconds: float = PREVIEW_S
) -> tuple[Preview | None, str]:
    """As the default model will see the rows, and why it cannot learn them, if so."""
    card = find(DEFAULT_MODEL)
    options: Json = {"card": card, "max_length": DEFAULT_MAX_LENGTH, "thinking": False}
    options["seconds"] = seconds
    try:
        return preview_of(rows, counts, **options), ""
    except FlashError as error:
        return preview_of(rows, counts), f"{card.name} cannot learn it: {error.what}"


def folder_of(card: ModelCard) -> Path | None:
    """The model's folder on this machine, if its tokenizer is there."""
    folders = [models_dir() / name for name in (card.address, card.name)]
    return next((path for path in folders if (path / "tokenizer_config.json").is_file()), None)


def _rendered(
    rows: Sequence[Json],
    card: ModelCard,
    max_length: int,
    thinking: bool,
    seconds: float = PREVIEW_S,
) -> tuple[Preview | None, str]:
    """The rows by the model's own template and tokens, if its files lie here and can be read in
    time, and else why not. FlashError as the run would raise it."""
    folder = folder_of(card)
    if folder is None:
        return None, f"the files of {card.name} are not on this machine yet"
    job: Json = {"model": str(folder), "thinking": thinking, "max_length": max_length}
    text = json.dumps(job | {"seconds": seconds, "rows": list(rows)})
    command = [*PYTHON, "worker.preview"]
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=PREVIEW_LIMIT_S, check=True
        )
        made = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return None, f"rendering took longer than {PREVIEW_LIMIT_S:g} s"
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        log.warning("the preview failed: %.2000s", getattr(error, "stderr", error))
        return None, f"{card.name} could not be read here"
    if "error" in made:
        raise FlashError.from_dict(made["error"])
    by = f"{card.name}'s chat template and tokens"
    share = made["measured"] / made["rows"]
    if made["measured"] < made["rows"]:
        by += f", of {made['measured']} rows: the shortest, the longest and others at random"
    for name in ("cut", "left_out"):
        made[name] = round(made[name] / share) or None
    for name in ("typical", "shortest", "longest"):
        made[name] = shorten(made[name], 2 * SHOWN_CHARACTERS)
    del made["measured"]
    return Preview(by=by, **made), ""


def _estimated(rows: Sequence[Json], max_length: int | None, why: str) -> Preview:
    order = sorted(rows, key=tokens_about)
    sizes = list(map(tokens_about, order))
    p95 = sizes[int(0.95 * len(sizes))]
    cut = None
    if max_length:
        cut = sum(size > max_length for size in sizes) or None
    return Preview(
        rows=len(order),
        by=f"estimated from characters ({why}): the template puts its own marks around messages",
        tokens_about={"median": round(median(sizes)), "p95": p95, "longest": sizes[-1]},
        cut=cut,
        typical=_shown(order[len(order) // 2]),
        shortest=_shown(order[0]),
        longest=_shown(order[-1]),
    )


def tokens_about(row: Json) -> int:
    """Of a line of a dataset, from its characters."""
    characters = sum(len(_said(message)) for message in row["messages"])
    if row.get("tools"):
        characters += len(json.dumps(row["tools"]))
    return round(characters / CHARACTERS_PER_TOKEN)


def _said(message: Json) -> str:
    """The text of a message, after its thought."""
    thought = next((message[name] for name in THOUGHTS if message.get(name)), None)
    return text_of(message) if thought is None else f"<think>{thought}</think> {text_of(message)}"


def _shown(row: Json) -> str:
    lines: list[str] = []
    room = SHOWN_CHARACTERS // len(row["messages"]) + 40
    for place, message in enumerate(row["messages"]):
        text = shorten(_said(message), room)
        learnt = message["role"] == "assistant" and place >= row["prompt_messages"]
        is_learnt = learnt and message.get("weight") != 0
        if is_learnt:
            text = f"[[{text}]]"
        lines.append(f"{message['role']}: {text}")
    return shorten("\n".join(lines), 2 * SHOWN_CHARACTERS)

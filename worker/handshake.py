"""Whether the engine computes what the trainer's model does, tried before the first step.

The engine gets the policy and samples some tokens; transformers' own eager forward pass says how
likely these are. The same is done with noise in the adapter, since an adapter that does nothing yet
would hide that it never arrived."""

from __future__ import annotations

import gc
import hashlib
import importlib.metadata
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.paths import write_private
from worker.adapter import ADAPTER, with_noise
from worker.engine.vllm import Sync, VllmEngine
from worker.model_files import ModelFiles
from worker.rollouts.turns import Sampling
from worker.training.packing import at_rest, eagerly
from worker.training.routing import give_experts

log = logging.getLogger("worker")
TOKENS = 16
SEQUENCES = 4
PROMPT_TOKENS = 48
LONGEST_PROMPT = 1536
"""Of a model with a sliding window, whose prompt is longer than that."""
LIMITS = {torch.float32: 3e-4, torch.bfloat16: 0.1}
"""Nats by which log-probabilities of equal models differ on average, by rounding."""
BASE_FACTOR = 3
"""How many times LIMITS the model without noise may differ; with noise, so many times that."""
EFFECT = (0.4, 1.5)
"""Nats by which noise in the adapter should change log-probabilities, and no more: a model that is
far from what it learned rounds differently."""
TEXT = "{n} plus {n} is {double}, and twice {double} is more than {n}. "


TROUBLE_CHARACTERS = 300
RECORDS_S = 90 * 86_400.0
"""A record of another version or model is kept so long."""
PACKAGES = ("torch", "transformers", "peft", "numpy")
PROCESSOR = ("model", "vendor", "stepping", "microcode", "flags")
NUMERIC = re.compile(
    "VLLM_(?!DIST_IDENT)|TORCH(?!INDUCTOR_CACHE_DIR)|PYTORCH|OMP_|MKL|DNNL|ONEDNN|ATEN|CUDA|NVIDIA|"
    "FLASH_SYNC"
)
"""Variables that may change how something is computed, but for those of each process alone."""


@dataclass(frozen=True)
class Agreed:
    """Mean absolute differences of log-probabilities in nats: those of engine and trainer with the
    policy as it is, those with noise in its adapter, and what the noise changed."""

    base: float
    noisy: float
    effect: float
    limit: float

    @property
    def holds(self) -> bool:
        return self.is_same_model and self.noisy <= max(self.limit, BASE_FACTOR * self.base)

    @property
    def is_same_model(self) -> bool:
        """Whether they agree without noise. Also false for what is no number."""
        return self.base <= BASE_FACTOR * self.limit

    def __str__(self) -> str:
        return (
            f"log-probabilities differ by {self.base:.2g} nats, with noise in the adapter by "
            f"{self.noisy:.2g} (the noise itself changes them by {self.effect:.2g})"
        )


def shake(engine: VllmEngine, policy: PeftModel, base: ModelFiles, max_length: int) -> Agreed:
    """Compare the two. Afterwards the engine has a policy with noise; `policy` is as it was.

    Raises what the engine raises where it cannot take the policy."""
    prompt = _prompt(base, max_length)
    with at_rest(policy), eagerly(policy.get_base_model()):
        engine.load_policy(policy)
        quiet = _difference(engine, policy, prompt)
        with _noise(policy) as scaled:
            effect = _scale_noise(policy, prompt, scaled)
            engine.load_policy(policy)
            noisy = _difference(engine, policy, prompt)
    return Agreed(quiet, noisy, effect, _limit(policy))


def differing_layers(
    engine: VllmEngine, policy: PeftModel, base: ModelFiles, max_length: int
) -> list[str]:
    """The kinds of layers, such as q_proj, whose adapters the engine takes wrongly."""
    prompt = _prompt(base, max_length)
    leaves = {name.rpartition(".")[2] for name, _ in _adapted(policy)}
    limit = _limit(policy)
    wrong: list[str] = []
    with at_rest(policy), eagerly(policy.get_base_model()):
        for leaf in sorted(leaves):
            with _noise(policy, leaf) as scaled:
                effect = _scale_noise(policy, prompt, scaled)
                engine.load_policy(policy)
                if effect > limit and _difference(engine, policy, prompt) > limit:
                    wrong.append(leaf)
    return wrong


def _limit(policy: PeftModel) -> float:
    """The difference that rounding explains. A trainer's weights in four bits differ from the
    engine's, which are whole, by at least as much as bf16 does."""
    is_four_bit = getattr(policy.get_base_model(), "is_loaded_in_4bit", False)
    dtype = torch.bfloat16 if is_four_bit else policy.dtype
    return LIMITS.get(dtype, LIMITS[torch.bfloat16])


def _prompt(base: ModelFiles, max_length: int) -> list[int]:
    """Tokens of plain text, more than fit into a sliding window."""
    window: int = getattr(base.text, "sliding_window", None) or 0
    length = PROMPT_TOKENS + window if window < LONGEST_PROMPT else PROMPT_TOKENS
    length = max(1, min(length, max_length - TOKENS))
    written = "".join(TEXT.format(n=n, double=2 * n) for n in range(length // 8 + 8))
    return list(base.tokenizer.encode(written, add_special_tokens=False))[:length]


def settle_routing(
    engine: VllmEngine,
    policy: PeftModel,
    base: ModelFiles,
    max_length: int,
    report: Callable[[str, str], None],
) -> None:
    """Keep the engine returning experts if the trainer, which repeats them, then differs from it no
    more than with its own. `report` gets an event."""
    trouble = engine.experts_trouble
    if not trouble:
        prompt = _prompt(base, max_length)
        with at_rest(policy), eagerly(policy.get_base_model()):
            engine.load_policy(policy)
            repeated = _difference(engine, policy, prompt, repeats=True)
            own = _difference(engine, policy, prompt)
        differ = f"log-probabilities differ by {repeated:.2g} nats"
        trouble = f"{differ}, with the trainer's own choice by {own:.2g}"
        if repeated <= max(own, LIMITS[torch.float32]):
            report("routing", f"training repeats the engine's choice of experts: {trouble}")
            return
        engine.returns_experts = False
    report("routing", f"training does not repeat the engine's choice of experts: {trouble}")


def _difference(
    engine: VllmEngine, policy: PeftModel, prompt: Sequence[int], *, repeats: bool = False
) -> float:
    """The mean difference of both log-probabilities, of tokens that the engine samples now."""
    for seed in range(SEQUENCES):
        engine.submit(f"handshake-{seed}", prompt, Sampling(TOKENS, seed=seed))
    differences: list[Tensor] = []
    while engine.unfinished():
        for _, completion in engine.step():
            if repeats:
                give_experts(policy.get_base_model(), torch.as_tensor(completion.experts))
            expected_T = _logps(policy, prompt, completion.token_ids)
            differences.append((expected_T - torch.tensor(completion.logprobs)).abs())
    give_experts(policy.get_base_model(), None)
    return torch.cat(differences).mean().item()


def _logps(policy: PeftModel, prompt: Sequence[int], token_ids: Sequence[int]) -> Tensor:
    """(T,): log-probabilities of `token_ids` after the prompt by transformers' forward pass."""
    model = cast(Any, policy)
    ids = torch.tensor([[*prompt, *token_ids]], device=model.device)
    half = model.dtype == torch.bfloat16
    with torch.autocast(model.device.type, torch.bfloat16, enabled=half):
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    logps_LV = logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    return logps_LV.gather(1, ids[0, len(prompt) :, None]).squeeze(1).cpu()


def _adapted(policy: PeftModel) -> list[tuple[str, Any]]:
    modules = cast(Any, policy).named_modules()
    return [(name, module) for name, module in modules if isinstance(module, LoraLayer)]


@contextmanager
def _noise(policy: PeftModel, leaf: str = "") -> Generator[list[tuple[Tensor, Tensor]]]:
    """Within it, the adapters of all layers, or of those named `leaf`, are (weight, noise) pairs
    whose weights the caller sets."""
    pairs: list[tuple[Tensor, Tensor]] = []
    before: list[Tensor] = []
    generator = torch.Generator().manual_seed(0)
    for name, layer in _adapted(policy):
        b_OR: Tensor = layer.lora_B[ADAPTER].weight
        if leaf in ("", name.rpartition(".")[2]):
            noise_OR = torch.randn(b_OR.shape, generator=generator).to(b_OR.device)
            noise_OR /= layer.scaling[ADAPTER] * b_OR.size(1) ** 0.5
            pairs.append((b_OR, noise_OR))
            before.append(b_OR.clone())
    try:
        yield pairs
    finally:
        for (b_OR, _), old_OR in zip(pairs, before, strict=True):
            b_OR.copy_(old_OR)


def _scale_noise(
    policy: PeftModel, prompt: Sequence[int], pairs: Sequence[tuple[Tensor, Tensor]]
) -> float:
    """Set the weights to noise that changes the prompt's log-probabilities by about EFFECT; by how
    much it does."""
    first, *rest = prompt
    before_T = _logps(policy, [first], rest)
    scale = 0.25
    effect = 0.0
    for _ in range(8):
        for b_OR, noise_OR in pairs:
            b_OR.copy_(scale * noise_OR)
        effect = (_logps(policy, [first], rest) - before_T).abs().mean().item()
        if effect > EFFECT[1]:
            scale /= 2
        elif effect < EFFECT[0]:
            scale *= 2
        else:
            break
    return effect


def agreeing_engine(
    start: Callable[[Sync], VllmEngine],
    ways: Sequence[Sync],
    policy: PeftModel,
    base: ModelFiles,
    max_length: int,
    report: Callable[[str, str], None],
    record_for: Callable[[Sync], Path | None] = lambda way: None,
) -> VllmEngine:
    """An engine that agrees with the trainer, started with the first way of a sync that works.
    `report` gets the kind and the text of events. A way with a record is not tried again.

    FlashError(model_unsupported) if none does."""
    troubles: list[str] = []
    for way in ways:
        record = record_for(way)  # before the engine sets variables of its own
        engine = start(way)
        if record and record.is_file():
            when = time.strftime("%Y-%m-%d", time.localtime(record.stat().st_mtime))
            words = record.read_text(errors="replace")
            report("handshake", f"{words}; measured on {when}, and all that decides it is the same")
            return engine
        try:
            agreement = shake(engine, policy, base, max_length)
        except Exception as error:  # whatever vLLM raises about weights that it does not expect
            log.info("sync=%s", way, exc_info=True)
            troubles.append(f"sync={way}: {type(error).__name__}: {error}"[:TROUBLE_CHARACTERS])
        else:
            if agreement.holds:
                words = f"engine and trainer agree, sync={way}: {agreement}"
                report("handshake", words)
                if record:
                    with suppress(OSError):  # a full disk: it is measured again
                        record.parent.mkdir(parents=True, exist_ok=True)
                        write_private(record, words)
                        for other in record.parent.iterdir():
                            if time.time() - other.stat().st_mtime > RECORDS_S:
                                other.unlink(missing_ok=True)
                if troubles:
                    report("warning", f"the engine gets the policy in another way: {troubles[0]}")
                return engine
            trouble = f"sync={way}: {agreement}"
            if agreement.is_same_model:
                layers = differing_layers(engine, policy, base, max_length)
                trouble += f"; adapters of {', '.join(layers) or 'several layers together'} differ"
            troubles.append(trouble)
        engine.close()
        del engine
        gc.collect()
    what = f"vLLM and transformers compute this model differently: {'; '.join(troubles)}"
    fix = "use a model of another architecture; docs/models.md lists those that were tried"
    raise FlashError("model_unsupported", what, fix=fix)


def record_of(
    folder: Path, base: ModelFiles, policy: PeftModel, max_length: int, way: Sync
) -> Path | None:
    """The file in `folder` that says how they agreed, named by all that decides it: the model's
    files, the adapted layers, packages and our code, the machine, and variables. None for an
    adapter that has learned something, which is always tried."""
    import vllm  # noqa: PLC0415  SFT may do without it

    layers: list[object] = []
    for name, layer in _adapted(policy):
        b_OR: Tensor = layer.lora_B[ADAPTER].weight
        if b_OR.any():
            return None
        layers.append((name, tuple(b_OR.shape), layer.scaling[ADAPTER]))
    # Any change of a file's content changes one of its numbers.
    states: list[object] = []
    for path in sorted([*base.path.iterdir(), *Path(__file__).parent.rglob("*.py")]):
        stat = path.stat()
        states.append((str(path), stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns))
    processor = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    decides = {
        "way": way,
        "length": max_length,
        "numbers": [str(policy.dtype), _limit(policy)],
        "layers": layers,
        "files": states,
        "packages": [importlib.metadata.version(package) for package in PACKAGES],
        "vllm": vllm.__version__,
        "machine": [line for line in processor if line.startswith(PROCESSOR)],
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "variables": sorted(pair for pair in os.environ.items() if NUMERIC.match(pair[0])),
    }
    digest = hashlib.sha256(json.dumps(decides, default=str).encode()).hexdigest()
    return folder / digest[:32]


def check_effect(engine: VllmEngine, adapter: Path, tokenizer: Any) -> None:
    """Try a copy of an adapter that no trainer holds, with noise in place of what it learned. The
    caller loads the adapter itself afterwards.

    FlashError(model_unsupported) if the noise changes nothing."""
    prompt = list(tokenizer.encode(TEXT.format(n=7, double=14), add_special_tokens=False))
    engine.unload_adapter()
    before = _sampled(engine, prompt)
    with tempfile.TemporaryDirectory() as folder:
        engine.load_adapter(with_noise(adapter, Path(folder)))
    if _sampled(engine, prompt) == before:
        what = "the engine loads the adapter without effect: it recognizes none of its layers"
        fix = "use an adapter that was made for this base model"
        raise FlashError("model_unsupported", what, fix=fix)


def _sampled(engine: VllmEngine, prompt: Sequence[int]) -> list[tuple[int, float]]:
    engine.submit("handshake", prompt[-PROMPT_TOKENS:], Sampling(TOKENS, temperature=0.0))
    sampled: list[tuple[int, float]] = []
    while engine.unfinished():
        for _, completion in engine.step():
            sampled += zip(completion.token_ids, completion.logprobs, strict=True)
    return sampled

"""Becomes vLLM's OpenAI server of one base model, whose adapters come and go at run time.

    python -m worker.engine.serve --model NAME --port PORT --max-lora-rank RANK [--tls FOLDER]

The environment has two keys: VLLM_API_KEY for users, and FLASH_ADMIN_KEY for the supervisor, which
loads and unloads adapters (see worker/engine/front.py). Fetches the model if it is missing, chooses
settings that fit the machine, and replaces itself by `worker.engine.openai_server` in the
same process. A failure before that is a FlashError, written as JSON to stderr."""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import psutil

from environments.settings import state_directory
from flash_mcp.protocol import device_locks
from flash_mcp.protocol.base_models import chat_template_of, find, tool_form, with_tools
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.packages import engine_missing
from flash_mcp.protocol.spec import Precision
from worker.engine.fetch import ensure
from worker.engine.text_models import CPU_LORA_WORKER, PROMPT_THREADS, UTILIZATION, room_for_rank
from worker.model_files import ModelFiles
from worker.process import CARDS, COMPUTES_IN, MODEL_FOLDER, spin_shortly

log = logging.getLogger(__name__)
MAX_LENGTH = 8192
SEQUENCES = 8
"""On the CPU the cache has room for so many conversations of full length."""
MOST_SEQUENCES = 256
SHORTER = 4
"""Conversations are taken to have 1/SHORTER of their full length: those that get longer wait for
others to end."""
WEIGHTS_SHARE = 0.85
"""Of the free memory of a card that weights may take; the rest is for the cache and the process."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a catalog name, a hub id or a local folder")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-lora-rank", type=int, default=64)
    precision = "default: bfloat16 on a GPU, on a CPU what decodes faster"
    parser.add_argument("--precision", choices=get_args(Precision), help=precision)
    parser.add_argument("--name", help="what requests call the base model; default: its own name")
    tls = "serve all addresses of this machine, with the key.pem and certificate.pem in this folder"
    parser.add_argument("--tls", type=Path, help=tls)
    args = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    try:
        if importlib.util.find_spec("vllm") is None:
            raise engine_missing("there is no vllm")
        import torch  # noqa: PLC0415  after the check that the packages are installed

        model = ensure(args.model, has_gpu=torch.cuda.is_available())
        more = {"served-model-name": args.name} if args.name else {}
        if args.tls:
            more |= {"host": "0.0.0.0", "ssl-keyfile": args.tls / "key.pem"}
            more["ssl-certfile"] = args.tls / "certificate.pem"
        command = server_command(
            args.model, model, args.port, args.max_lora_rank, more, args.precision
        )
    except FlashError as error:
        sys.exit(json.dumps(error.to_dict(), default=str))
    os.execv(sys.executable, [sys.executable, *command])


def server_command(
    name: str,
    model: Path,
    port: int,
    lora_rank: int,
    more: Mapping[str, Any] | None = None,
    precision: str | None = None,
) -> list[str]:
    """The arguments of the interpreter; `more` are options of vLLM's in place of ours. Sets the
    environment variables that vLLM reads.
    """
    import torch  # noqa: PLC0415  after the check that the packages are installed

    from worker.capacity import capacity_bytes, engine_cache_bytes, kv_cache_bytes  # noqa: PLC0415
    from worker.precision import precision_of  # noqa: PLC0415

    base = ModelFiles(model)
    length = min(getattr(base.text, "max_position_embeddings", MAX_LENGTH), MAX_LENGTH)
    options: dict[str, Any] = {
        "model": model,
        "served-model-name": find(name).name,
        "host": "127.0.0.1",
        "port": port,
        "max-model-len": length,
        "max-lora-rank": room_for_rank(lora_rank),
        "max-loras": 2,
        "max-cpu-loras": 16,
        # Not the model's own: by default, sample as training and evaluation do.
        "generation-config": "vllm",
        "middleware": "worker.engine.front.Front",
        "worker-extension-cls": "worker.process.PortClosing",
    }
    for name in ("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_NO_USAGE_STATS", "HF_HUB_OFFLINE"):
        os.environ[name] = "1"
    os.environ[MODEL_FOLDER] = str(model)
    # `precision` if an earlier attempt of the run has chosen it. On a GPU it is bf16 whatever the
    # files are: vLLM's kernels for adapters there take no fp32.
    capacity = 0
    if torch.cuda.is_available():
        precision = precision or "bfloat16"
    else:
        capacity = capacity_bytes()
    dtype = precision_of(base, capacity, precision, served=True).dtype
    # By default vLLM takes fp16 for a model whose files are fp16 or fp32.
    options["dtype"] = str(dtype).removeprefix("torch.")
    log.info("%s%s", COMPUTES_IN, options["dtype"])
    flags = ["--enable-lora", "--disable-uvicorn-access-log", "--disable-fastapi-docs"]
    if base.has_tower:
        flags.append("--language-model-only")
    cards = 1
    if torch.cuda.is_available():
        cards = use_cards(base.weights_bytes, state_directory())
        options["gpu-memory-utilization"] = UTILIZATION
    else:
        _set_for_cpu(flags, options)
    # Let calls of tools be read as in training. Without tools in a request, nothing is parsed
    template = chat_template_of(model)
    if form := tool_form(with_tools(template)):
        flags.append("--enable-auto-tool-choice")
        options["tool-call-parser"] = form.parser
    if with_tools(template) != template:
        options["chat-template"] = with_tools(template)
    # A bounded cache: a run may train on the same card, now or later.
    whole = MOST_SEQUENCES // SHORTER if torch.cuda.is_available() else SEQUENCES
    sizes = {"itemsize": dtype.itemsize, "shards": cards}
    cache = engine_cache_bytes(base, length, whole, **sizes)
    one = kv_cache_bytes(base, length // SHORTER, 1, 0, **sizes)
    at_once = max(SEQUENCES, min(cache // one, MOST_SEQUENCES))
    options |= {"kv-cache-memory-bytes": cache, "max-num-seqs": at_once}
    if cards > 1:
        base.check_shape(cards)
        options["tensor-parallel-size"] = cards
    command = ["-m", "worker.engine.openai_server", *flags]
    for name, value in {**options, **(more or {})}.items():
        command += [f"--{name}", str(value)]
    return command


def _set_for_cpu(flags: list[str], options: dict[str, Any]) -> None:
    """Set what a server without a card needs."""
    from worker.capacity import KV_BLOCK_TOKENS  # noqa: PLC0415

    flags.append("--enforce-eager")
    options["worker-cls"] = CPU_LORA_WORKER
    options["block-size"] = KV_BLOCK_TOKENS
    # In spite of the flag vLLM compiles its sampler, at the first answer that is sampled.
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    # Else vLLM computes in a process of its own, which imports vLLM once more.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # Unbound, and half of the cores: a run may train at the same time. While none does, prompts
    # take them all.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    cores = min(psutil.cpu_count(logical=False) or 2, len(os.sched_getaffinity(0)))
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(max(1, cores // 2))
        options["additional-config"] = json.dumps({PROMPT_THREADS: cores})
    spin_shortly()


def use_cards(weights: int, home: Path) -> int:
    """Take the emptiest card for this process and the server that it becomes, or where that cannot
    hold so many bytes of weights, 2, 4 or more of them; how many. Cards of other state directories
    are left out.

    FlashError(not_ready) if others use all cards."""
    import torch  # noqa: PLC0415

    cuda: Any = torch.cuda  # untyped
    free = [cuda.mem_get_info(card)[0] for card in range(cuda.device_count())]
    taken: dict[int, int | None] = {}
    trouble: FlashError | None = None
    for card in sorted(range(len(free)), key=lambda card: -free[card]):
        try:
            taken[card] = device_locks.take(f"GPU-{cuda.get_device_properties(card).uuid}", home)
        except FlashError as error:
            trouble = error
            continue
        count = len(taken)
        if count.bit_count() == 1 and weights <= count * WEIGHTS_SHARE * free[card]:
            break
    else:
        if not taken:
            assert trouble
            raise trouble
        # All together cannot hold it: vLLM says what is missing.
        for card in list(taken)[1:]:
            if (held := taken.pop(card)) is not None:
                os.close(held)
    for held in taken.values():
        if held is not None:
            os.set_inheritable(held, True)  # the server that this process becomes keeps it open
    names = os.environ.get(CARDS, ",".join(map(str, range(len(free))))).split(",")
    cuda.set_device([*taken][-1])  # the fullest: the cache has to fit there
    os.environ[CARDS] = ",".join(names[card] for card in taken)
    return len(taken)


if __name__ == "__main__":
    main()

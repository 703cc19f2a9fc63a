"""PyTorch's flash kernels on a card, against the masked computation."""

from __future__ import annotations

import pytest
import torch

from worker.training import attention
from worker.training.attention import Layout

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

CARD = torch.device("cuda", 0)


@pytest.mark.parametrize(("prompt", "completions"), [(256, [512] * 6), (40, [7, 90, 1]), (0, [64, 30])], ids=str)
@pytest.mark.parametrize("size", [64, 128])
def test_flash_attention_in_two_parts_is_no_further_off_fp32_than_the_masked_one(prompt, completions: list[int], size):
    generator = torch.Generator(CARD).manual_seed(0)
    total = prompt + sum(completions)

    def computed(dtype: torch.dtype, flash: bool) -> list[torch.Tensor]:
        layout = Layout(prompt, completions, dtype, CARD, flash=flash)
        leaves = [part[:, :, : total + layout.filler].to(dtype).requires_grad_() for part in inputs]
        out, _ = attention._attend(None, *leaves, layout.mask)
        (out[0, :total].float() * weight).sum().backward()
        return [out[0, :total].float(), *(leaf.grad.float() for leaf in leaves)]

    inputs = [
        torch.randn(1, heads, total + attention.BLOCK, size, generator=generator, device=CARD) for heads in (8, 2, 2)
    ]
    weight = torch.randn(total, 8, size, generator=generator, device=CARD)
    exact = computed(torch.float32, False)
    masked, in_parts = computed(torch.bfloat16, False), computed(torch.bfloat16, True)
    for true, theirs, ours in zip(exact, masked, in_parts, strict=True):
        assert (ours - true).norm() < 1.5 * (theirs - true).norm() + 1e-3 * true.norm()

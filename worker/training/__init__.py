"""The training step: GRPO, SFT, their kernels and memory."""

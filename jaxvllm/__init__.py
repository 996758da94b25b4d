"""LLM inference for NVIDIA GPUs in JAX, after the architecture of vLLM V1."""

"""Checkpoints: safetensors, GGUF, dummy weights; reading them into a model's parameters."""

"""Attention and KV-cache kernels: arrays in, arrays out."""

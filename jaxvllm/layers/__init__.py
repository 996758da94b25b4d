"""Layers: the pieces that models are built from."""

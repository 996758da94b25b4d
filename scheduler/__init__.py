"""Host-only scheduling: requests, blocks, steps and the padded plan of a step. Never imports JAX."""

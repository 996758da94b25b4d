"""The HTTP server: OpenAI's API as vLLM speaks it."""

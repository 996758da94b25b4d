"""`jaxvllm bench`: what a server (serve) or an engine (throughput, latency) gives under a load, in vLLM's words."""

"""`jaxvllm buckets`: step times measured by bucket, policies compared, sizes tuned to a trace."""

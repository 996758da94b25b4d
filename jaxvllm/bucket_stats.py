"""What steps cost beyond their tokens: how often each bucket ran, and how much of it was padding."""

from scheduler.buckets import BucketKey


class BucketStats:
    """Counts since the start."""

    def __init__(self) -> None:
        self._counts: dict[BucketKey, list[int]] = {}  # steps, tokens, requests

    def count(self, key: BucketKey, num_tokens: int, num_reqs: int) -> None:
        """One more step ran in a bucket, with so many real tokens and requests."""
        counts = self._counts.get(key)
        if counts is None:
            counts = self._counts[key] = [0, 0, 0]
        counts[0] += 1
        counts[1] += num_tokens
        counts[2] += num_reqs

    def metrics(self) -> dict[str, float]:
        """The counts under Prometheus's names; pads are what the bucket is larger than the step."""
        result = {}
        for key, (num_steps, num_tokens, num_reqs) in self._counts.items():
            labels = f'{{kind="{key.kind}",T="{key.T}",R="{key.R}"}}'
            result[f"steps_total{labels}"] = float(num_steps)
            result[f"step_tokens_total{labels}"] = float(num_tokens)
            result[f"step_padding_tokens_total{labels}"] = float(num_steps * key.T - num_tokens)
            result[f"step_padding_rows_total{labels}"] = float(num_steps * key.R - num_reqs)
        return result

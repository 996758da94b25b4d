"""Which bucket policy an engine uses: a strategy by name, a tuned file, or the device's default."""

from pathlib import Path

from scheduler.buckets import BucketPolicy, geometric, linear, load_policy, one_shape, powers_of_two
from scheduler.config import SchedulerConfig

STRATEGIES = ("geometric", "powers_of_two", "linear", "one_shape")
# See powers_of_two.
GPU_MIN_SIZES = {"min_decode_size": 8, "min_mixed_size": 256}


def choose_policy(choice: str | None, device: str, config: SchedulerConfig) -> BucketPolicy:
    """The policy that covers the scheduler's limits.

    Args:
      choice: one of STRATEGIES, the path of a file that `jaxvllm buckets tune` or BucketPolicy.save wrote, or None.
      device: "cpu" or "gpu".

    Raises:
      ValueError: the file cannot be read or does not cover the limits.
    """
    limits = (config.max_num_seqs, config.max_num_batched_tokens)
    smallest = GPU_MIN_SIZES if device == "gpu" else {}
    if choice == "geometric" or (choice is None and device == "gpu"):
        return geometric(*limits, **smallest)
    if choice is None or choice == "powers_of_two":  # on a CPU shapes compile at first use: the fewer the better
        return powers_of_two(*limits, **smallest)
    if choice == "linear":
        return linear(*limits)
    if choice == "one_shape":
        return one_shape(*limits)
    if not Path(choice).is_file():
        raise ValueError(f"bucket_policy={choice!r} must be one of {', '.join(STRATEGIES)}, or a JSON file.")
    return load_policy(choice).restricted(*limits)

"""T-tiny of the case list: a random Llama in float32 behind a ModelRunner."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxvllm.kv_cache import KVCacheSpec
from jaxvllm.layers.parameter import bind, param_specs
from jaxvllm.model_config import ModelConfig
from jaxvllm.model_runner import ModelRunner, RunnerConfig
from jaxvllm.models.registry import get_model_class
from scheduler.batch import BatchLimits
from scheduler.buckets import BucketPolicy
from tests.tiny_config import T_TINY

CONFIG = ModelConfig.from_hf(T_TINY)


def make_runner(limits: BatchLimits, policy: BucketPolicy, num_blocks: int, **options) -> ModelRunner:
    rng = np.random.default_rng(0)
    model = get_model_class(CONFIG.architecture)(CONFIG)

    def draw(spec) -> jax.Array:
        values = np.ones(spec.shape) if spec.init == "ones" else rng.normal(0, 0.08, spec.shape)
        return jnp.asarray(values, jnp.float32)

    params = {name: draw(spec) for name, spec in param_specs(model).items()}
    spec = KVCacheSpec.of_model(CONFIG, limits.block_size)
    runner = ModelRunner(
        lambda traced: bind(model, traced),
        params,
        RunnerConfig(limits, policy, spec, CONFIG.num_heads, CONFIG.vocab_size, **options),
    )
    runner.initialize_kv_cache(num_blocks)
    return runner

"""Run as a program on 2 CPU devices: the logits of a tiny Llama on a mesh of 2, compared with those on one device."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxvllm.layers.parameter import param_specs
from jaxvllm.model_config import ModelConfig
from jaxvllm.models.registry import get_model_class
from jaxvllm.rope_config import RopeConfig
from tests.parity.paged_driver import PagedDriver


def main() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        hidden_size=42,
        intermediate_size=58,
        num_layers=3,
        num_heads=12,
        num_kv_heads=4,
        head_dim=10,
        vocab_size=134,
        rope=RopeConfig(),
    )
    model = get_model_class(config.architecture)(config)
    rng = np.random.default_rng(21)
    specs = param_specs(model)
    weights = {name: rng.standard_normal(spec.shape, np.float32) * 0.2 for name, spec in specs.items()}
    split = {name: jax.device_put(weights[name], spec.sharding(mesh)) for name, spec in specs.items()}
    qkv = split["layers.self_attn.qkv_proj.weight"]
    assert qkv.sharding.spec == PartitionSpec(None, None, "tp", None, None), qkv.sharding
    assert qkv.addressable_shards[0].data.shape[2] == 2
    assert split["lm_head.weight"].addressable_shards[0].data.shape == (67, 42)
    assert split["layers.mlp.down_proj.weight"].addressable_shards[0].data.shape == (3, 29, 42)

    over_heads = NamedSharding(mesh, PartitionSpec(None, None, None, "tp"))
    one = PagedDriver(model, config, jax.device_put(weights, jax.devices()[0]))
    two = PagedDriver(model, config, split, put_cache=lambda cache: jax.device_put(cache, over_heads))
    prompt, other = rng.integers(0, 131, (2, 29)).tolist()
    logits = []
    for driver in (one, two):
        first, second = driver.add(prompt), driver.add(other)
        parts = [driver.step([(first, 20)])[0]]
        for rows in ([(first, 1), (second, 23)], *[[(first, 1), (second, 1)]] * 3):
            parts += driver.step(rows)
        logits.append(np.concatenate(parts))
    text = two.compiled_text
    assert text.count(" all-reduce(") == 3, "embedding; in the body of the layer loop attention and MLP"
    assert "all-gather" not in text and "all-to-all" not in text, "nothing of the cache moves between devices"
    assert np.isfinite(logits[0]).all()
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-5, rtol=1e-5)
    assert two.kv_cache.sharding.is_equivalent_to(over_heads, 6), two.kv_cache.sharding
    print("equal")


if __name__ == "__main__":
    main()

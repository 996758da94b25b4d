"""Run as a program on 2 CPU devices: the logits of tiny Llamas on a mesh of 2, compared with those on one device."""

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxvllm.layers.parameter import param_specs
from jaxvllm.model_config import ModelConfig
from jaxvllm.models.registry import get_model_class
from jaxvllm.parallel import kv_cache_sharding, make_mesh
from jaxvllm.rope_config import RopeConfig
from tests.parity.paged_driver import PagedDriver

SIZES = {"hidden_size": 42, "intermediate_size": 58, "num_layers": 3, "head_dim": 10, "vocab_size": 134}
BIASES = {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True}


def compare(mesh: Mesh, num_decodes: int = 3, **changes) -> tuple[PagedDriver, dict[str, jax.Array]]:
    """Run the same steps on one device and on the mesh; gives the driver and the weights of the mesh."""
    config = ModelConfig(architecture="LlamaForCausalLM", rope=RopeConfig(), **SIZES, **changes)
    model = get_model_class(config.architecture)(config)
    rng = np.random.default_rng(21)
    specs = param_specs(model)
    weights = {name: rng.standard_normal(spec.shape, np.float32) * 0.2 for name, spec in specs.items()}
    split = {name: jax.device_put(weights[name], spec.sharding(mesh)) for name, spec in specs.items()}
    placement = kv_cache_sharding(mesh, config.num_kv_heads)
    one = PagedDriver(model, config, jax.device_put(weights, jax.devices()[0]))
    two = PagedDriver(model, config, split, put_cache=lambda cache: jax.device_put(cache, placement))
    prompt, other = rng.integers(0, 131, (2, 29)).tolist()
    logits = []
    for driver in (one, two):
        first, second = driver.add(prompt), driver.add(other)
        parts = [driver.step([(first, 20)])[0]]
        for rows in ([(first, 1), (second, 23)], *[[(first, 1), (second, 1)]] * num_decodes):
            parts += driver.step(rows)
        logits.append(np.concatenate(parts))
    assert np.isfinite(logits[0]).all()
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-5, rtol=1e-5)
    assert two.kv_cache.sharding.is_equivalent_to(placement, 6), two.kv_cache.sharding
    return two, split


def main() -> None:
    mesh = make_mesh(jax.devices(), 2)
    two, split = compare(mesh, num_heads=12, num_kv_heads=4, **BIASES)
    qkv = split["layers.self_attn.qkv_proj.weight"]
    assert qkv.sharding.spec == PartitionSpec(None, "tp", None, None, None), qkv.sharding
    assert qkv.addressable_shards[0].data.shape[1] == 2
    assert split["layers.self_attn.qkv_proj.bias"].addressable_shards[0].data.shape == (3, 2, 5, 10)
    assert split["layers.self_attn.o_proj.bias"].sharding.is_fully_replicated
    assert split["lm_head.weight"].addressable_shards[0].data.shape == (67, 42)
    assert split["layers.mlp.down_proj.weight"].addressable_shards[0].data.shape == (3, 42, 29)
    assert two.kv_cache.addressable_shards[0].data.shape[3] == 2
    text = two.compiled_text
    assert text.count(" all-reduce(") == 3, "embedding; in the body of the layer loop attention and MLP"
    assert "all-gather" not in text and "all-to-all" not in text, "nothing of the cache moves between devices"

    # Kv heads that do not divide stay whole; the query heads of the output projection are split all the same.
    two, split = compare(mesh, num_decodes=0, num_heads=6, num_kv_heads=3)
    assert split["layers.self_attn.o_proj.weight"].addressable_shards[0].data.shape[2] == 3
    assert two.kv_cache.sharding.is_fully_replicated
    print("equal")


if __name__ == "__main__":
    main()

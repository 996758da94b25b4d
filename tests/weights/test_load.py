"""load_params: stacking, merging, each tensor once, and errors that name what does not fit."""

from dataclasses import dataclass, field
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxvllm.layers.parameter import CheckpointTensor, ParamSpec
from jaxvllm.weights.checkpoint import TensorInfo
from jaxvllm.weights.load import load_params

D, F, V, L = 6, 10, 13, 12
F32 = np.dtype(np.float32)


@dataclass
class DictCheckpoint:
    arrays: dict[str, np.ndarray]
    path: Path = Path("some/model.safetensors")
    reads: list[str] = field(default_factory=list)

    def tensors(self) -> dict[str, TensorInfo]:
        return {name: TensorInfo(a.shape, a.dtype) for name, a in self.arrays.items()}

    def read(self, name: str) -> np.ndarray:
        self.reads.append(name)
        return self.arrays[name]


def tied_specs() -> dict[str, ParamSpec]:
    def transpose(x: np.ndarray) -> np.ndarray:
        return x.T

    embed = CheckpointTensor("model.embed_tokens.weight", (V, D))
    gate = CheckpointTensor("model.layers.{layer}.mlp.gate_proj.weight", (F, D), np.s_[:, 0], transpose)
    up = CheckpointTensor("model.layers.{layer}.mlp.up_proj.weight", (F, D), np.s_[:, 1], transpose)
    return {
        "embed": ParamSpec((V, D), F32, ("vocab", None), (embed,)),
        "gate_up": ParamSpec((D, 2, F), F32, (None, None, "ffn"), (gate, up)).stacked(L),
    }


def untied_specs() -> dict[str, ParamSpec]:
    head = ParamSpec((V, D), F32, ("vocab", None), (CheckpointTensor("lm_head.weight", (V, D)),))
    return {**tied_specs(), "lm_head": head}


def stored(*, head: bool = False) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    names = {"model.embed_tokens.weight": (V, D)} | ({"lm_head.weight": (V, D)} if head else {})
    for i in range(L):
        names |= {f"model.layers.{i}.mlp.{part}_proj.weight": (F, D) for part in ("gate", "up")}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in names.items()}


def test_layers_are_stacked_in_number_order_and_parts_merged_as_declared():
    arrays = stored()
    params = load_params(tied_specs(), DictCheckpoint(arrays))
    assert params["gate_up"].shape == (L, D, 2, F)
    for i in range(L):
        for j, part in enumerate(("gate", "up")):
            expected = arrays[f"model.layers.{i}.mlp.{part}_proj.weight"].T
            np.testing.assert_array_equal(params["gate_up"][i, :, j], expected)


def test_each_tensor_is_read_once_even_if_it_fills_several_parts():
    def half(i: int) -> CheckpointTensor:
        return CheckpointTensor(
            "model.layers.{layer}.mlp.gate_up_proj.weight", (2 * F, D), np.s_[:, i], lambda x: x[i * F : (i + 1) * F].T
        )

    spec = ParamSpec((D, 2, F), F32, (None, None, "ffn"), (half(0), half(1))).stacked(L)
    names = [f"model.layers.{i}.mlp.gate_up_proj.weight" for i in range(L)]
    arrays = {name: np.full((2 * F, D), i, np.float32) for i, name in enumerate(names)}
    checkpoint = DictCheckpoint(arrays)
    params = load_params({"gate_up": spec}, checkpoint)
    assert sorted(checkpoint.reads) == sorted(names)
    np.testing.assert_array_equal(params["gate_up"][:, 0, 0, 0], np.arange(L))


def test_dtype_is_the_declared_one_unless_given_and_bfloat16_rounds_to_nearest():
    arrays = stored()
    assert load_params(tied_specs(), DictCheckpoint(arrays))["embed"].dtype == np.float32
    params = load_params(tied_specs(), DictCheckpoint(arrays), dtype=np.dtype(ml_dtypes.bfloat16))
    expected = arrays["model.embed_tokens.weight"].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(params["embed"]), expected)


def test_put_gets_one_finished_parameter_at_a_time_with_its_declaration():
    seen = []

    def put(array: np.ndarray, spec: ParamSpec) -> jax.Array:
        seen.append((array.shape, spec.axes))
        return jax.device_put(array)

    load_params(tied_specs(), DictCheckpoint(stored()), put=put)
    assert seen == [((V, D), ("vocab", None)), ((L, D, 2, F), (None, None, None, "ffn"))]


def test_tied_model_ignores_a_stored_head():
    arrays = stored(head=True)
    params = load_params(tied_specs(), DictCheckpoint(arrays))
    assert set(params) == {"embed", "gate_up"}
    np.testing.assert_array_equal(params["embed"], arrays["model.embed_tokens.weight"])


def test_tied_model_with_only_the_head_stored_embeds_with_it():
    arrays = stored(head=True)
    del arrays["model.embed_tokens.weight"]
    np.testing.assert_array_equal(load_params(tied_specs(), DictCheckpoint(arrays))["embed"], arrays["lm_head.weight"])


def test_untied_model_uses_its_head():
    arrays = stored(head=True)
    params = load_params(untied_specs(), DictCheckpoint(arrays))
    np.testing.assert_array_equal(params["lm_head"], arrays["lm_head.weight"])
    assert not np.array_equal(params["lm_head"], params["embed"])


def test_untied_model_without_a_head_is_an_error_that_says_how_to_tie():
    with pytest.raises(ValueError, match=r"missing: lm_head\.weight.*tie_word_embeddings"):
        load_params(untied_specs(), DictCheckpoint(stored()))


def test_untied_model_with_only_the_head_does_not_embed_with_it():
    arrays = stored(head=True)
    del arrays["model.embed_tokens.weight"]
    with pytest.raises(ValueError, match=r"missing: model\.embed_tokens\.weight"):
        load_params(untied_specs(), DictCheckpoint(arrays))


def test_names_without_the_models_prefix_are_found():
    arrays = {name.removeprefix("model."): value for name, value in stored().items()}
    params = load_params(tied_specs(), DictCheckpoint(arrays))
    np.testing.assert_array_equal(params["embed"], arrays["embed_tokens.weight"])


def test_missing_extra_and_misshaped_tensors_are_all_named_and_nothing_is_read():
    arrays = stored()
    del arrays["model.layers.7.mlp.up_proj.weight"]
    arrays["model.layers.3.mlp.gate_proj.weight"] = np.zeros((F, D + 1), np.float32)
    arrays["model.layers.0.self_attn.q_proj.bias"] = np.zeros(D, np.float32)
    checkpoint = DictCheckpoint(arrays)
    with pytest.raises(ValueError) as error:
        load_params(tied_specs(), checkpoint)
    message = str(error.value)
    assert "some/model.safetensors" in message
    assert "missing: model.layers.7.mlp.up_proj.weight" in message
    assert f"model.layers.3.mlp.gate_proj.weight is [{F}, {D + 1}], expected [{F}, {D}]" in message
    assert "not part of this model: model.layers.0.self_attn.q_proj.bias" in message
    assert checkpoint.reads == []


def test_one_layer_too_many_in_the_checkpoint_is_an_error():
    arrays = stored() | {f"model.layers.{L}.mlp.{part}_proj.weight": np.zeros((F, D)) for part in ("gate", "up")}
    with pytest.raises(ValueError, match=rf"not part of this model: model\.layers\.{L}\.mlp\.gate_proj\.weight"):
        load_params(tied_specs(), DictCheckpoint(arrays))


def test_rotary_tables_of_old_exporters_are_ignored():
    arrays = stored() | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(3, np.float32)}
    load_params(tied_specs(), DictCheckpoint(arrays))


@pytest.mark.parametrize("index", [np.s_[:, :1], np.s_[:2]])
def test_declaration_that_does_not_cover_its_parameter_is_an_error_not_garbage(index):
    spec = ParamSpec((4, 2), F32, (None, None), (CheckpointTensor("w", (4, 1), index, lambda x: x),))
    with pytest.raises(ValueError, match="w"):
        load_params({"p": spec}, DictCheckpoint({"w": np.ones((4, 1), np.float32)}))

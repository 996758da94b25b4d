"""Grammar masks on the device: a masked row draws allowed tokens alone, the others are as without grammars."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.compile_cache import SamplingProgram
from jaxvllm.sampling import mask_grammar
from scheduler.batch import BatchLimits
from scheduler.buckets import explicit
from scheduler.mask_plan import SMALL_CALL, MaskPlan, masks_per_call
from scheduler.sampling_params import SamplingParams
from tests.engine.sampling_rows import make_rows, process_and_sample
from tests.engine.toy import VOCAB, Loop, make_runner

R, V = 37, 257
LIMITS = BatchLimits(max_num_seqs=19, max_model_len=96, block_size=4, vocab_size=VOCAB)
POLICY = explicit(19, 128, [19], [128])


def pack(allowed: np.ndarray) -> np.ndarray:
    """bool[..., V] as masks; the bits behind the vocabulary are set, and must not matter."""
    padded = np.ones((*allowed.shape[:-1], -(-allowed.shape[-1] // 32) * 32), bool)
    padded[..., : allowed.shape[-1]] = allowed
    return np.packbits(padded, axis=-1, bitorder="little").view(np.int32)


def draw(params: list[SamplingParams], needs_sample: np.ndarray, logits: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """The tokens of the step's rows; rows with a grammar that sample get their masks, 8 at a time."""
    masked = [i for i, p in enumerate(params) if p.structured_outputs is not None and needs_sample[i]]
    processed = jnp.asarray(logits)
    for start in range(0, len(masked), 8):
        places = np.full(8, R + 5)
        places[: len(masked[start : start + 8])] = masked[start : start + 8]
        masks = pack(allowed)[np.minimum(places, R - 1)]
        processed = jax.jit(mask_grammar)(processed, jnp.asarray(places), jnp.asarray(masks))
    return np.asarray(process_and_sample(processed, make_rows(params, needs_sample=needs_sample))[0])


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masked_rows_draw_what_is_allowed_and_the_others_what_they_draw_alone(temperature: float, share: float):
    rng = np.random.default_rng(round(10 * share))
    has_grammar = rng.random(R) < share
    needs_sample = rng.random(R) < 0.8
    plain = [SamplingParams(temperature=temperature, seed=i, top_k=7 * (i % 3)) for i in range(R)]
    guided = [
        SamplingParams(temperature=temperature, seed=i, top_k=7 * (i % 3), structured_outputs={"regex": "a"})
        if has_grammar[i]
        else plain[i]
        for i in range(R)
    ]
    for _ in range(5):
        logits = rng.normal(0, 3, (R, V)).astype(np.float32)
        allowed = rng.random((R, V)) < rng.choice([0.02, 0.5], (R, 1))
        allowed[np.arange(R), rng.integers(0, V, R)] = True
        got = draw(guided, needs_sample, logits, allowed)
        cut_by_hand = np.where(allowed | ~has_grammar[:, None], logits, -np.inf)
        alone = draw(plain, needs_sample, cut_by_hand, np.zeros_like(allowed))  # masks that count for nobody
        np.testing.assert_array_equal(got[needs_sample], alone[needs_sample])
        counts = has_grammar & needs_sample
        assert allowed[counts, got[counts]].all()


class Masks:
    """What a step's grammars say, known at once; those in `over` have ended."""

    def __init__(self, masks: list[np.ndarray], over: frozenset[int] = frozenset()) -> None:
        self.masks, self.over = masks, over

    def open(self) -> None:
        pass

    def fill(self, start: int, masks: np.ndarray) -> list[bool]:
        masks[:] = self.masks[start : start + len(masks)]
        return [start + i not in self.over for i in range(len(masks))]


class MaskedLoop(Loop):
    """Requests named g... may draw, at each step, the tokens that `allowed` says."""

    def __init__(self, runner) -> None:
        super().__init__(LIMITS, POLICY, runner)
        self.rng = np.random.default_rng(2)
        self.allowed: dict[str, list[np.ndarray]] = {}

    def schedule(self):
        output, masks = super().schedule(), {}
        for request_id in output.num_scheduled_tokens:
            if request_id.startswith("g"):
                allowed = self.rng.random(VOCAB) < 0.2
                allowed[self.rng.integers(VOCAB)] = True
                self.allowed.setdefault(request_id, []).append(allowed)
                masks[request_id] = pack(allowed)
        if masks:
            output.grammars = dict.fromkeys(masks)
            output.masks = Masks(list(masks.values()))
        return output


def test_masks_reach_their_rows_in_programs_compiled_ahead_and_a_reused_row_is_free_of_them():
    runner = make_runner(LIMITS, POLICY, 300)
    assert {SamplingProgram("mask", 19, size) for size in masks_per_call(19)} <= set(runner.program_keys())
    prompts = {f"r{i}": np.random.default_rng(i).integers(1, VOCAB, 3 + i % 5).tolist() for i in range(19)}
    free = Loop(LIMITS, POLICY, runner)
    for request_id, prompt in prompts.items():
        free.add(request_id, prompt, 6)
    expected = free.run()

    runner.initialize_kv_cache(300)
    loop = MaskedLoop(runner)
    for i in range(11):
        loop.add(f"g{i}", prompts[f"r{i}"], 6, structured_outputs={"regex": "a"})
    for i in range(11, 19):
        loop.add(f"r{i}", prompts[f"r{i}"], 6)
    got = loop.run()
    assert SMALL_CALL < 11, "some steps need two calls"
    for i in range(11):
        assert all(allowed[token] for allowed, token in zip(loop.allowed[f"g{i}"], got[f"g{i}"], strict=True))
        assert got[f"g{i}"] != expected[f"r{i}"]
    for i in range(11):
        loop.add(f"r{i}", prompts[f"r{i}"], 6)  # into the rows of those that ended
    assert {name: tokens for name, tokens in loop.run().items() if name.startswith("r")} == expected
    assert set(runner.programs.programs()) <= set(runner.program_keys())


@pytest.mark.parametrize(
    ("num_masks", "num_rows", "calls"),
    [
        (1, 8, [8]),
        (8, 8, [8]),
        (9, 48, [8, 8]),
        (17, 19, [19]),
        (48, 48, [48]),
        (81, 96, [64, 64]),
        (80, 96, [64, 8, 8]),
    ],
)
def test_few_masks_take_small_calls_and_many_large_ones(num_masks: int, num_rows: int, calls: list[int]):
    """Each mask in its row once, pads nowhere, and no mask of a request that has ended."""
    rng = np.random.default_rng(num_masks)
    given = list(rng.integers(-(2**31), 2**31, (num_masks, 3)).astype(np.int32))
    rows = rng.permutation(num_rows)[:num_masks].tolist()
    plan = MaskPlan(rows, Masks(given, frozenset({0})), num_rows, mask_words=3)
    found, sizes = {}, []
    for size, buffer in plan.buffers():
        sizes.append(size)
        for place, mask in zip(buffer[:size], buffer[size:].reshape(size, 3), strict=True):
            assert place not in found
            if place < num_rows:
                found[int(place)] = mask.tolist()
    assert sizes == calls and set(sizes) <= set(masks_per_call(num_rows))
    assert found == {row: mask.tolist() for row, mask in zip(rows[1:], given[1:], strict=True)}
    assert plan.mask_of(rows[0]) is None
    assert all(plan.mask_of(row).tolist() == found[row] for row in rows[1:])  # pyright: ignore[reportOptionalMemberAccess]

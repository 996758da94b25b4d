import itertools
import json
from dataclasses import asdict

import pytest

from scheduler.buckets import (
    BucketKey,
    BucketPolicy,
    StepShape,
    explicit,
    geometric,
    linear,
    load_policy,
    one_shape,
    powers_of_two,
)

LIMITS = [(1, 1), (16, 512), (7, 100), (256, 16384), (1024, 16384)]


def all_policies(seqs: int, tokens: int) -> list[BucketPolicy]:
    explicit_policy = explicit(seqs, tokens, [1, seqs], [min(37, tokens), tokens])
    made = [powers_of_two(seqs, tokens), linear(seqs, tokens), explicit_policy, one_shape(seqs, tokens)]
    return [*made, geometric(seqs, tokens)]


@pytest.mark.parametrize(("seqs", "tokens"), LIMITS)
def test_every_legal_step_gets_the_cheapest_bucket_that_holds_it(seqs, tokens):
    for policy in all_policies(seqs, tokens):
        keys = policy.keys()
        assert len(set(keys)) == len(keys)
        for num_tokens in sorted({1, 2, 3, 15, 17, 129, 600, 5000, seqs, tokens - 1, tokens} - {0}):
            if num_tokens > tokens:
                continue
            for num_reqs in {1, min(num_tokens, seqs), min(num_tokens, seqs, 33)}:
                key = policy.select("mixed", num_tokens, num_reqs)
                assert key in keys and num_tokens <= key.T and num_reqs <= key.R and key.R <= key.T
                fitting = [k for k in keys if k.kind == "mixed" and num_tokens <= k.T and num_reqs <= k.R]
                assert key == min(fitting, key=lambda k: (k.T + policy.row_cost_tokens * k.R, k))
            if num_tokens <= seqs:
                key = policy.select("decode", num_tokens, num_tokens)
                assert key in keys and num_tokens <= min(key.T, key.R) and (key.kind == "mixed" or key.R == key.T)


@pytest.mark.parametrize("seqs", [256, 512, 1024])
def test_default_policies_need_at_most_24_programs_on_a_gpu_and_few_on_a_cpu(seqs):
    assert len(powers_of_two(seqs, 16384).keys()) <= 24
    assert len(linear(seqs, 16384).keys()) <= 24
    assert len(geometric(seqs, 16384, min_decode_size=8, min_mixed_size=256).keys()) <= 24
    assert len(one_shape(seqs, 16384).keys()) == 1
    assert len(powers_of_two(16, 512).keys()) == 11


@pytest.mark.parametrize("seqs", [1, 8, 100, 192, 257, 512, 1024])
def test_policies_have_no_more_buckets_than_they_may(seqs):
    for tokens, max_programs in itertools.product((seqs, 2048, 16384), range(1, 30)):
        for strategy in (powers_of_two, geometric):
            try:
                policy = strategy(seqs, tokens, max_programs)
            except ValueError:  # not even powers of two fit
                continue
            assert len(policy.keys()) <= max_programs, (strategy, tokens, max_programs)


DECODE_1024 = (8, 16, 32, 64, 96, 128, 192, 256, 512, 1024)
FEW_1024 = (256, 416, 672, 1024, 1632, 2592, 4096, 6528, 10336)
TOKENS_8192 = (256, 352, 480, 672, 928, 1248, 1696, 2336, 3200, 4384, 5984, 8192)


@pytest.mark.parametrize(
    ("seqs", "tokens", "decode", "few", "many"),
    [
        (1024, 16384, DECODE_1024, FEW_1024, (1024, 2048, 4096, 8192, 16384)),
        (256, 8192, DECODE_1024[:-2], TOKENS_8192, ()),
        (64, 8192, DECODE_1024[:4], TOKENS_8192, ()),
        (16, 8192, DECODE_1024[:2], TOKENS_8192, ()),
    ],
)
def test_the_default_policies_of_a_gpu(seqs, tokens, decode, few, many):
    policy = geometric(seqs, tokens, min_decode_size=8, min_mixed_size=256)
    assert policy.decode_sizes == decode
    assert policy.mixed_sizes == tuple(sorted([(T, min(seqs, 256)) for T in few] + [(T, seqs) for T in many]))


def test_a_step_above_the_limits_is_refused():
    policy = powers_of_two(16, 512)
    with pytest.raises(ValueError, match="513 tokens"):
        policy.select("mixed", 513, 1)
    with pytest.raises(ValueError, match="17 requests"):
        policy.select("mixed", 100, 17)


def test_sizes_that_do_not_cover_the_limits_are_refused():
    with pytest.raises(ValueError, match="max_num_batched_tokens=512"):
        explicit(16, 512, [16], [64, 256])
    with pytest.raises(ValueError, match="must have 16 rows, for max_num_seqs"):
        BucketPolicy("hand", 16, 512, (16,), ((512, 4),))
    with pytest.raises(ValueError, match="ascending"):
        BucketPolicy("hand", 16, 512, (16, 4), ((512, 16),))


def test_a_decode_step_runs_in_a_mixed_bucket_if_that_is_smaller_or_no_decode_bucket_holds_it():
    policy = BucketPolicy("hand", 64, 512, (8, 48), ((16, 16), (128, 64), (512, 64)))
    chosen = {n: policy.select("decode", n, n) for n in (8, 9, 16, 17, 48, 49)}
    assert chosen == {
        8: BucketKey("decode", 8, 8),
        9: BucketKey("mixed", 16, 16),
        16: BucketKey("mixed", 16, 16),
        17: BucketKey("decode", 48, 48),
        48: BucketKey("decode", 48, 48),
        49: BucketKey("mixed", 128, 64),
    }
    assert BucketPolicy("hand", 8, 16, (8,), ((8, 8), (16, 8))).select("decode", 8, 8).kind == "decode"


def test_padding_waste_counts_pads_over_what_is_computed():
    policy = explicit(8, 64, [4, 8], [32, 64])
    steps = [StepShape("decode", 3, 3), StepShape("decode", 8, 8), StepShape("mixed", 33, 5)]
    waste = policy.padding_waste(steps)
    assert waste.tokens == pytest.approx(1 - (3 + 8 + 33) / (4 + 8 + 64))
    assert waste.rows == pytest.approx(1 - (3 + 8 + 5) / (4 + 8 + 8))
    assert policy.padding_waste([]) == (0.0, 0.0)


def test_a_policy_survives_its_file_and_a_broken_file_is_named(tmp_path):
    policy = powers_of_two(24, 700)
    policy.save(tmp_path / "tuned.json")
    assert load_policy(tmp_path / "tuned.json") == policy
    whole = asdict(policy)
    for broken in ({"name": "x"}, whole | {"decode_sizes": [0, 24]}, whole | {"decode_sizes": ["8"]},
                   whole | {"mixed_sizes": [[16.5, 4], [700, 24]]}):  # fmt: skip
        (tmp_path / "broken.json").write_text(json.dumps(broken))
        with pytest.raises(ValueError, match=r"broken\.json"):
            load_policy(tmp_path / "broken.json")


def test_keys_come_in_a_fixed_order_largest_first():
    assert explicit(4, 16, [1, 4], [8, 16]).keys() == [
        BucketKey("mixed", 16, 4),
        BucketKey("mixed", 8, 4),
        BucketKey("decode", 4, 4),
        BucketKey("decode", 1, 1),
    ]


def test_geometric_wastes_two_thirds_of_what_powers_of_two_do_where_few_requests_run():
    steps = [StepShape("mixed", tokens, 60) for tokens in range(300, 16000, 37)]
    sizes = {"min_decode_size": 8, "min_mixed_size": 256}
    waste = {
        p.name: p.padding_waste(steps).tokens for p in (f(1024, 16384, **sizes) for f in (powers_of_two, geometric))
    }
    assert waste["geometric"] < 0.67 * waste["powers_of_two"]


def test_mixed_sizes_of_geometric_are_not_finer_than_pays():
    policy = geometric(256, 8192, min_decode_size=8, min_mixed_size=256)
    tokens = [T for T, _ in policy.mixed_sizes]
    assert len(policy.keys()) < 24 and min(b / a for a, b in itertools.pairwise(tokens)) > 1.3


def test_a_step_takes_more_tokens_where_rows_cost_more():
    sizes = ((256, 256), (320, 16), (512, 256))
    steps = ("mixed", 200, 9)
    assert BucketPolicy("hand", 256, 512, (), sizes).select(*steps).T == 256
    assert BucketPolicy("hand", 256, 512, (), sizes, row_cost_tokens=0.5).select(*steps) == BucketKey("mixed", 320, 16)
    assert BucketPolicy("hand", 256, 512, (), sizes, row_cost_tokens=0.5).select("mixed", 200, 17).T == 256


def test_a_policy_is_cut_to_smaller_limits_and_refuses_larger_ones():
    policy = geometric(64, 2048)
    cut = policy.restricted(20, 600)
    assert cut.decode_sizes == (1, 2, 4, 8, 16, 20) and cut.mixed_sizes[-1] == (600, 20)
    assert all(T <= 600 and R <= 20 for T, R in cut.mixed_sizes) and policy.restricted(64, 2048) == policy
    with pytest.raises(ValueError, match="covers max_num_seqs=64 and max_num_batched_tokens=2048, not 65 and 2048"):
        policy.restricted(65, 2048)

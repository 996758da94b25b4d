import random
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler.batch import BatchLimits
from scheduler.buckets import BucketKey, explicit, linear, one_shape, powers_of_two
from scheduler.outputs import CachedRequestData, NewRequestData, SchedulerOutput
from scheduler.plan import ADMITS_PER_STEP, ON_DEVICE, PlanLayout, Planner
from scheduler.records import RecordField
from scheduler.sampling_params import SamplingParams
from tests.scheduler.plan_driver import CarelessScheduler, DeviceModel


def new_request(request_id, prompt, blocks, computed=0, **params):
    return NewRequestData(request_id, prompt, SamplingParams(**params), blocks, computed)


def step(new=(), cached=(), scheduled=None, finished=(), preempted=(), resumed=None):
    """cached: (id, new blocks or None, num_computed)."""
    data = CachedRequestData(
        [c[0] for c in cached], [c[1] for c in cached], [c[2] for c in cached],
        set(resumed or ()), dict(resumed or {}),
    )  # fmt: skip
    scheduled = scheduled or {}
    total = sum(scheduled.values())
    return SchedulerOutput(list(new), data, scheduled, total, set(finished), set(preempted))


def test_worked_example_puts_the_decodes_first_and_the_chunk_after_them():
    limits = BatchLimits(max_num_seqs=8, max_model_len=64, block_size=16)
    planner = Planner(limits, explicit(8, 64, [8], [8, 64]))
    b, c = list(range(100, 150)), list(range(200, 230))
    planner.build(step([new_request("B", b, [5, 6, 7, 8])], scheduled={"B": 50}))
    planner.build(step([new_request("C", c, [9, 10])], scheduled={"C": 30}))
    plan = planner.build(
        step(
            [new_request("A", [11, 12, 13, 14, 15, 16], [3])],
            [("B", None, 50), ("C", None, 30)],
            scheduled={"B": 1, "C": 1, "A": 4},
        )
    )
    assert plan.key == BucketKey("mixed", 8, 8) and plan.request_ids == ["B", "C", "A"]
    fields = PlanLayout.make(plan.key, limits).unpack(plan.buffer)
    assert fields["header"].tolist() == [6, 3, 2]
    assert fields["input_ids"].tolist() == [ON_DEVICE, ON_DEVICE, 11, 12, 13, 14, 0, 0]
    assert fields["positions"].tolist() == [50, 30, 0, 1, 2, 3, 0, 0]
    assert fields["slot_mapping"].tolist() == [8 * 16 + 2, 10 * 16 + 14, 48, 49, 50, 51, 0, 0]
    assert fields["query_start_loc"].tolist() == [0, 1, 2, 6, 6, 6, 6, 6, 6]
    assert fields["seq_lens"].tolist() == [51, 31, 4, 0, 0, 0, 0, 0]
    assert fields["logits_indices"].tolist() == [0, 1, 5, 0, 0, 0, 0, 0]
    assert fields["rows"].tolist() == [0, 1, 2, 8, 8, 8, 8, 8]
    assert fields["needs_sample"].tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
    assert plan.needs_sample.tolist() == [True, True, False]
    assert fields["admits"][:, 0].tolist() == [2] + [8] * (ADMITS_PER_STEP - 1)
    assert fields["admits"][0, -4:].tolist() == [3, 0, 0, 0]


def check_plan(plan, scheduler, device, scheduled, limits):
    """The plan, read back, says what the truth says; everything else in it is inert."""
    f = PlanLayout.make(plan.key, limits).unpack(plan.buffer)
    device.apply(plan, f)
    num_tokens, num_reqs, num_decodes = f["header"]
    assert (num_tokens, num_reqs) == (plan.num_tokens, plan.num_reqs) == (sum(scheduled.values()), len(scheduled))
    assert set(plan.request_ids) == set(scheduled)
    if plan.key.kind == "decode":
        assert num_decodes == num_reqs and plan.key.R == plan.key.T
    for i, request_id in enumerate(plan.request_ids):
        truth, n = scheduler.running[request_id], scheduled[request_id]
        start, end = f["query_start_loc"][i : i + 2]
        assert end - start == n and (i >= num_decodes or (start == i and n == 1))
        positions = np.arange(truth.num_computed, truth.num_computed + n)
        row = f["rows"][i]
        ids = np.where(f["input_ids"][start:end] == ON_DEVICE, device.last_tokens[row], f["input_ids"][start:end])
        assert ids.tolist() == [truth.tokens[p] for p in positions]
        assert f["positions"][start:end].tolist() == positions.tolist()
        slots = [truth.blocks[p // limits.block_size] * limits.block_size + p % limits.block_size for p in positions]
        assert f["slot_mapping"][start:end].tolist() == slots
        assert device.tables[row].tolist() == truth.blocks + [0] * (limits.max_blocks - len(truth.blocks))
        assert device.records[row, RecordField.NUM_PROMPT_TOKENS] == len(truth.prompt)
        assert f["seq_lens"][i] == truth.num_computed + n
        assert f["logits_indices"][i] == end - 1
        assert f["needs_sample"][i] == plan.needs_sample[i] == (truth.num_computed + n == len(truth.tokens))
    for name in ("input_ids", "positions", "slot_mapping"):
        assert not f[name][num_tokens:].any()
    for name in ("seq_lens", "logits_indices", "needs_sample"):
        assert not f[name][num_reqs:].any()
    assert (f["query_start_loc"][num_reqs:] == num_tokens).all()
    assert (f["rows"][num_reqs:] == limits.max_num_seqs).all()
    assert len(set(f["rows"][:num_reqs].tolist())) == num_reqs
    assert all((array >= 0).all() for name, array in f.items() if name not in ("input_ids", "admits"))
    assert f["query_start_loc"][0] == 0


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False), st.sampled_from([1, 3, 8]), st.sampled_from([(1, 7), (5, 37), (23, 61)]))
def test_random_plans_say_what_was_scheduled_and_every_pad_is_inert(rng, block_size, sizes):
    max_num_seqs, max_tokens = sizes
    limits = BatchLimits(max_num_seqs, 29, block_size)
    make = rng.choice([powers_of_two, linear, one_shape])
    planner, device = Planner(limits, make(max_num_seqs, max_tokens)), DeviceModel(limits)
    scheduler = CarelessScheduler(rng, limits, max_tokens)
    for _ in range(25):
        out = scheduler.schedule()
        plan = planner.build(out)
        assert set(planner.batch.row_of) == set(scheduler.running)
        if plan is None:
            assert not out.num_scheduled_tokens
            continue
        check_plan(plan, scheduler, device, out.num_scheduled_tokens, limits)
        rows = dict(planner.batch.row_of)
        for request_id, token in scheduler.sample(out).items():
            device.last_tokens[rows[request_id]] = token


def test_a_larger_bucket_differs_in_pads_only():
    limits = BatchLimits(8, 64, 4)
    outs = [
        step([new_request("a", [1, 2, 3], [1], seed=1), new_request("b", [4] * 9, [2, 3, 4], seed=2)],
             scheduled={"a": 3, "b": 7}),
        step(cached=[("a", None, 3), ("b", None, 7)], scheduled={"a": 1, "b": 2}),
        step(cached=[("a", [5], 4), ("b", None, 9)], scheduled={"a": 1, "b": 1}),
    ]  # fmt: skip
    small, large = Planner(limits, powers_of_two(8, 64)), Planner(limits, one_shape(8, 64))
    for out in outs:
        a, b = small.build(out), large.build(out)
        assert a.key < b.key or a.key.T < b.key.T
        fa, fb = (PlanLayout.make(p.key, limits).unpack(p.buffer) for p in (a, b))
        for name in set(fa) & set(fb):
            n = len(fa[name])
            assert np.array_equal(fa[name], fb[name][:n]), name


def test_more_admissions_than_fit_go_to_buffers_of_their_own():
    limits = BatchLimits(40, 16, 4)
    planner, device = Planner(limits, powers_of_two(40, 64)), DeviceModel(limits)
    new = [new_request(f"r{i}", [i + 1, i + 2], [i + 1], seed=i) for i in range(37)]
    plan = planner.build(step(new, scheduled={n.request_id: 1 for n in new}))
    assert len(plan.overflow) == 2
    device.apply(plan, PlanLayout.make(plan.key, limits).unpack(plan.buffer))
    for i in range(37):
        row = planner.batch.row_of[f"r{i}"]
        assert device.tables[row].tolist() == [i + 1, 0, 0, 0]
        assert device.records[row, RecordField.SEED_LO] == i


def test_a_row_that_is_reused_keeps_no_trace_of_the_request_before():
    limits = BatchLimits(1, 32, 4)
    planner, device = Planner(limits, powers_of_two(1, 32)), DeviceModel(limits)
    params = {"temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 2**63 + 5, "min_tokens": 3}
    first = new_request("first", list(range(20)), [1, 2, 3, 4, 5], stop_token_ids=[7, 8], **params)
    second = new_request("second", [9], [6], temperature=0, seed=1)
    plan = planner.build(step([first], scheduled={"first": 20}))
    device.apply(plan, PlanLayout.make(plan.key, limits).unpack(plan.buffer))
    plan = planner.build(step([second], scheduled={"second": 1}, finished=["first"]))
    device.apply(plan, PlanLayout.make(plan.key, limits).unpack(plan.buffer))
    fresh = Planner(limits, powers_of_two(1, 32)).build(step([second], scheduled={"second": 1}))
    assert np.array_equal(plan.buffer, fresh.buffer)
    assert device.tables[0].tolist() == [6] + [0] * 7 and "first" not in planner.batch.records


def test_a_last_prompt_token_alone_is_a_decode_row_with_a_host_token():
    limits = BatchLimits(2, 32, 4)
    planner = Planner(limits, powers_of_two(2, 32))
    planner.build(step([new_request("a", [5, 6, 7], [1])], scheduled={"a": 2}))
    plan = planner.build(step(cached=[("a", None, 2)], scheduled={"a": 1}))
    fields = PlanLayout.make(plan.key, limits).unpack(plan.buffer)
    assert plan.key.kind == "decode" and fields["input_ids"][0] == 7 and plan.needs_sample.tolist() == [True]


def test_a_resumed_request_keeps_its_seed_and_its_prompt_length():
    limits = BatchLimits(2, 32, 4)
    planner = Planner(limits, powers_of_two(2, 32))
    planner.build(step([new_request("a", [5, 6, 7], [1])], scheduled={"a": 3}))
    record = planner.batch.records["a"].record.copy()
    planner.build(step(preempted=["a"]))
    plan = planner.build(step(cached=[("a", [2, 3], 0)], scheduled={"a": 5}, resumed={"a": [5, 6, 7, 40, 41]}))
    fields = PlanLayout.make(plan.key, limits).unpack(plan.buffer)
    assert np.array_equal(fields["admits"][0, 1 : 1 + len(record)], record)
    assert fields["input_ids"][:5].tolist() == [5, 6, 7, 40, 41] and plan.needs_sample.tolist() == [True]
    assert record[RecordField.NUM_PROMPT_TOKENS] == 3


def test_a_step_without_tokens_still_frees_rows():
    planner = Planner(BatchLimits(1, 32, 4), powers_of_two(1, 32))
    planner.build(step([new_request("a", [5], [1])], scheduled={"a": 1}))
    assert planner.build(step(finished=["a"])) is None
    assert planner.build(step([new_request("b", [5], [1])], scheduled={"b": 1})).request_ids == ["b"]


@pytest.mark.parametrize("num_reqs", [256, 1000])
def test_planning_costs_at_most_1500_ns_a_running_decode(num_reqs):
    limits = BatchLimits(1024, 4096, 16)
    planner = Planner(limits, powers_of_two(1024, 16384))
    ids = [f"request-{i}" for i in range(num_reqs)]
    new = [new_request(i, [1] * 8, [k + 1], seed=1) for k, i in enumerate(ids)]
    planner.build(step(new, scheduled=dict.fromkeys(ids, 8)))
    best, computed, rng = float("inf"), 8, random.Random(0)
    for _ in range(30):
        blocks = [[rng.randrange(10**5)] if rng.random() < 1 / 16 else None for _ in ids]
        out = step(cached=list(zip(ids, blocks, [computed] * num_reqs, strict=True)), scheduled=dict.fromkeys(ids, 1))
        start = time.perf_counter()
        planner.build(out)
        best = min(best, time.perf_counter() - start)
        computed += 1
    assert best / num_reqs < 1.5e-6, f"{best / num_reqs * 1e9:.0f} ns a request"

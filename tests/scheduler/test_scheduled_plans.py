"""Scheduler, batch and plan together: every device row holds what the scheduler thinks its request holds."""

import random

import pytest

from scheduler.batch import BatchLimits
from scheduler.buckets import powers_of_two
from scheduler.plan import PlanLayout, Planner
from tests.scheduler.requests_for_tests import ids, make_checked, make_request


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_rows_positions_and_slots_follow_the_scheduler(policy: str, async_scheduling: bool):
    rng = random.Random(3)
    checked = make_checked(
        14, block_size=4, policy=policy, max_num_seqs=5, max_num_batched_tokens=24, async_scheduling=async_scheduling
    )
    limits = BatchLimits(5, 256, 4)
    planner, forgetful = (Planner(limits, powers_of_two(5, 24), seed=0) for _ in range(2))
    last, num_alike = None, 0
    requests = checked.scheduler.requests
    for step in range(400):
        if len(requests) < 9 and rng.random() < 0.4:
            prompt = ids(rng.randint(1, 30), seed=step % 3)
            checked.add(make_request(f"r{step}", prompt, rng.randint(1, 12), priority=step % 3))
        if requests and rng.random() < 0.05:
            checked.abort([rng.choice(list(requests))])
        if len(checked.in_flight) == checked.max_in_flight:
            checked.update()
        output = checked.schedule()
        plan = planner.build(output)
        forgetful._last = None
        afresh = forgetful.build(output)
        assert planner.batch.row_of.keys() == {request.request_id for request in checked.scheduler.running}
        for request_id, row in planner.batch.row_of.items():
            blocks = requests[request_id].block_ids
            assert planner.batch.block_tables[row, : len(blocks)].tolist() == blocks
        if plan is None:
            while checked.in_flight:
                checked.update()
            continue
        # What is taken over from the step before is what would be made anew.
        assert afresh is not None and (plan.buffer == afresh.buffer).all()
        assert plan.request_ids == afresh.request_ids and (plan.needs_sample == afresh.needs_sample).all()
        num_alike += last is not None and plan.needs_sample is last.needs_sample
        last = plan
        sampled = [i for i, needed in zip(plan.request_ids, plan.needs_sample, strict=True) if needed]
        assert set(sampled) == checked.in_flight[-1][1].sampled_token_ids.keys()
        fields = PlanLayout.make(plan.key, limits).unpack(plan.buffer)
        starts = fields["query_start_loc"]
        for index, request_id in enumerate(plan.request_ids):
            request, begin, end = requests[request_id], int(starts[index]), int(starts[index + 1])
            positions = range(request.num_computed_tokens - (end - begin), request.num_computed_tokens)
            assert fields["positions"][begin:end].tolist() == list(positions)
            slots = [request.block_ids[p // 4] * 4 + p % 4 for p in positions]
            assert fields["slot_mapping"][begin:end].tolist() == slots
    assert checked.scheduler.make_stats().num_preemptions > 0 and num_alike > 20

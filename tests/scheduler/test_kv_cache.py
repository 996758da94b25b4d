import pytest

from scheduler.block_pool import BlockPool
from scheduler.config import CacheConfig
from scheduler.kv_cache_manager import KVCacheManager
from scheduler.request_queue import make_request_queue
from tests.scheduler.requests_for_tests import ids, make_request


def test_blocks_are_handed_out_least_recently_freed_first_and_never_the_null_block():
    pool = BlockPool(6)
    assert pool.allocate(3) == [1, 2, 3]
    pool.free([3, 1])
    assert pool.free_block_ids() == [4, 5, 3, 1]
    assert pool.allocate(4) == [4, 5, 3, 1]
    assert pool.num_free_blocks == 0 and pool.ref_counts == [1] * 6


def test_a_freed_block_can_be_found_until_it_is_handed_out_again():
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool.publish(block, b"a")
    pool.free([block])
    assert pool.longest_hit([b"a", b"b"], 2) == [block]
    pool.touch([block])
    assert pool.free_block_ids() == [2, 3]
    pool.free([block])
    pool.allocate(3)
    assert pool.longest_hit([b"a"], 1) == []


def test_of_equal_blocks_the_first_one_known_is_found_and_the_others_stand_in():
    pool = BlockPool(5)
    first, second, third = pool.allocate(3)
    for block in (first, second, third):
        pool.publish(block, b"same")
    assert pool.longest_hit([b"same"], 1) == [first]
    pool.forget(first)
    assert pool.longest_hit([b"same"], 1) == [second]
    pool.forget(third)
    pool.forget(second)
    assert pool.longest_hit([b"same"], 1) == [] and list(pool.known_blocks()) == []


def test_a_failed_allocation_changes_nothing():
    kv = KVCacheManager(CacheConfig(4, 6))
    first = make_request("a", ids(12))
    kv.allocate_slots(first, 12)
    kv.free(first)
    second = make_request("b", ids(12) + ids(20, seed=1))
    hits = kv.get_computed_blocks(second)
    before = (kv.pool.free_block_ids(), kv.pool.ref_counts.copy(), kv.pool.block_hashes.copy())
    assert len(hits) == 3 and kv.allocate_slots(second, 20, hits) is None
    assert (kv.pool.free_block_ids(), kv.pool.ref_counts, kv.pool.block_hashes) == before
    assert second.block_ids == []
    assert kv.allocate_slots(second, 8, hits, full_sequence_must_fit=True) is None
    assert kv.allocate_slots(second, 8, hits) is not None


def test_prompt_logprobs_and_skip_reading_do_not_read_the_cache():
    kv = KVCacheManager(CacheConfig(4, 12))
    kv.allocate_slots(make_request("a", ids(12)), 12)
    for params, num_hits in (
        ({}, 2),
        ({"prompt_logprobs": 1}, 0),
        ({"skip_reading_prefix_cache": False}, 2),
        ({"skip_reading_prefix_cache": True}, 0),
    ):
        assert len(kv.get_computed_blocks(make_request("b", ids(12), **params))) == num_hits


@pytest.mark.parametrize(("policy", "order"), [("fcfs", "dabc"), ("priority", "cadb")])
def test_queue_order_of_a_request_put_back_and_of_one_removed(policy: str, order: str):
    queue = make_request_queue(policy)
    requests = {
        name: make_request(name, 3, priority=priority, arrival=float(arrival))
        for arrival, (name, priority) in enumerate([("a", 1), ("x", 0), ("b", 2), ("c", 0), ("d", 1)])
    }
    for name in "axbc":
        queue.add(requests[name])
    queue.remove(requests["x"])
    queue.put_back(requests["d"])
    assert "".join(request.request_id for request in queue) == order
    assert queue.peek() is requests[order[0]]
    assert "".join(queue.pop().request_id for _ in range(len(queue))) == order


def test_many_aborts_do_not_fill_the_priority_queue_with_dead_entries():
    queue = make_request_queue("priority")
    for index in range(500):
        request = make_request(f"r{index}", 3)
        queue.add(request)
        if index:
            queue.remove(request)
    assert len(queue) == 1 and len(queue._heap) < 32

"""How much of a GPU's memory an engine may count on, and that it finds it in one piece."""

import jax
import numpy as np
import pytest

from jaxvllm import device_memory
from jaxvllm.device_memory import GIB, SMALL_PLACES, free_device_bytes, leave_places, small_places, with_room
from jaxvllm.parallel import make_mesh, replicated
from tests.engine.played_allocator import PlayedAllocator, addresses_of_steps


class FakeDevice:
    local_hardware_id = 3

    def __init__(self, **stats: int) -> None:
        self.memory_stats = lambda: stats


@pytest.mark.parametrize("left", [80, None])
def test_free_is_what_nothing_holds_of_the_share(monkeypatch, left):
    monkeypatch.setattr(device_memory, "driver_free_bytes", lambda ordinal: left)
    assert free_device_bytes(FakeDevice(bytes_limit=100, pool_bytes=20, bytes_in_use=15)) == 85
    assert free_device_bytes(FakeDevice()) is None


def test_a_share_that_others_hold_of_the_card_is_refused(monkeypatch):
    monkeypatch.setattr(device_memory, "driver_free_bytes", {3: 20 * GIB}.get)
    with pytest.raises(ValueError, match=r"stands for 42.00 GiB, but only 30.00 GiB.*lower gpu_memory_utilization"):
        free_device_bytes(FakeDevice(bytes_limit=42 * GIB, pool_bytes=10 * GIB, bytes_in_use=0))


def draw_params() -> dict[str, jax.Array]:
    draw = np.random.default_rng(0).standard_normal
    return {name: jax.device_put(draw(size).astype(np.float32)) for name, size in (("a", (7, 3)), ("b", (5,)))}


def test_weights_with_holes_between_them_are_moved_together_unchanged():
    params, expected = draw_params(), draw_params()
    device = FakeDevice(bytes_limit=100, pool_bytes=100, largest_free_block_bytes=60)
    moved = with_room(params, [device], 61)
    assert all(param.is_deleted() for param in params.values())
    assert moved.keys() == expected.keys()
    for name, param in moved.items():
        np.testing.assert_array_equal(param, expected[name])


@pytest.mark.parametrize(
    "stats",
    [
        {"bytes_limit": 100, "pool_bytes": 100, "largest_free_block_bytes": 61},
        {"bytes_limit": 100, "pool_bytes": 40, "largest_free_block_bytes": 9},  # it can grow
        {},
    ],
    ids=["fits", "not allocated as a whole", "a device that says nothing"],
)
def test_weights_stay_where_the_pool_finds_room(stats):
    params = draw_params()
    assert with_room(params, [FakeDevice(**stats)], 61) is params


@pytest.mark.parametrize("seed", range(5))
def test_a_steps_workspace_keeps_its_address_while_plans_and_ids_come_and_go(seed):
    assert min(map(len, addresses_of_steps(PlayedAllocator(10 * GIB), seed))) > 5
    allocator = PlayedAllocator(10 * GIB)
    leave_places(allocator.allocate, allocator.free)
    assert list(map(len, addresses_of_steps(allocator, seed))) == [1, 1]


def test_places_are_left_on_every_device():
    devices = jax.devices()
    kept = small_places(replicated(make_mesh(devices, len(devices))))
    for device in devices:
        shards = [shard.data for array in kept for shard in array.addressable_shards if shard.device == device]
        assert [shard.nbytes for shard in shards] == [size for size, count in SMALL_PLACES for _ in range(count + 1)]
    assert not any(array.is_deleted() for array in kept)

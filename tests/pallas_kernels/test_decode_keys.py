"""Where registers lie that the decode kernel takes for others: neither a lowering nor the interpreter sees it."""

import numpy as np
import pytest

from pallas_kernels.common import plgpu
from pallas_kernels.decode_keys import relabel_keys, relabel_q, rows_of_q


def held(layout, array: np.ndarray) -> np.ndarray:
    """[thread, register, value]: what the threads of a warpgroup have of an array in a TiledLayout."""
    for tile in layout.tiling.tiles:
        num_before = array.ndim - len(tile)
        sizes = zip(array.shape[num_before:], tile, strict=True)
        array = array.reshape(*array.shape[:num_before], *(size for n, t in sizes for size in (n // t, t)))
        pairs = range(num_before, array.ndim, 2)
        array = array.transpose(*range(num_before), *pairs, *(i + 1 for i in pairs))
    partitioned = (*layout.warp_dims, *layout.lane_dims)
    by_thread = np.moveaxis(array, (*partitioned, layout.vector_dim), (*range(len(partitioned)), -1))
    return by_thread.reshape(128, -1, layout.vector_length)


def relabelled(relabel, array: np.ndarray, layout, new_layout) -> np.ndarray:
    """The array that threads have in new_layout when they relabel what they have of `array` in `layout`."""
    places = held(new_layout, np.arange(array.size).reshape(array.shape))
    out = np.full(array.size, -1)
    for registers, targets in zip(held(layout, array), places, strict=True):
        of_thread = np.empty(len(registers), object)
        of_thread[:] = list(registers)
        out[targets] = relabel(of_thread, lambda vector, begin, end: vector[begin:end])
    return out.reshape(array.shape)


@pytest.mark.parametrize("num_columns", [8, 16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_keys_and_q_have_their_columns_in_the_same_order(head_dim, num_columns):
    wgmma, neighbours = plgpu.Layout.WGMMA.to_mgpu(), plgpu.Layout.WGMMA_UPCAST_2X.to_mgpu()
    key, of_key = np.divmod(
        relabelled(relabel_keys, np.arange(64 * head_dim).reshape(64, -1), neighbours, wgmma), head_dim
    )
    np.testing.assert_array_equal(key, np.broadcast_to(np.arange(64)[:, None], key.shape))
    parts = np.arange(head_dim * num_columns).reshape(-1, 64, num_columns)  # q^T, which is stored 64 rows at a time
    stored = np.concatenate([relabelled(relabel_q, part, wgmma, rows_of_q().to_mgpu()) for part in parts])
    of_q, column = np.divmod(stored, num_columns)
    np.testing.assert_array_equal(column, np.broadcast_to(np.arange(num_columns), column.shape))
    np.testing.assert_array_equal(of_key, np.broadcast_to(of_q[:, 0], of_key.shape))
    np.testing.assert_array_equal(of_q, np.broadcast_to(of_q[:, :1], of_q.shape))
    of_16 = [0, 1, 8, 9, 4, 5, 12, 13, 2, 3, 10, 11, 6, 7, 14, 15]
    np.testing.assert_array_equal(of_q[:, 0].reshape(-1, 16), np.arange(0, head_dim, 16)[:, None] + of_16)


@pytest.mark.parametrize("layout", ["WGMMA", "WGMMA_UPCAST_2X"])
def test_the_model_of_a_layout_has_each_element_once(layout):
    threads = held(getattr(plgpu.Layout, layout).to_mgpu(), np.arange(64 * 32).reshape(64, 32))
    assert sorted(threads.flat) == list(range(64 * 32))
    # As in the comments of Mosaic's layouts: thread 1 of a row has columns 2 and 3, or 8 to 11; warp 1 has row 16.
    assert list(threads[1, 0]) == ([2, 3] if layout == "WGMMA" else [8, 9, 10, 11])
    assert threads[4, 0, 0] == 32
    assert threads[32, 0, 0] == 16 * 32

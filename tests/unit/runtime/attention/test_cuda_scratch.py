"""What CUDA's attention kernels allocate inside, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainer_rank.runtime.attention.cuda_scratch import (
    CallSizes,
    efficient_backward_bytes,
    flash_backward_bytes,
    flash_forward_bytes,
)

# 16,384 rows of a model with 32 query heads and 8 key/value heads of 128.
LONG = CallSizes(batch=1, heads=32, groups=8, queries=16384, keys=16384, head_size=128)


def test_flash_backward_keeps_padded_float32_query_gradients() -> None:
    """Without groups: a float32 copy of the query gradient and one float32 per row and head, 130 rows as 256."""
    sizes = replace(LONG, groups=32, queries=130)
    found = flash_backward_bytes(sizes, 132, itemsize=2, deterministic=False)
    assert found == 256 * 32 * 128 * 4 + 256 * 32 * 4


def test_grouped_heads_add_key_and_value_gradients_per_query_head() -> None:
    """With groups: two more tensors in the inputs' own dtype, as long as the keys."""
    plain = flash_backward_bytes(replace(LONG, groups=32), 132, itemsize=2, deterministic=False)
    assert flash_backward_bytes(LONG, 132, itemsize=2, deterministic=False) - plain == 2 * 16384 * 32 * 128 * 2


def test_deterministic_mode_keeps_one_query_gradient_per_share_of_the_device() -> None:
    """132 multiprocessors over 32 heads make five copies."""
    sizes = replace(LONG, groups=32)
    once = flash_backward_bytes(sizes, 132, itemsize=2, deterministic=False)
    assert flash_backward_bytes(sizes, 132, itemsize=2, deterministic=True) - once == 4 * 16384 * 32 * 128 * 4


@pytest.mark.parametrize("head_size", [128, 80])
def test_a_full_device_splits_no_keys(head_size: int) -> None:
    """Enough query tiles for every multiprocessor leave nothing to split."""
    assert flash_forward_bytes(replace(LONG, head_size=head_size), 132) == 0


def test_few_queries_on_many_keys_are_split() -> None:
    """64 rows of one head on 8 blocks of keys: 264 slots, one tile, so eight parts, each with its log-sum-exp."""
    sizes = CallSizes(batch=1, heads=1, groups=1, queries=64, keys=8 * 128, head_size=128)
    assert flash_forward_bytes(sizes, 132) == 8 * 64 * (128 + 1) * 4


def test_no_more_parts_than_good_occupancy_needs() -> None:
    """128 tiles in 264 slots: two parts fill 97 %, so a third is not made."""
    sizes = CallSizes(batch=1, heads=16, groups=16, queries=512, keys=8192, head_size=128)
    assert flash_forward_bytes(sizes, 132) == 2 * 16 * 512 * (128 + 1) * 4


def test_a_single_query_runs_its_groups_as_rows() -> None:
    """One row of 32 heads on 8 is 8 tiles of 4 rows; 29 parts are within 85 % of the best, but 28 blocks bound them."""
    sizes = CallSizes(batch=1, heads=32, groups=8, queries=1, keys=28 * 128, head_size=128)
    assert flash_forward_bytes(sizes, 132) == 28 * 32 * (128 + 1) * 4


def test_the_efficient_backward_holds_tiles_of_the_query_gradient() -> None:
    """For 130 rows of head size 64: three tiles of 64 x 64 floats and 16 bytes each, and the row sums."""
    sizes = CallSizes(batch=2, heads=4, groups=4, queries=130, keys=7, head_size=64)
    assert efficient_backward_bytes(sizes) == 2 * 4 * 3 * (64 * 64 * 4 + 16) + 2 * 4 * 130 * 4

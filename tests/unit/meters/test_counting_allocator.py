"""The counting allocator: exact counts, the cap, and what it gives back. It stays installed in this process."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.meters.models import Blocks, step
from trainer_rank.meters.counting_lib import CountingLibrary, load
from trainer_rank.units import KIB, MIB


@pytest.fixture(scope="module")
def installed() -> CountingLibrary:
    library = load()
    library.install()
    return library


@pytest.fixture
def library(installed: CountingLibrary) -> Iterator[CountingLibrary]:
    """The installed allocator with no cap and an 8 MiB cache, put back so afterwards."""
    gc.collect()
    installed.set_cap(None)
    installed.set_cache_limit(8 * MIB)
    installed.release_cached()
    installed.reset_peak()
    yield installed
    installed.set_cap(None)
    installed.set_cache_limit(0)


def block(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


@pytest.mark.parametrize("size", [1, 63, 64, 4096, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, 2 * MIB, 5 * MIB + 3])
def test_live_and_peak_are_the_bytes_asked_for(library: CountingLibrary, size: int) -> None:
    """No rounding, no header: a tensor of n bytes counts n, and its peak stays after it is freed."""
    base = library.live_bytes()
    tensor = block(size)
    assert library.live_bytes() - base == size
    del tensor
    assert library.live_bytes() == base
    assert library.peak_bytes() - base == size
    library.reset_peak()
    assert library.peak_bytes() == base


@pytest.mark.parametrize("size", [1, 100, 4000, 4032, 4096, 64 * KIB - 1, 64 * KIB, 3 * MIB])
def test_blocks_are_aligned_as_torch_promises(library: CountingLibrary, size: int) -> None:
    """Vector kernels load 64 bytes at a time."""
    assert all(tensor.data_ptr() % 64 == 0 for tensor in [block(size) for _ in range(200)])


def test_an_empty_tensor_costs_nothing(library: CountingLibrary) -> None:
    """Zero bytes are a legal allocation."""
    base = library.live_bytes()
    tensor = torch.empty(0)
    assert tensor.numel() == 0
    assert library.live_bytes() == base


def test_tensors_older_than_the_allocator_are_not_counted(library: CountingLibrary) -> None:
    """A borrowed buffer keeps its own deleter."""
    base = library.live_bytes()
    buffer = bytearray(MIB)
    tensor = torch.frombuffer(buffer, dtype=torch.uint8)
    assert library.live_bytes() == base
    del tensor
    assert library.live_bytes() == base


def test_resizing_a_storage_moves_its_bytes(library: CountingLibrary) -> None:
    """Growing copies what was there; shrinking to nothing gives all back."""
    base = library.live_bytes()
    tensor = torch.arange(1000, dtype=torch.uint8)
    tensor.untyped_storage().resize_(3 * MIB)
    assert library.live_bytes() - base == 3 * MIB
    assert torch.equal(tensor, torch.arange(1000, dtype=torch.uint8))
    tensor.untyped_storage().resize_(0)
    assert library.live_bytes() == base


def test_the_profiler_still_sees_every_allocation(library: CountingLibrary) -> None:
    """Memory events are those of torch's own allocator."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        tensor = block(3 * MIB)
        small = block(5000)
        del tensor, small
    events = [event for event in prof.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in events]
    assert {3 * MIB, -3 * MIB, 5000, -5000} <= set(sizes)


@pytest.mark.parametrize("size", [1000, 64 * KIB, 8 * MIB])
def test_the_cap_is_exact(library: CountingLibrary, size: int) -> None:
    """The last byte under the cap can be had, one more raises torch's own error, and memory stays usable."""
    base = library.live_bytes()
    library.set_cap(base + size)
    tensor = block(size)
    refused = library.failed_count()
    with pytest.raises(torch.OutOfMemoryError, match=r"CPU out of memory\. Tried to allocate 1 bytes"):
        block(1)
    assert library.failed_count() == refused + 1
    assert library.failed_bytes() == 1
    del tensor
    with pytest.raises(torch.OutOfMemoryError, match=f"Tried to allocate {size + 1} bytes"):
        block(size + 1)
    assert block(size).numel() == size
    assert library.peak_bytes() <= base + size


def test_an_absurd_size_raises_the_same_error(library: CountingLibrary) -> None:
    """What the kernel refuses is an out-of-memory too, cap or not."""
    with pytest.raises(torch.OutOfMemoryError):
        block(2**46)


def test_cached_bytes_make_room_under_the_cap(library: CountingLibrary) -> None:
    """The cache counts against the cap and is dropped before an allocation is refused."""
    base = library.live_bytes()
    library.set_cap(base + 10 * MIB)
    tensor = block(8 * MIB)
    del tensor
    assert library.cached_bytes() == 8 * MIB
    tensor = block(10 * MIB)
    assert library.live_bytes() + library.cached_bytes() <= base + 10 * MIB
    del tensor


def test_lowering_the_cap_drops_the_cache(library: CountingLibrary) -> None:
    """A cap below live plus cached takes effect at once."""
    base = library.live_bytes()
    tensor = block(6 * MIB)
    del tensor
    library.set_cap(base + 2 * MIB)
    assert library.cached_bytes() <= 2 * MIB


def test_the_cache_stays_within_its_limit_and_can_be_emptied(library: CountingLibrary) -> None:
    """Freed bytes beyond the limit go back to the kernel."""
    tensors = [block(3 * MIB) for _ in range(10)]
    del tensors
    assert 0 < library.cached_bytes() <= 8 * MIB
    reserved = library.reserved_bytes()
    cached = library.cached_bytes()
    library.release_cached()
    assert library.cached_bytes() == 0
    assert library.reserved_bytes() == reserved - cached


def test_a_freed_block_serves_a_smaller_request(library: CountingLibrary) -> None:
    """Reuse maps nothing new, and the pieces merge again."""
    tensor = block(8 * MIB)
    address = tensor.data_ptr()
    del tensor
    reserved = library.reserved_bytes()
    pieces = [block(2 * MIB) for _ in range(4)]
    assert library.reserved_bytes() == reserved
    del pieces
    again = block(8 * MIB)
    assert again.data_ptr() == address
    assert library.reserved_bytes() == reserved


def test_resident_bytes_leave_out_what_was_never_touched(library: CountingLibrary) -> None:
    """An untouched block is live but not in memory; filling it brings it in."""
    base = library.resident_bytes()
    tensor = block(64 * MIB)
    assert library.resident_bytes() - base < 4 * MIB
    tensor.fill_(1)
    assert 64 * MIB <= library.resident_bytes() - base < 66 * MIB


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32), cap_mib=st.integers(8, 64), limit_mib=st.integers(0, 16))
def test_blocks_never_overlap_and_counts_match_a_list(seed: int, cap_mib: int, limit_mib: int) -> None:
    """Against a plain list of live tensors: sizes add up, contents survive, cap and cache limit hold throughout."""
    library = load()
    library.install()
    gc.collect()
    rng = random.Random(seed)
    base = library.live_bytes()
    library.set_cap(base + cap_mib * MIB)
    library.set_cache_limit(limit_mib * MIB)
    held: list[tuple[torch.Tensor, int]] = []
    refused = 0
    for number in range(150):
        if held and rng.random() < 0.45:
            tensor, mark = held.pop(rng.randrange(len(held)))
            assert int(tensor[0]) == mark == int(tensor[-1])
            del tensor
        else:
            size = int(2 ** rng.uniform(0, 24))
            live = sum(tensor.numel() for tensor, _ in held)
            if live + size > cap_mib * MIB:
                with pytest.raises(torch.OutOfMemoryError):
                    block(size)
                refused += 1
            else:
                tensor = block(size)
                tensor[0] = tensor[-1] = number % 251
                held.append((tensor, number % 251))
                del tensor
        assert library.live_bytes() - base == sum(tensor.numel() for tensor, _ in held)
        assert library.cached_bytes() <= limit_mib * MIB
        assert library.live_bytes() + library.cached_bytes() <= base + cap_mib * MIB
    for tensor, mark in held:
        assert int(tensor[0]) == mark == int(tensor[-1])
    library.set_cap(None)


def test_twenty_failed_steps_leave_nothing_behind(library: CountingLibrary) -> None:
    """Out of memory anywhere in forward or backward is caught, live bytes return, and a full step still runs."""
    model = Blocks()
    step(model)
    gc.collect()
    base = library.live_bytes()
    library.reset_peak()
    step(model)
    peak = library.peak_bytes() - base
    assert library.live_bytes() == base
    rng = random.Random(0)
    for _ in range(20):
        library.set_cap(base + int(peak * rng.uniform(0.05, 0.99)))
        with pytest.raises(torch.OutOfMemoryError):
            step(model)
        if library.live_bytes() != base:  # a collection is slow; only a reference cycle needs one
            gc.collect()
        assert library.live_bytes() == base
    library.set_cap(base + peak)
    step(model)
    assert library.live_bytes() == base


def test_threads_allocate_and_free_at_once(library: CountingLibrary) -> None:
    """Four threads, each freeing what another made, under a cap that sometimes bites."""
    base = library.live_bytes()
    library.set_cap(base + 48 * MIB)
    shelf: list[torch.Tensor] = []
    lock = threading.Lock()
    faults: list[str] = []
    refused = [0] * 4

    def work(index: int) -> None:
        rng = random.Random(index)
        for _ in range(400):
            try:
                tensor = block(int(2 ** rng.uniform(4, 23)))
            except torch.OutOfMemoryError:
                refused[index] += 1
                with lock:
                    shelf.clear()
                continue
            tensor[0] = tensor[-1] = index
            with lock:
                shelf.append(tensor)
                other = shelf.pop(rng.randrange(len(shelf))) if len(shelf) > 12 else None
            if other is not None and int(other[0]) != int(other[-1]):
                faults.append(f"thread {index} found a torn block")

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shelf.clear()
    assert faults == []
    assert library.live_bytes() == base

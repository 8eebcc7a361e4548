"""The watch tells storages apart, not tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from trainer_rank.meters.storages import StorageWatch


class Log:
    """A watch on the CPU that writes down what it says."""

    def __init__(self) -> None:
        self.said: list[int] = []
        self.limit = 1 << 30
        self.watch = StorageWatch("cpu", self._appear)

    def _appear(self, nbytes: int) -> Callable[[], None]:
        if nbytes > self.limit:
            raise MemoryError
        self.said.append(nbytes)
        return lambda: self.said.append(-nbytes)


@pytest.fixture
def log() -> Log:
    return Log()


def test_a_storage_appears_once_and_vanishes_with_its_last_tensor(log: Log) -> None:
    """Results may be nested, and twice the same."""
    one = torch.empty(8)
    assert log.watch.see([{"a": one}, (one[:2],)], (), {})
    assert log.watch.see(one, (), {})
    view = one[1:]
    del one
    assert log.said == [32]
    del view
    assert log.said == [32, -32]


def test_what_an_argument_already_had_is_not_new(log: Log) -> None:
    """A view of a tensor older than the watch, given by position or by name."""
    old = torch.empty(8)
    assert log.watch.see(old[:2], (old,), {})
    assert log.watch.see(old[:2], (), {"out": [old]})
    assert log.said == []


def test_another_device_and_what_is_no_tensor_are_passed_over(log: Log) -> None:
    """The answer says that nothing was on the device."""
    assert not log.watch.see((torch.empty(8, device="meta"), 3, None), (), {})
    assert log.said == []


def test_a_storage_that_changes_its_size_is_another(log: Log) -> None:
    """From nothing, to more, to nothing."""
    one = torch.empty(0)
    log.watch.see(one, (), {})
    assert log.said == []
    for numel in (4, 8, 0):
        one.untyped_storage().resize_(4 * numel)
        log.watch.see(one, (one,), {})
    del one
    assert log.said == [16, -16, 32, -32]


def test_a_storage_that_was_refused_is_not_watched(log: Log) -> None:
    """Its end is nobody's business, also when it was known at another size."""
    log.limit = 16
    small, large = torch.empty(4), torch.empty(8)
    log.watch.note(small)
    with pytest.raises(MemoryError):
        log.watch.note(large)
    small.untyped_storage().resize_(64)
    with pytest.raises(MemoryError):
        log.watch.note(small)
    del small, large
    assert log.said == [16, -16]

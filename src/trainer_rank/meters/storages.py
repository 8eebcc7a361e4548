"""Which storages appear and vanish while operators run: the watch that dry runs, simulated devices and meters share.

Memory belongs to storages, not to tensors: two tensors on one storage cost once, and a result on a storage that an
argument already had (a view, an in-place result, an alias of a weight) costs nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor

Vanish = Callable[[], None]
"""Called once, when a storage is gone."""


@dataclass(slots=True, kw_only=True)
class _Watched:
    """A live storage: the weak reference that reports its end, its bytes, and whom to tell."""

    reference: weakref.ref[torch.UntypedStorage]
    nbytes: int
    vanish: Vanish


@final
class StorageWatch:
    """Tells new storages on one type of device from those that were there, each once.

    A storage that changes its size vanishes at the old one and appears at the new one.

    Args:
        device_type: As torch spells it: ``"cpu"``, ``"meta"``.
        appear: Called with the bytes of a new storage, never 0; returns what to call when it vanishes. When it raises,
            the storage is not watched.
    """

    def __init__(self, device_type: str, appear: Callable[[int], Vanish]) -> None:
        self._device_type = device_type
        self._appear = appear
        # By the storage's identity, which comes back only after the reference has fired.
        self._live: dict[int, _Watched] = {}

    def see(self, result: object, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
        """Look at what an operator returned for its arguments; return whether any of it is on the device."""
        found, given = False, None
        for tensor in _tensors(result, self._device_type):
            found = True
            key = tensor.untyped_storage()._cdata
            if key not in self._live:
                if given is None:
                    given = {old.untyped_storage()._cdata for old in _tensors((args, kwargs), self._device_type)}
                # A view of a tensor older than the watch is not a new allocation.
                if key in given:
                    continue
            self.note(tensor)
        return found

    def note(self, tensor: Tensor) -> None:
        """Watch the storage of a tensor, unless it is watched at its present size already."""
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        watched = self._live.get(key)
        if watched is None:
            vanish = self._appear(nbytes) if nbytes else _nothing
            reference = weakref.ref(storage, lambda _: self._live.pop(key).vanish())
            self._live[key] = _Watched(reference=reference, nbytes=nbytes, vanish=vanish)
        elif watched.nbytes != nbytes:
            watched.vanish()
            watched.nbytes, watched.vanish = 0, _nothing
            if nbytes:
                watched.vanish = self._appear(nbytes)
                watched.nbytes = nbytes


def run_without_mode(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what an operator gives, with the memory it takes where no dispatch mode looks on.

    Autograd, summing two gradients of one tensor, adds the second to the first in place when nobody else holds the
    first, but never under a dispatch mode, where the sum is a third tensor. With tied embeddings that would be a third
    gradient of vocabulary size.
    """
    if func is torch.ops.aten.add.Tensor and not kwargs and _accumulates_in_place(*args):
        return args[0].add_(args[1])
    return func(*args, **kwargs)


# References to a tensor and to its storage that are there when a dispatch mode looks at one that nobody else holds.
_UNSHARED_TENSOR: Final = 4
_UNSHARED_STORAGE: Final = 2


def _accumulates_in_place(one: Any, other: Any) -> bool:
    """Return whether autograd would add ``other`` to ``one`` in place without a mode."""
    return (
        torch._C._current_graph_task_id() != -1
        and not torch.is_grad_enabled()
        and isinstance(one, Tensor)
        and isinstance(other, Tensor)
        and one.shape == other.shape
        and one.dtype == other.dtype
        and one.is_contiguous()
        and one._use_count() <= _UNSHARED_TENSOR  # type: ignore[attr-defined]
        and torch._C._storage_Use_Count(one.untyped_storage()._cdata) <= _UNSHARED_STORAGE
    )


def _nothing() -> None:
    """The end of a storage that holds nothing."""


def _tensors(tree: object, device_type: str) -> Iterator[Tensor]:
    """Yield the dense tensors on a type of device in nested lists, tuples and dicts."""
    if isinstance(tree, Tensor):
        if tree.device.type == device_type and tree.layout == torch.strided:
            yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _tensors(item, device_type)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _tensors(item, device_type)

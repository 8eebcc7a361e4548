"""Tensors to the safetensors format and back, one at a time, so that saving needs no second copy of a model.

Format (https://huggingface.co/docs/safetensors): eight bytes with the length of the header, little-endian; the header,
JSON from name to dtype, shape and place; then the bytes of the tensors in the order of their places.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open
from torch import Tensor

DTYPES: Final = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file with these tensors, in pieces of at most one tensor.

    Raises:
        KeyError: A tensor is of a dtype that is not trained here.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        flat = tensor.detach().reshape(-1).cpu().contiguous()
        yield flat.view(torch.uint8).numpy().data


def copy_into(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Copy the tensors of the file ``path`` into those of the same names, bit for bit.

    Raises:
        ValueError: Names, shapes or dtypes differ; nothing was copied.
    """
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        if names != set(tensors):
            odd = sorted(names.symmetric_difference(tensors))
            raise ValueError(f"{path.name}: {len(odd)} tensors are in the file or in the model only, first {odd[0]!r}")
        for name, tensor in tensors.items():
            stored = file.get_slice(name)
            shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
            if shape != tuple(tensor.shape) or dtype != DTYPES[tensor.dtype]:
                own = (tuple(tensor.shape), DTYPES[tensor.dtype])
                raise ValueError(f"{path.name}: {name} is {(shape, dtype)} in the file and {own} in the model")
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(file.get_tensor(name))


def read(path: Path) -> dict[str, Tensor]:
    """Return all tensors of the file ``path``, on the CPU."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict

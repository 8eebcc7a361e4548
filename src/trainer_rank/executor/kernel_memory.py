"""Memory that operators allocate inside and a dry run on ``meta`` cannot see, by the device they will run on.

Attention declares its own scratch (``runtime.attention.kernels``). What is left on the CPU, measured against the
profiler's allocator events with torch 2.13: an arithmetic operator on operands of different floating dtypes computes in
the wider one. It first copies the narrower operand in full, and an in-place operator whose own tensor is the narrower
one also computes its result beside it. CUDA converts inside the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

_CASTING: Final = frozenset(f"aten::{name}{suffix}" for name in ("add", "sub", "mul", "div") for suffix in ("", "_"))


def hidden_bytes(func: Callable[..., Any], args: tuple[Any, ...], device: torch.device) -> int:
    """Return the bytes an operator allocates beside its results and gives back before it returns.

    Args:
        func: The operator, as a dispatch mode sees it.
        args: Its positional arguments.
        device: Where it will run for real.
    """
    schema = getattr(func, "_schema", None)
    if device.type != "cpu" or schema is None or schema.name not in _CASTING:
        return 0
    operands = [arg for arg in args[:2] if isinstance(arg, Tensor) and arg.dim() > 0 and arg.is_floating_point()]
    if len(operands) < 2 or operands[0].dtype == operands[1].dtype:
        return 0
    common = torch.promote_types(operands[0].dtype, operands[1].dtype)
    copied = sum(operand.numel() for operand in operands if operand.dtype != common)
    if schema.name.endswith("_") and operands[0].dtype != common:
        copied += operands[0].numel()
    return copied * common.itemsize

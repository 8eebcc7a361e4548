"""What usual GPUs really offer: bytes, multiprocessors, and what is gone before the first tensor. Imports no torch.

``usable_bytes`` is what ``torch.cuda.get_device_properties(0).total_memory`` reports, which is less than the name
says. It varies by some 0.1 GiB with driver and firmware; the figures are on the low side of those printed in public
out-of-memory reports ("GPU 0 has a total capacity of ...") and were not measured here. ``context_bytes`` is what a
CUDA context with torch's kernels takes; it was measured on the A100 and the L4 (AgileRL's memory rig) and is a cautious
round figure elsewhere. ``cublas_bytes`` is torch's default workspace, ``:4096:2:16:8``, or 32 MiB from Hopper on
(``aten/src/ATen/cuda/CublasHandlePool.cpp``).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Final

from trainer_rank.errors import ConfigError
from trainer_rank.units import GIB, MIB

_CUBLAS: Final = 2 * 4096 * 1024 + 8 * 16 * 1024
_CUBLAS_HOPPER: Final = 32 * MIB
_CONTEXT: Final = 512 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One kind of GPU.

    Attributes:
        name: Usual name.
        usable_bytes: As torch reports it.
        multiprocessors: They decide when some attention kernels split their keys.
        context_bytes: Taken by the CUDA context of one process.
        cublas_bytes: Workspace of a cuBLAS handle, allocated at the first matrix product.
        context_measured: Whether ``context_bytes`` was measured on this device.
    """

    name: str
    usable_bytes: int
    multiprocessors: int
    context_bytes: int = _CONTEXT
    cublas_bytes: int = _CUBLAS
    context_measured: bool = False


def _gib(value: float) -> int:
    return int(value * GIB)


DEVICES: Final = (
    Device(name="B200", usable_bytes=_gib(178.35), multiprocessors=148, cublas_bytes=_CUBLAS_HOPPER),
    Device(name="H200", usable_bytes=_gib(139.80), multiprocessors=132, cublas_bytes=_CUBLAS_HOPPER),
    Device(name="H100", usable_bytes=_gib(79.10), multiprocessors=132, cublas_bytes=_CUBLAS_HOPPER),
    Device(name="H100 PCIe", usable_bytes=_gib(79.10), multiprocessors=114, cublas_bytes=_CUBLAS_HOPPER),
    Device(name="A100 80GB", usable_bytes=_gib(79.14), multiprocessors=108, context_bytes=501 * MIB),
    Device(
        name="A100 40GB", usable_bytes=_gib(39.38), multiprocessors=108, context_bytes=501 * MIB, context_measured=True
    ),
    Device(name="A6000", usable_bytes=_gib(47.40), multiprocessors=84),
    Device(name="L40S", usable_bytes=_gib(44.39), multiprocessors=142),
    Device(name="L4", usable_bytes=_gib(21.95), multiprocessors=58, context_bytes=226 * MIB, context_measured=True),
    Device(name="A10G", usable_bytes=_gib(21.98), multiprocessors=80),
    Device(name="RTX 5090", usable_bytes=_gib(31.36), multiprocessors=170),
    Device(name="RTX 4090", usable_bytes=_gib(23.52), multiprocessors=128),
    Device(name="RTX 3090", usable_bytes=_gib(23.56), multiprocessors=82),
    Device(name="T4", usable_bytes=_gib(14.56), multiprocessors=40),
    Device(name="V100 32GB", usable_bytes=_gib(31.73), multiprocessors=80),
    Device(name="V100 16GB", usable_bytes=_gib(15.77), multiprocessors=80),
)

# Words of a vendor's full name that tell nothing, and other spellings of what does.
_NOISE: Final = ("nvidia", "geforce", "tesla", "sxm5", "sxm4", "sxm2", "sxm", "hbm3e", "hbm3", "hbm2e", "gb", "gib")
_ALIASES: Final = {"h20014": "h200", "h200141": "h200", "h10080": "h100", "a100": "a10080", "v100": "v10016",
                   "rtxa6000": "a6000", "4090": "rtx4090", "3090": "rtx3090", "5090": "rtx5090"}  # fmt: skip


def find_device(name: str) -> Device:
    """Return the device of a name, in any case and with or without the vendor's words ("NVIDIA A100-SXM4-40GB").

    Raises:
        ConfigError: There is no such device; the message names the nearest.
    """
    known = {_plain(device.name): device for device in DEVICES}
    wanted = _plain(name)
    wanted = _ALIASES.get(wanted, wanted)
    if wanted in known:
        return known[wanted]
    near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.4)
    nearest = ", ".join(known[key].name for key in near) or ", ".join(device.name for device in DEVICES)
    raise ConfigError(f"device must be a known GPU, got {name!r}; nearest: {nearest}. Or give its memory in bytes")


def _plain(name: str) -> str:
    text = name.lower()
    for word in _NOISE:
        text = text.replace(word, "")
    return "".join(character for character in text if character.isalnum())

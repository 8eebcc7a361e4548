"""What usual GPUs really offer: bytes, multiprocessors, and what is gone before the first tensor. Imports no torch.

``usable_bytes`` is the device's total as torch sees it: ``torch.cuda.mem_get_info``, and "has a total capacity of" in
its out-of-memory errors. It is less than the name says and varies by some 0.1 GiB with driver and firmware. Two come
from recorded runs on the device (AgileRL's memory rig, Apache-2.0). The others are the low end of what public logs
print, as properties (``_CudaDeviceProperties``) or in errors; ``usable_source`` quotes the figures seen.

``context_bytes`` is what a CUDA context with torch's kernels takes. It was measured on the same two devices; elsewhere
512 MiB is a cautious round figure.

``cublas_bytes`` is torch's workspace for one cuBLAS handle and stream (``parseChosenWorkspaceSize`` in
``aten/src/ATen/cuda/CublasHandlePool.cpp``): ``:4096:2:16:8``, and 32 MiB on Hopper and Blackwell.
Multiprocessors are those that ``_CudaDeviceProperties`` prints, or the vendor's data sheet.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Final

from trainer_rank.errors import ConfigError
from trainer_rank.units import GIB, MIB

_CUBLAS: Final = (2 * 4096 + 8 * 16) * 1024
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
        cublas_bytes: Workspace of one cuBLAS handle.
        usable_source: Where ``usable_bytes`` is from.
        measured: Whether both ``usable_bytes`` and ``context_bytes`` were measured on this device.
    """

    name: str
    usable_bytes: int
    multiprocessors: int
    context_bytes: int = _CONTEXT
    cublas_bytes: int = _CUBLAS
    usable_source: str = "given by the caller"
    measured: bool = False


def _gib(value: float) -> int:
    return int(value * GIB)


DEVICES: Final = (
    Device(
        name="B200", usable_bytes=_gib(178.35), multiprocessors=148, cublas_bytes=_CUBLAS_HOPPER,
        usable_source="properties: 182631MB, 182642MB; errors: 178.35, 178.36 GiB",
    ),
    Device(
        name="H200", usable_bytes=_gib(139.80), multiprocessors=132, cublas_bytes=_CUBLAS_HOPPER,
        usable_source="properties: 143156MB; errors: 139.80, 139.81 GiB (139.72 once)",
    ),
    Device(
        name="H100", usable_bytes=_gib(79.10), multiprocessors=132, cublas_bytes=_CUBLAS_HOPPER,
        usable_source="properties: 81082MB, 81089MB, 81090MB; lowered to the PCIe card's",
    ),
    Device(
        name="H100 PCIe", usable_bytes=_gib(79.10), multiprocessors=114, cublas_bytes=_CUBLAS_HOPPER,
        usable_source="properties: 81008MB",
    ),
    Device(
        name="A100 80GB", usable_bytes=_gib(79.14), multiprocessors=108, context_bytes=501 * MIB,
        usable_source="errors: 79.14, 79.15, 79.25 GiB; context of the A100 40GB",
    ),
    Device(
        name="A100 40GB", usable_bytes=42_404_806_656, multiprocessors=108, context_bytes=501 * MIB,
        usable_source="AgileRL memory rig, total_bytes", measured=True,
    ),
    Device(
        name="A6000", usable_bytes=_gib(47.40), multiprocessors=84,
        usable_source="properties: 48676MB; errors: 47.40, 47.41, 47.43 GiB",
    ),
    Device(
        name="L40S", usable_bytes=_gib(44.39), multiprocessors=142,
        usable_source="properties: 45589MB; errors: 44.39, 44.40 GiB",
    ),
    Device(
        name="L4", usable_bytes=23_659_151_360, multiprocessors=58, context_bytes=226 * MIB,
        usable_source="AgileRL memory rig, total_bytes", measured=True,
    ),
    Device(
        name="A10G", usable_bytes=_gib(21.98), multiprocessors=80,
        usable_source="properties: 22587MB; errors: 21.98 GiB",
    ),
    Device(
        name="RTX 5090", usable_bytes=_gib(31.34), multiprocessors=170, cublas_bytes=_CUBLAS_HOPPER,
        usable_source="errors: 31.34, 31.36, 31.37, 31.39 GiB",
    ),
    Device(
        name="RTX 4090", usable_bytes=_gib(23.51), multiprocessors=128,
        usable_source="errors: 23.51, 23.52 GiB",
    ),
    Device(
        name="RTX 3090", usable_bytes=_gib(23.56), multiprocessors=82,
        usable_source="properties: 24259MB, 24575MB; errors: 23.56 GiB",
    ),
    Device(
        name="T4", usable_bytes=_gib(14.56), multiprocessors=40,
        usable_source="properties: 14930MB, 15079MB, 15109MB; errors: 14.56, 14.57 GiB",
    ),
    Device(
        name="V100 32GB", usable_bytes=_gib(31.73), multiprocessors=80,
        usable_source="errors: 31.73, 31.74 GiB",
    ),
    Device(
        name="V100 16GB", usable_bytes=_gib(15.75), multiprocessors=80,
        usable_source="properties: 16130MB, 16160MB",
    ),
)  # fmt: skip

# Words of a vendor's full name that tell nothing, and other spellings of what does.
_NOISE: Final = ("nvidia", "geforce", "tesla", "sxm5", "sxm4", "sxm2", "sxm", "hbm3e", "hbm3", "hbm2e", "gb", "gib")
_ALIASES: Final = {
    "b200180": "b200", "b200192": "b200", "h200141": "h200", "h10080": "h100", "h10080pcie": "h100pcie",
    "h100pcie80": "h100pcie", "a100": "a10080", "a10080pcie": "a10080", "a100pcie40": "a10040", "a100pcie80": "a10080",
    "rtxa6000": "a6000", "a600048": "a6000", "l40s48": "l40s", "l424": "l4", "a10g24": "a10g",
    "4090": "rtx4090", "3090": "rtx3090", "5090": "rtx5090", "t416": "t4", "v100": "v10016",
}  # fmt: skip


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

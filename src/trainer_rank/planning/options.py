"""How the planned step is trained, and the model without weights that stands for the real one.

Imports torch only to make the model, so that wrong input is refused at once.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trainer_rank.errors import ConfigError
from trainer_rank.memory import Recompute

if TYPE_CHECKING:
    from trainer_rank.runtime.transformers import TransformersRuntime

PROJECTIONS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How the step is trained.

    Attributes:
        model: A built-in geometry, or a folder with ``config.json``.
        lora_rank: Rank of the adapters; None trains every parameter.
        lora_targets: Layers that get one.
        recompute, dtype: As for the runtime.
        head_chunk_rows, max_packed_tokens, caller_bytes_per_token: As for ``TrainerRank``.
    """

    model: str
    lora_rank: int | None = 16
    lora_targets: tuple[str, ...] = PROJECTIONS
    recompute: Recompute = "full"
    dtype: str = "bfloat16"
    head_chunk_rows: int = 512
    max_packed_tokens: int | None = None
    caller_bytes_per_token: int = 256


def make_runtime(options: Options) -> TransformersRuntime:
    """Return the model on ``meta``, standing for one on a CUDA device.

    Raises:
        ConfigError: The model is unknown, its folder holds no configuration, or an adapter's target does not exist.
        UnsupportedModelError: The model cannot be run as prefix trees.
    """
    from trainer_rank.runtime.transformers import LoraConfig, TransformersRuntime

    lora = None
    if options.lora_rank is not None:
        lora = LoraConfig(r=options.lora_rank, target_modules=list(options.lora_targets))
    return TransformersRuntime.from_config(
        _config(options.model), lora=lora, recompute=options.recompute, dtype=options.dtype, stands_for="cuda"
    )


def _config(model: str) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    path = Path(model)
    if path.exists():
        folder = path.parent if path.name == "config.json" else path
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model must be a folder with config.json, and {model} has none")
        try:
            return AutoConfig.from_pretrained(folder)
        # What a configuration that contradicts itself raises depends on where the library first trips over it.
        except (OSError, ValueError, TypeError, ArithmeticError, StrictDataclassError) as error:
            raise ConfigError(
                f"model: {model!r} holds no configuration that Transformers can read: {' '.join(str(error).split())}"
            ) from error
    from trainer_rank.runtime.geometries import find_geometry

    geometry = asdict(find_geometry(model))
    return AutoConfig.for_model(geometry.pop("model_type"), **geometry)

"""A floor under the static estimate of a mixture of experts: two live outputs of the experts' down projection.

The down projection keeps its own output while the adapter beside it allocates another, each of one row per packed row
and chosen expert. The rule holds for exactly the types it was read from, run exactly as they are; anything else about
any layer zeroes the whole coefficient, and the static estimate stays as it was. It is a floor: it is never added to
another estimate, never learned, and no bound on what such a layer needs in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

OUTPUT_PAIR: Final = 2
"""The projection's output and the adapter's."""

OUTPUT_PAIR_AND_SUM: Final = 3
"""With their sum, which is made out of place while both live."""

_ELEMENT_SIZE: Final = {"float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTypes:
    """Exact types of the parts of a mixture-of-experts layer, by module and name."""

    layer: str
    experts: str
    projection: str
    adapter: str
    base: str
    router: str
    dispatcher: str


KNOWN: Final = (
    ExpertTypes(
        layer="megatron.core.transformer.moe.moe_layer.MoELayer",
        experts="megatron.core.transformer.moe.experts.TEGroupedMLP",
        projection="art.megatron.lora.MLPExpertsLinearFC2LoRA",
        adapter="art.megatron.lora.LoRA",
        base="megatron.core.extensions.transformer_engine.TERowParallelGroupedLinear",
        router="megatron.core.transformer.moe.router.TopKRouter",
        dispatcher="megatron.core.transformer.moe.token_dispatcher.MoEAlltoAllTokenDispatcher",
    ),
)
"""The rule pins the code of these types. Were the adapter to add into the projection's output in place, one output
would be live, not two, and its entry would have to go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayer:
    """One mixture-of-experts layer as it was read from a live model.

    Attributes:
        types: Exact types of its parts.
        dtype: Name of the dtype of its outputs.
        hidden_size: As configured.
        projection_size, adapter_size: Output features of the down projection, and of the adapter beside it.
        top_k, router_top_k: Experts per row as configured, and as the router chooses.
        tensor_parallel, context_parallel, expert_parallel, expert_tensor_parallel: Sizes of the parallel groups.
        has_hooks: Whether a part has a forward hook.
        has_overrides: Whether a part's forward, routing or dispatch was replaced on the instance.
        capacity_factor: Most rows of an expert over their mean; None drops none.
        pads, quantised, latent, cuda_graph: Whether rows are padded, numbers quantised, experts fed by a smaller
            projection, or the layer captured.
    """

    types: ExpertTypes
    dtype: str
    hidden_size: int
    projection_size: int
    adapter_size: int
    top_k: int
    router_top_k: int
    tensor_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    expert_tensor_parallel: int = 1
    has_hooks: bool = False
    has_overrides: bool = False
    capacity_factor: float | None = None
    pads: bool = False
    quantised: bool = False
    latent: bool = False
    cuda_graph: bool = False

    @property
    def is_known(self) -> bool:
        """Whether the rule holds for the layer."""
        parallel = (
            self.tensor_parallel, self.context_parallel, self.expert_parallel, self.expert_tensor_parallel,
        )  # fmt: skip
        return (
            self.types in KNOWN
            and self.dtype in _ELEMENT_SIZE
            and self.hidden_size == self.projection_size == self.adapter_size
            and self.top_k == self.router_top_k
            and parallel == (1, 1, 1, 1)
            and self.capacity_factor is None
            and not any((self.has_hooks, self.has_overrides, self.pads, self.quantised, self.latent, self.cuda_graph))
        )


def expert_bytes_per_row(layers: Sequence[ExpertLayer], *, live_outputs: int = OUTPUT_PAIR) -> int:
    """Return the floor's bytes per packed row, those of the layer that needs most; 0 unless every layer is known.

    Packed rows of several groups that run one after another are summed: an envelope of this part, which may refuse
    what fits, not a claim that their outputs live together.

    Args:
        layers: All mixture-of-experts layers of the model.
        live_outputs: ``OUTPUT_PAIR`` or ``OUTPUT_PAIR_AND_SUM``.
    """
    if live_outputs not in (OUTPUT_PAIR, OUTPUT_PAIR_AND_SUM):
        raise ValueError(f"live_outputs must be {OUTPUT_PAIR} or {OUTPUT_PAIR_AND_SUM}, got {live_outputs}")
    if not all(layer.is_known for layer in layers):
        return 0
    return live_outputs * max(
        (layer.top_k * layer.hidden_size * _ELEMENT_SIZE[layer.dtype] for layer in layers), default=0
    )

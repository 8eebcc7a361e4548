"""The timeline of a deep model from two shallow ones.

Every decoder layer of one kind allocates the same, so at a given place the live bytes are affine in the number of
layers below and above it: kept activations (or layer inputs) of the layers already run, gradients of the layers already
finished. A phase that visits layers therefore peaks at its first or its last layer, and both ends are affine in the
depth. Two depths give the slope; each end is carried to the full depth on its own, because which end wins can change
with depth (kept activations fall during backward while parameter gradients rise).
"""

from __future__ import annotations

from trainer_rank.memory.trace import Instant, Mark, Timeline


def extrapolate_layers(shallow: Timeline, deeper: Timeline, num_layers: int) -> Timeline:
    """Return the timeline at ``num_layers`` from timelines of the same pass at two smaller depths.

    Args:
        shallow: Fold at n layers, n >= 2.
        deeper: Fold at m > n layers.
        num_layers: Depth wanted, at least m.

    Returns:
        One instant per phase and end (first layer, last layer, or no layer), with the layer numbers of the full depth.
    """
    if not 2 <= shallow.num_layers < deeper.num_layers <= num_layers:
        raise ValueError(
            f"depths must satisfy 2 <= shallow < deeper <= wanted, got {shallow.num_layers}, {deeper.num_layers}, "
            f"{num_layers}"
        )
    low, high = _ends(shallow), _ends(deeper)
    if low.keys() != high.keys():
        missing = sorted(str(key) for key in low.keys() ^ high.keys())
        raise ValueError(f"the two depths ran different phases: {', '.join(missing)}")
    span, beyond = deeper.num_layers - shallow.num_layers, num_layers - deeper.num_layers
    instants = []
    for key, at_high in high.items():
        at_low = low[key]
        phase, end, _ = key
        layer = None if end == "" else 0 if end == "first" else num_layers - 1
        instants.append(
            Instant(
                mark=Mark(phase, layer),
                peak_bytes=_carry(at_low.peak_bytes, at_high.peak_bytes, span, beyond),
                end_bytes=_carry(at_low.end_bytes, at_high.end_bytes, span, beyond),
            )
        )
    return Timeline(instants=tuple(instants), num_layers=num_layers)


def _carry(low: int, high: int, span: int, beyond: int) -> int:
    """Return the value ``beyond`` layers past ``high``, rounded up."""
    return high + -(-(high - low) * beyond // span)


def _ends(timeline: Timeline) -> dict[tuple[str, str, int], Instant]:
    """Return the instants at the ends of the layer stack, keyed by phase, end and repetition, in order."""
    found: dict[tuple[str, str, int], Instant] = {}
    for instant in timeline.instants:
        layer = instant.mark.layer
        if layer is None:
            end = ""
        elif layer == 0:
            end = "first"
        elif layer == timeline.num_layers - 1:
            end = "last"
        else:
            continue
        repetition = 0
        while (instant.mark.phase, end, repetition) in found:
            repetition += 1
        found[instant.mark.phase, end, repetition] = instant
    return found

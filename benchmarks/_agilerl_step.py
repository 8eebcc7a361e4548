"""One update of the GPU fixtures as allocation events: traced on ``meta`` at four layers, carried to any depth.

Blocks are stretches between marks. A block of a middle layer repeats for every layer more; storages are known by block
and position, so what a layer's copy releases is what its own or its neighbour's copy allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from _agilerl_models import META, TRACED_LAYERS, Autocast, Geometry, build
from torch import Tensor, nn

from trainer_rank.executor.recorder import AllocationRecorder
from trainer_rank.memory import Event, Mark

TEMPERATURE: Final = 0.9
CLIP: Final = 0.2
BETA: Final = 0.001
_TILE_BYTES: Final = 256 << 20
_FEWEST_ROWS, _MOST_ROWS = 128, 4096
_REPEATED_FORWARDS: Final = 2
_REPEATED_STEPS: Final = 3

Operation = tuple[int, int]
"""(storage, bytes) to allocate, (storage, 0) to release; storages are numbered per program."""


@dataclass(frozen=True, slots=True)
class Block:
    """One stretch: a phase and a layer (None outside the stack), and (origin block, position, bytes) per event."""

    phase: str
    layer: int | None
    events: tuple[tuple[int, int, int], ...]


Program = tuple[Block, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The parts of an update. The last block of ``update`` releases the gradients, which all before it leaves."""

    parameters: Program
    reference: Program
    old: Program
    update: Program
    adapters: Program


def chunk_rows(vocabulary: int) -> int:
    """Return the rows of one logit tile: 256 MiB in float32."""
    return max(_FEWEST_ROWS, min(_MOST_ROWS, _TILE_BYTES // (vocabulary * 4)))


def trace_step(
    geometry: Geometry, *, rank: int, rows: int, length: int, multiprocessors: int, layers: int = TRACED_LAYERS
) -> Step:
    """Trace an update on ``rows`` sequences of ``length`` tokens; only the default depth can be carried to another."""
    model = build(geometry, rank, multiprocessors, layers)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".actor." in name)
    parameters = _parameters(model)
    head = model.base_model.model.lm_head.weight
    model.base_model.model.lm_head = nn.Identity()
    rows_of_tile = chunk_rows(geometry.vocabulary)
    ids = torch.zeros(rows, length, dtype=torch.long, device=META)
    positions = torch.zeros(rows, length, dtype=torch.long, device=META)

    def no_grad(adapter: str) -> Program:
        model.eval()
        Autocast.adapter = adapter

        def run(mark: Callable[[str, int | None], None]) -> Tensor:
            with torch.no_grad():
                with Autocast.region():
                    hidden = model(input_ids=ids, position_ids=positions, use_cache=False).logits
                mark("head", None)
                return _tiled_logprobs(hidden[:, :-1], head, rows_of_tile)

        return _record(model, run)

    def update(mark: Callable[[str, int | None], None]) -> None:
        model.train()
        Autocast.adapter = "actor"
        with Autocast.region():
            hidden = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        mark("head", None)
        logprobs = _Head.apply(hidden[:, :-1], head, rows_of_tile)  # type: ignore[no-untyped-call]
        del hidden
        loss = _loss(logprobs)
        mark("backward", None)
        loss.backward()

    step = Step(
        parameters=parameters,
        reference=no_grad("reference"),
        old=no_grad("actor"),
        update=_record(model, update, clears_gradients=True),
        adapters=tuple(block for block in _parameters(model, only=".actor.") if block.layer is not None),
    )
    model.zero_grad()
    return step


def _tiled_logprobs(hidden: Tensor, head: Tensor, rows_of_tile: int) -> Tensor:
    """Allocate what the compiled tile loop allocates: one tile in the head's dtype at a time."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    out = torch.empty(flat.shape[0], dtype=hidden.dtype, device=hidden.device)
    for first in range(0, flat.shape[0], rows_of_tile):
        tile = flat[first : first + rows_of_tile] @ head.t()
        found = torch.empty(tile.shape[0], dtype=torch.float32, device=hidden.device)
        del tile
        out[first : first + rows_of_tile].copy_(found.to(out.dtype))
    return out.reshape(hidden.shape[:2])


class _Head(torch.autograd.Function):
    """Log-probs by tiles, recomputed by tiles in backward: there a float32 tile stands beside the one of the head."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, rows_of_tile: int) -> Tensor:
        ctx.save_for_backward(hidden, head)
        ctx.rows_of_tile = rows_of_tile
        return _tiled_logprobs(hidden, head, rows_of_tile)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        hidden, head = ctx.saved_tensors
        flat = hidden.reshape(-1, hidden.shape[-1])
        result = torch.zeros_like(flat)
        for first in range(0, flat.shape[0], ctx.rows_of_tile):
            piece = slice(first, first + ctx.rows_of_tile)
            tile = flat[piece] @ head.t()
            wide = torch.empty(tile.shape, dtype=torch.float32, device=tile.device)
            # The gradient takes the place of the tile, whose last reader is the kernel that writes it.
            del wide
            result[piece] = tile @ head
            del tile
        return result.reshape(hidden.shape), None, None


def _loss(logprobs: Tensor) -> Tensor:
    """The clipped surrogate with a KL penalty and a correction for the sampler's log-probs."""
    old, reference, sampled = (torch.zeros_like(logprobs) for _ in range(3))
    mask = torch.ones(logprobs.shape, dtype=torch.bool, device=logprobs.device)
    advantages = torch.zeros(logprobs.shape[0], 1, device=logprobs.device)
    difference = reference - logprobs
    penalty = torch.exp(difference) - difference - 1
    ratio = torch.exp(logprobs - old)
    loss = -torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    correction = torch.exp((old - sampled) * mask.to(loss.dtype)).clamp(max=2.0)
    loss = loss * correction + BETA * penalty
    return ((loss * mask).sum(dim=-1) / mask.sum(dim=-1)).mean()


def _record(model: Any, run: Callable[..., Any], *, clears_gradients: bool = False) -> Program:
    recorder = AllocationRecorder(META, torch.device("cuda"))
    layers = model.base_model.model.model.layers
    hooks = []
    for index, layer in enumerate(layers):

        def enter(_: Any, __: Any, index: int = index) -> None:
            recorder.mark("forward", index)

        def leave(_: Any, __: Any, output: Any, index: int = index) -> None:
            output = output[0] if isinstance(output, tuple) else output
            if index == len(layers) - 1:
                recorder.mark("final", None)
            if output.requires_grad:
                output.register_hook(lambda _: recorder.mark("backward", index))

        hooks += [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave)]
    with recorder:
        recorder.mark("start")
        kept = run(recorder.mark)
        recorder.mark("end")
        del kept
        if clears_gradients:
            model.zero_grad()
    for hook in hooks:
        hook.remove()
    return _blocks(recorder.trace(TRACED_LAYERS).steps)


def _blocks(steps: Iterable[object]) -> Program:
    """Return the blocks of a trace; every event knows the block and the position of its storage's allocation."""
    found: list[tuple[Mark, list[tuple[int, int, int]]]] = []
    born: dict[int, tuple[int, int]] = {}
    position = 0
    for step in steps:
        if isinstance(step, Mark):
            if step.layer is not None and found and found[-1][0].layer == step.layer:
                continue  # recompute and backward of one layer, in turn
            found.append((step, []))
            position = 0
        elif not isinstance(step, Event):
            continue
        elif step.delta_bytes > 0:
            born[step.storage] = len(found) - 1, position
            found[-1][1].append((len(found) - 1, position, step.delta_bytes))
            position += 1
        elif step.storage in born:
            found[-1][1].append((*born[step.storage], 0))
    return tuple(Block(mark.phase, mark.layer, tuple(events)) for mark, events in found)


def _parameters(model: nn.Module, only: str = "") -> Program:
    """Return the allocation of every parameter and buffer, or those with a word in the name, as ``to`` visits them."""
    stretches: list[tuple[int | None, list[int]]] = [(None, [])]
    seen: set[int] = set()
    for name, tensor in _in_order(model):
        if id(tensor) in seen or only not in name:
            continue
        seen.add(id(tensor))
        parts = name.split(".")
        layer = int(parts[parts.index("layers") + 1]) if "layers" in parts else None
        if layer != stretches[-1][0]:
            stretches.append((layer, []))
        stretches[-1][1].append(tensor.numel() * tensor.element_size())
    return tuple(
        Block("parameters", layer, tuple((number, place, nbytes) for place, nbytes in enumerate(sizes)))
        for number, (layer, sizes) in enumerate(stretches)
    )


def _in_order(module: nn.Module, prefix: str = "") -> Iterable[tuple[str, Tensor]]:
    for name, child in module.named_children():
        yield from _in_order(child, f"{prefix}{name}.")
    yield from ((prefix + name, tensor) for name, tensor in module.named_parameters(recurse=False))
    yield from ((prefix + name, tensor) for name, tensor in module.named_buffers(recurse=False))


def at_depth(program: Program, layers: int, first_storage: int) -> tuple[list[Operation], int]:
    """Return the operations of ``program`` for a stack of ``layers`` layers and the next free storage number.

    Layers 0, 1 and the last are copies of themselves; all others of layer 2. Releases are resolved relative to the
    layer, so a copy releases what the matching copy allocated.
    """
    order = _instances(program, layers)
    numbers: dict[tuple[str, int | None, int], int] = {}
    operations: list[Operation] = []
    number = first_storage
    for origin, layer in order:
        for home, place, nbytes in program[origin].events:
            if nbytes:
                numbers[_key(program, origin, layer, place)] = number
                operations.append((number, nbytes))
                number += 1
                continue
            keys = [_key(program, home, target, place) for target in _targets(program, origin, layer, home, layers)]
            # What the last of the middle layers leaves to a later block, the others have released to their neighbour.
            live = [key for key in keys if key in numbers]
            if not live:
                raise ValueError(f"{program[origin].phase} of layer {layer} releases what is not there: {keys}")
            operations += [(numbers.pop(key), 0) for key in live]
    return operations, number


def operations(step: Step, layers: int, *, group: int, rows: int, length: int) -> list[Operation]:
    """Return the allocations of one update on ``group`` sequences, ``rows`` at a time, from an empty allocator.

    Weights move to the device; the log-probs of reference and old policy follow in forwards of ``rows`` sequences; then
    an optimizer step per ``rows`` sequences, whose first creates the moments. Repetitions beyond those that change the
    allocator's state are left out.
    """
    run = _Run(layers)
    run.add(step.parameters)
    for nbytes in (group * length * 8, group * (length - 1), group * 4, group * 4):
        run.allocate(nbytes)
    doubled = [run.allocate(2 * group * length * itemsize) for itemsize in (8, 1, 8)]
    run.allocate(2 * group * (length - 1) * 2)
    parts = -(-group // rows)
    for program in (step.reference, step.old):
        for _ in range(min(parts, _REPEATED_FORWARDS)):
            run.add(program)
    run.release(doubled)
    adapters = [nbytes for _, nbytes in at_depth(step.adapters, layers, 0)[0]]
    for index in range(min(parts, _REPEATED_STEPS)):
        run.add(step.update[:-1])
        if index == 0:
            for nbytes in adapters:
                run.allocate(nbytes)
                run.allocate(nbytes)
        # The multi-tensor AdamW holds the square roots of all second moments at once.
        run.release([run.allocate(nbytes) for nbytes in adapters])
        run.release_gradients()
    return run.operations


class _Run:
    """Operations so far."""

    def __init__(self, layers: int) -> None:
        self.operations: list[Operation] = []
        self._layers = layers
        self._next = 0
        self._left: list[int] = []

    def add(self, program: Program) -> None:
        found, self._next = at_depth(program, self._layers, self._next)
        self.operations += found
        held: dict[int, None] = {}
        for storage, nbytes in found:
            if nbytes:
                held[storage] = None
            else:
                del held[storage]
        self._left = list(held)

    def allocate(self, nbytes: int) -> int:
        self.operations.append((self._next, nbytes))
        self._next += 1
        return self._next - 1

    def release(self, storages: Iterable[int]) -> None:
        self.operations += [(storage, 0) for storage in storages]

    def release_gradients(self) -> None:
        """Release what the last program left: the gradients."""
        self.release(self._left)
        self._left = []


def as_traced(program: Program) -> list[Operation]:
    """Return the operations of ``program`` at the depth it was traced at."""
    numbers: dict[tuple[int, int], int] = {}
    found: list[Operation] = []
    for block in program:
        for home, place, nbytes in block.events:
            found.append((numbers.setdefault((home, place), len(numbers)), nbytes))
    return found


def _key(program: Program, block: int, layer: int | None, place: int) -> tuple[str, int | None, int]:
    """Return how a storage is known: phase and repetition of its block, layer at full depth, position."""
    phase = program[block].phase
    if layer is None:
        return f"{phase}@{block}", None, place
    return phase, layer, place


def _template(layer: int, layers: int) -> int:
    if layer < 2:
        return layer
    return TRACED_LAYERS - 1 if layer == layers - 1 else 2


def _instances(program: Program, layers: int) -> list[tuple[int, int | None]]:
    """Return (template block, layer at full depth) in running order."""
    order: list[tuple[int, int | None]] = []
    block = 0
    while block < len(program):
        layer = program[block].layer
        if layer is None:
            order.append((block, None))
            block += 1
            continue
        run = [block + offset for offset in range(TRACED_LAYERS)]
        at = {program[index].layer: index for index in run}
        if len(at) != TRACED_LAYERS or {program[index].phase for index in run} != {program[block].phase}:
            raise ValueError("the layers of a phase are not one run of blocks")
        whole = range(layers) if layer == 0 else range(layers - 1, -1, -1)
        order += [(at[_template(index, layers)], index) for index in whole]
        block += TRACED_LAYERS
    return order


def _targets(program: Program, origin: int, layer: int | None, home: int, layers: int) -> Sequence[int | None]:
    """Return the layers whose copy of a storage a release means."""
    traced_home, traced_here = program[home].layer, program[origin].layer
    if traced_home is None:
        return [None]
    if traced_here is None or layer is None:
        return {0: [0], 1: [1], 2: list(range(2, layers - 1)), TRACED_LAYERS - 1: [layers - 1]}[traced_home]
    return [layer + traced_home - traced_here]

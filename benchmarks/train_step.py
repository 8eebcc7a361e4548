"""One training step: prefix trees against one-by-one, a dense mask and many short branches.

    python benchmarks/train_step.py [--quick] [--output DIR]

A random 4-layer Qwen3 of hidden size 256 and Qwen3's own feed-forward ratio of 3, float32, every parameter trained, one
thread. The rival of the speed-ups is the library's own model with its own attention, one request at a time, with the
vocabulary projected on the scored rows only. Both sides allocate through the memory meter that a rank installs (without
it, page faults take a quarter of our step and a tenth of the rival's). Work is forward, loss and backward; times are
process CPU seconds, interleaved run by run. The ideal is the ratio of logical to packed rows.

Rivals in the same run: one padded batch, a dense mask, and keys and values copied per path, which is the layout of
TRL's tree rows and, on two levels, of PrefixGrouper, through the library's fused attention because their own kernels
need CUDA. The packages themselves are not installed. Their layouts timed elsewhere on a machine of this class: prompt
1,024 + 8 x 128, best 3.6x (PrefixGrouper), 3.0x (TRL's tree rows); depth-3 tree, best 1.58x (TRL's tree rows); prompt
2,048 + 64 x 16, 243 MiB (masks) to 740 MiB (keys copied per path).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from _harness import finish, pin_threads, quick, target

pin_threads(1)

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402
from transformers.utils import logging  # noqa: E402

from trainer_rank.executor.run import run_forward  # noqa: E402
from trainer_rank.meters import open_meter  # noqa: E402
from trainer_rank.planner import PassWork, pass_work  # noqa: E402
from trainer_rank.prefix import Layout  # noqa: E402
from trainer_rank.requests import IGNORED, Request  # noqa: E402
from trainer_rank.runtime.attention import dense_mask  # noqa: E402
from trainer_rank.runtime.transformers import TransformersRuntime  # noqa: E402

logging.set_verbosity_error()

VOCABULARY = 1024
REPEATS = 1 if quick() else 7
SCALE = 8 if quick() else 1


def model(num_layers: int) -> Qwen3ForCausalLM:
    """Return the random model with the library's own attention."""
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=256, num_hidden_layers=num_layers, num_attention_heads=8, num_key_value_heads=2, head_dim=32,
        intermediate_size=768, vocab_size=VOCABULARY, max_position_embeddings=8192, tie_word_embeddings=False,
    )  # fmt: skip
    return Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa")


class Trees:
    """Requests as one packed pass."""

    def __init__(self, requests: Sequence[Request], *, num_layers: int, recompute: str, layout: Layout | None) -> None:
        self.runtime = TransformersRuntime(model(num_layers), recompute=recompute)  # type: ignore[arg-type]
        self.work: PassWork = pass_work(requests, range(len(requests)), layout)

    def step(self) -> None:
        """Forward, loss, backward."""
        loss = self.forward()
        loss.backward()
        clear(self.runtime.trainable_parameters())

    def forward(self) -> Tensor:
        """Return the loss with its graph."""
        result = run_forward(self.runtime, self.work, head_chunk_rows=512, map_error=lambda error: error)
        return -torch.stack([logprobs.sum() for logprobs in result.logprobs]).sum()


class OneByOne:
    """The library's model, one request at a time, head on the scored rows."""

    def __init__(self, requests: Sequence[Request], *, num_layers: int, recompute: str) -> None:
        self.model = model(num_layers).train()
        if recompute == "full":
            self.model.activation_checkpointing_enable({"use_reentrant": False})
        self.requests = [
            (torch.from_numpy(request.tokens.copy())[None], torch.from_numpy(request.labels.copy()))
            for request in requests
        ]

    def step(self) -> None:
        """Forward, loss and backward of each request."""
        for tokens, labels in self.requests:
            hidden = self.model.model(input_ids=tokens, use_cache=False).last_hidden_state[0]
            scored = labels != IGNORED
            logits = self.model.lm_head(hidden[scored])
            loss = torch.nn.functional.cross_entropy(logits, labels[scored], reduction="sum")
            loss.backward()
        clear(self.model.parameters())


class PaddedBatch:
    """The library's model on all requests as one batch, padded on the right, head on the scored rows."""

    def __init__(self, requests: Sequence[Request], *, num_layers: int) -> None:
        self.model = model(num_layers).train()
        longest = max(request.num_tokens for request in requests)
        self.tokens = torch.zeros(len(requests), longest, dtype=torch.int64)
        self.labels = torch.full((len(requests), longest), IGNORED)
        for row, one in enumerate(requests):
            self.tokens[row, : one.num_tokens] = torch.from_numpy(one.tokens.copy())
            self.labels[row, : one.num_tokens] = torch.from_numpy(one.labels.copy())

    def step(self) -> None:
        """Forward, loss, backward. Padding is on the right, where a causal model's scored rows cannot see it."""
        hidden = self.model.model(input_ids=self.tokens, use_cache=False).last_hidden_state
        scored = self.labels != IGNORED
        logits = self.model.lm_head(hidden[scored])
        torch.nn.functional.cross_entropy(logits, self.labels[scored], reduction="sum").backward()
        clear(self.model.parameters())


def clear(parameters: Sequence[Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = None


def request(*parts: np.ndarray, trained: int) -> Request:
    """Return a request of concatenated parts with its last ``trained`` tokens scored."""
    tokens = np.concatenate(parts)
    return Request.next_token(tokens, trained=np.arange(tokens.size) >= tokens.size - trained)


def tokens(size: int, draw: np.random.Generator) -> np.ndarray:
    return draw.integers(0, VOCABULARY, max(1, size // SCALE))


def flat(prompt: int, lengths: Sequence[int], seed: int = 0) -> list[Request]:
    """Return one prompt with branches of the given lengths."""
    draw = np.random.default_rng(seed)
    root = tokens(prompt, draw)
    branches = [draw.integers(0, VOCABULARY, length) for length in lengths]
    return [request(root, branch, trained=branch.size) for branch in branches]


def binary(sizes: Sequence[int], trained: int, seed: int = 0) -> list[Request]:
    """Return the leaves of a binary tree whose levels have the given sizes, with their last tokens scored."""
    draw = np.random.default_rng(seed)
    paths = [[tokens(sizes[0], draw)]]
    for size in sizes[1:]:
        paths = [[*path, tokens(size, draw)] for path in paths for _ in range(2)]
    return [request(*path, trained=trained // SCALE) for path in paths]


def interleaved(runs: Sequence[Callable[[], None]], repeats: int) -> list[list[float]]:
    """Return CPU seconds of each run, taken in turn after one uncounted round."""
    times: list[list[float]] = [[] for _ in runs]
    for number in range(repeats + 1):
        for run, kept in zip(runs, times, strict=True):
            begin = time.process_time()
            run()
            if number:
                kept.append(time.process_time() - begin)
    return times


def compare(name: str, ours: Callable[[], None], rival: Callable[[], None], note: str) -> float:
    """Return the median over pairs of rival time by our time."""
    mine, theirs = interleaved([ours, rival], REPEATS)
    ratio = statistics.median(b / a for a, b in zip(mine, theirs, strict=True))
    print(f"{name:16s} ours {statistics.median(mine):7.3f} s   rival {statistics.median(theirs):7.3f} s   "
          f"rival/ours {ratio:5.2f}   {note}", flush=True)  # fmt: skip
    return ratio


def speedup(name: str, requests: Sequence[Request], num_layers: int = 4) -> float:
    """Return one-by-one time by ours, recompute off in both."""
    ours = Trees(requests, num_layers=num_layers, recompute="none", layout=None)
    rival = OneByOne(requests, num_layers=num_layers, recompute="none")
    ideal = ours.work.batch.sharing_ratio
    return compare(name, ours.step, rival.step, f"{ours.work.batch.packed_rows} packed rows, ideal {ideal:.2f}")


def saved_mib(trees: Trees) -> float:
    """Return MiB of distinct storages saved for backward, parameters excluded."""
    parameters = {parameter.untyped_storage()._cdata for parameter in trees.runtime.trainable_parameters()}
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = trees.forward()
    total = sum(saved.values()) / 2**20
    loss.backward()
    clear(trees.runtime.trainable_parameters())
    return total


Attention = Callable[[Tensor, Tensor, Tensor, object, float], Tensor]


def masked(trees: Trees) -> Callable[[], None]:
    """Return the same step with a dense mask in place of the tree's calls."""
    batch = trees.work.batch
    mask = dense_mask(batch.segment_start, batch.segment_stop, batch.subtree_stop)

    def attention(q: Tensor, k: Tensor, v: Tensor, bound: object, scale: float) -> Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        return out.transpose(1, 2)

    return with_attention(trees, attention)


def per_path(trees: Trees) -> Callable[[], None]:
    """Return the same step with each segment's keys and values copied from its whole path.

    The layout of TRL's tree rows, and on two levels that of PrefixGrouper, whose own kernels need CUDA; here each
    segment is one call of the library's fused attention.
    """
    batch = trees.work.batch
    calls = []
    for number in range(batch.num_segments):
        path, segment = [], number
        while segment >= 0:
            path.append(np.arange(batch.segment_start[segment], batch.segment_stop[segment]))
            segment = int(batch.segment_parent[segment])
        keys = torch.from_numpy(np.concatenate(path[::-1]))
        start, stop = int(batch.segment_start[number]), int(batch.segment_stop[number])
        mask = torch.ones(stop - start, keys.numel(), dtype=torch.bool).tril(keys.numel() - (stop - start))
        calls.append((start, stop, keys, None if keys.numel() == stop - start else mask))

    def attention(q: Tensor, k: Tensor, v: Tensor, bound: object, scale: float) -> Tensor:
        parts = [
            torch.nn.functional.scaled_dot_product_attention(
                q[:, :, start:stop], k.index_select(2, keys), v.index_select(2, keys), attn_mask=mask,
                is_causal=mask is None, scale=scale, enable_gqa=True,
            )
            for start, stop, keys, mask in calls
        ]  # fmt: skip
        return torch.cat(parts, 2).transpose(1, 2)

    return with_attention(trees, attention)


def with_attention(trees: Trees, attention: Attention) -> Callable[[], None]:
    """Return the step of ``trees`` with its attention replaced."""

    def step() -> None:
        import trainer_rank.runtime.transformers as runtime

        own, runtime.tree_attention = runtime.tree_attention, attention  # type: ignore[assignment]
        try:
            trees.step()
        finally:
            runtime.tree_attention = own

    return step


def main() -> None:
    open_meter("cpu", "16GiB")
    figures: dict[str, float] = {}
    figures["flat_speedup"] = speedup("flat", flat(1024, [128 // SCALE] * 8))
    group = flat(1024, [128 // SCALE] * 8)
    figures["flat_vs_padded"] = compare(
        "flat, padded",
        Trees(group, num_layers=4, recompute="none", layout=None).step,
        PaddedBatch(group, num_layers=4).step,
        "rival: one padded batch",
    )
    grouped = Trees(group, num_layers=4, recompute="none", layout=None)
    figures["flat_vs_paths"] = compare("flat, paths", grouped.step, per_path(grouped), "rival: keys copied per path")
    leaves = binary([512, 256, 256, 384], trained=128)
    figures["tree_speedup"] = speedup("binary tree", leaves)
    deep = Trees(leaves, num_layers=4, recompute="none", layout=None)
    figures["tree_vs_paths"] = compare("tree, paths", deep.step, per_path(deep), "rival: keys copied per path")

    branchy = Trees(flat(2048, [16] * (64 // SCALE)), num_layers=2, recompute="none", layout=None)
    figures["saved_mib"] = saved_mib(branchy)
    figures["branchy_vs_mask"] = 1 / compare(
        "branchy", branchy.step, masked(branchy), f"rival: dense mask; {figures['saved_mib']:.0f} MiB saved"
    )

    draw = np.random.default_rng(1)
    ragged = draw.integers(1, 17, 1024 // SCALE).tolist()
    total = sum(ragged)
    even = [total // 32 + (number < total % 32) for number in range(32)]
    short = Trees(flat(512, ragged), num_layers=4, recompute="none", layout=Layout.full_sharing())
    long = Trees(flat(512, even), num_layers=4, recompute="none", layout=Layout.full_sharing())
    figures["short_branches"] = 1 / compare(
        "short branches", short.step, long.step, f"rival: 32 branches of the same {total} rows"
    )

    apart = [request(draw.integers(0, VOCABULARY, 512 // SCALE), trained=128 // SCALE) for _ in range(8)]
    figures["unshared"] = 1 / speedup("nothing shared", apart)

    finish(
        "train_step",
        figures,
        [
            target("flat_speedup", "ge", 3.8),
            target("tree_speedup", "ge", 1.9),
            target("saved_mib", "le", 180),
            target("branchy_vs_mask", "le", 0.6),
            target("short_branches", "le", 1.15),
            target("unshared", "le", 1.03),
        ],
    )


if __name__ == "__main__":
    main()

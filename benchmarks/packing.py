"""Tree, layout choice and packing from int64 arrays, on one core.

A batch is groups of 64 completions: 512 system tokens shared by all, 1,024 prompt tokens per group, 512 per completion,
requests in random order.

Figures: ``seconds_<n>``, process CPU seconds for one batch of n requests, and the same by stage; ``growth``, time per
request at the largest size over time per request at the smallest. For ``growth`` the small side runs as many different
batches as hold the same number of requests, in turn with the large one, so that both sides read their tokens from
memory rather than one of them from cache.
"""

from __future__ import annotations

from _harness import finish, median_seconds, paired_medians, pin_threads, quick, target

pin_threads(1)

import numpy as np  # noqa: E402

from trainer_rank.prefix import IntArray, build_tree, choose_layout, pack  # noqa: E402

SYSTEM_TOKENS, PROMPT_TOKENS, COMPLETION_TOKENS, COMPLETIONS = 512, 1024, 512, 64
VOCABULARY = 151_936

RIVALS = (
    "For orientation, the closest system on 4,096 requests, measured elsewhere: tree 2.3 s, layout search 14.6 s, "
    "pack 5.1 s."
)


def batch(groups: int, seed: int) -> list[IntArray]:
    """Return the requests of ``groups`` groups, shuffled."""
    random = np.random.default_rng(seed)
    system = random.integers(0, VOCABULARY, SYSTEM_TOKENS)
    rows = []
    for _ in range(groups):
        prompt = np.concatenate([system, random.integers(0, VOCABULARY, PROMPT_TOKENS)])
        rows += [
            np.concatenate([prompt, random.integers(0, VOCABULARY, COMPLETION_TOKENS)]) for _ in range(COMPLETIONS)
        ]
    return [rows[index] for index in random.permutation(len(rows)).tolist()]


def plan(rows: list[IntArray]) -> None:
    """Do all that is measured."""
    tree = build_tree(rows)
    pack(tree, choose_layout(tree))


def measure(rows: list[IntArray], groups: int, repeats: int) -> dict[str, float]:
    """Return the figures of one size and print them."""
    tree = build_tree(rows)
    layout = choose_layout(tree)
    packed = pack(tree, layout)
    expected = SYSTEM_TOKENS + groups * (PROMPT_TOKENS + COMPLETIONS * COMPLETION_TOKENS)
    if packed.packed_rows != expected:
        raise AssertionError(f"{packed.packed_rows} packed rows, expected {expected}")
    size = len(rows)
    figures = {
        f"seconds_{size}": median_seconds(lambda: plan(rows), repeats),
        f"tree_seconds_{size}": median_seconds(lambda: build_tree(rows), repeats),
        f"layout_seconds_{size}": median_seconds(lambda: choose_layout(tree), repeats),
        f"pack_seconds_{size}": median_seconds(lambda: pack(tree, layout), repeats),
    }
    print(
        f"{size:>6} requests  {packed.logical_tokens:>11,} logical  {packed.packed_rows:>10,} packed  "
        f"ratio {packed.sharing_ratio:.2f}  " + "  ".join(f"{value:.4f} s" for value in figures.values())
    )
    return figures


def measure_growth(small: int, large: int, repeats: int) -> float:
    """Return time per request in one batch of ``large`` groups over that in batches of ``small`` groups."""
    few = [batch(small, seed) for seed in range(large // small)]
    many = batch(large, 0)

    def one_by_one() -> None:
        for rows in few:
            plan(rows)

    return paired_medians(lambda: plan(many), one_by_one, repeats).ratio


def main() -> None:
    """Measure every size, then growth between the ends."""
    sizes = [1, 2] if quick() else [4, 64, 256]
    print("                                                                 total     tree      layout    pack")
    figures: dict[str, float] = {}
    for groups in sizes:
        figures |= measure(batch(groups, 0), groups, repeats=3 if quick() else max(5, 41 // groups))
    figures["growth"] = measure_growth(sizes[0], sizes[-1], repeats=3 if quick() else 7)
    print(f"growth {figures['growth']:.2f} from {sizes[0] * COMPLETIONS} to {sizes[-1] * COMPLETIONS} requests")
    print(RIVALS)
    finish("packing", figures, [target("seconds_4096", "le", 0.5), target("growth", "le", 1.5)])


if __name__ == "__main__":
    main()

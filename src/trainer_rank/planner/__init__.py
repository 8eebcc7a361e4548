"""Which requests go into which pass. Pure; asks only ``fits(...)``."""

from trainer_rank.planner.greedy import split_greedily
from trainer_rank.planner.work import DenseRows, HeadRows, PassWork, TopRows, head_rows, pass_work

__all__ = ["DenseRows", "HeadRows", "PassWork", "TopRows", "head_rows", "pass_work", "split_greedily"]

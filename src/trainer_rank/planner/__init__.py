"""Which requests go into which pass. Pure; asks only ``fits(...)``."""

from trainer_rank.planner.pass_bound import PassBound
from trainer_rank.planner.passes import PassPlan, plan_passes
from trainer_rank.planner.sharing import Sharing
from trainer_rank.planner.speed import Speed
from trainer_rank.planner.work import DenseRows, HeadRows, PassWork, TopRows, head_rows, pass_work

__all__ = [
    "DenseRows",
    "HeadRows",
    "PassBound",
    "PassPlan",
    "PassWork",
    "Sharing",
    "Speed",
    "TopRows",
    "head_rows",
    "pass_work",
    "plan_passes",
]

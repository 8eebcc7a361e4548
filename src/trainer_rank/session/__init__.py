"""The training rank: wires requests, plans, prices, admission and execution. The only mutable object."""

from trainer_rank.session.call import MicroBatches, Skipped
from trainer_rank.session.micro_batch import MicroBatch, MicroBatchStats, Result, TopK
from trainer_rank.session.rank import TrainerRank
from trainer_rank.session.split import SplitPart

__all__ = ["MicroBatch", "MicroBatchStats", "MicroBatches", "Result", "Skipped", "SplitPart", "TopK", "TrainerRank"]

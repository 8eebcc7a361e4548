"""What was learned, kept from one process to the next."""

from trainer_rank.store.entry import SPEED, Entry, digest_of
from trainer_rank.store.learned_store import LearnedStore, default_path

__all__ = ["SPEED", "Entry", "LearnedStore", "default_path", "digest_of"]

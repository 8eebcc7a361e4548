"""What was learned, kept from one process to the next."""

from trainer_rank.store.learned_store import SPEED, Entry, LearnedStore, default_path, digest_of

__all__ = ["SPEED", "Entry", "LearnedStore", "default_path", "digest_of"]

"""What was learned, kept from one process to the next."""

from trainer_rank.store.learned_store import Entry, LearnedStore, default_path, digest_of

__all__ = ["Entry", "LearnedStore", "default_path", "digest_of"]

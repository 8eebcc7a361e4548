"""What a caller asks for and gets back. Validated once, at construction; no torch."""

from trainer_rank.requests.nesting import AtomicGroup, Flat, cut, flatten, restore
from trainer_rank.requests.normalise import NORMALISATIONS, Normaliser, normaliser
from trainer_rank.requests.request import BASE, IGNORED, Request

__all__ = [
    "BASE",
    "IGNORED",
    "NORMALISATIONS",
    "AtomicGroup",
    "Flat",
    "Normaliser",
    "Request",
    "cut",
    "flatten",
    "normaliser",
    "restore",
]

"""Prices passes by an envelope that is made once per signature from a few dry runs.

A signature is everything the memory of a pass depends on beside its features: the model, its adapter and dtype, the
recompute mode, the kernel, and whether gradients are wanted. An envelope is checked against passes that had no part in
making it; one that fails is not used, and passes are then run dry one by one, which is slower but never guesses.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainer_rank.errors import EnvelopeError
from trainer_rank.executor.dry_run import DEEPER, SHALLOW, TWO_KINDS, DryRunPricer, mode_of, price_of, two_kinds
from trainer_rank.executor.envelope_store import EnvelopeStore
from trainer_rank.executor.pass_features import all_calls, pass_features
from trainer_rank.executor.sample_passes import SamplePasses
from trainer_rank.memory import Envelope, PassFeatures, Price, Recompute, Timeline, TracedPass, category_names, solve
from trainer_rank.planner import PassWork
from trainer_rank.runtime import Runtime

MOST_BELOW: Final = 0.001
"""Share of the traced peak by which an envelope may fall short of a held-out pass."""

MOST_ABOVE: Final = 0.01
"""Share of the traced peak by which it may exceed it."""

DRY_RUNS_FIRST: Final = 12
"""Shapes run dry before an envelope is made: about as long as making it takes."""

# Rows per chunk in the traced passes: small, so that they have several.
_SAMPLE_CHUNK_ROWS: Final = 48


@dataclass(frozen=True, slots=True)
class _Signature:
    """What changes within the life of a pricer."""

    recompute: Recompute
    no_grad: bool
    adapter: str | None
    recomputed: int | None = None


TracedByKind = dict[tuple[object, ...], tuple[list[TracedPass], list[TracedPass]]]
"""Passes to solve for, and passes held out, by what their layers do in backward; whatever the number that run again."""


class EnvelopePricer:
    """Prices passes of one runtime.

    Args:
        runtime: The live model; only its twins on ``meta`` run.
        head_chunk_rows: As the executor will use it.
        caller_bytes_per_token: Declared peak of the caller's own loss, in bytes per logical token of a pass, beyond
            the built-in losses that the traces include.
        store: Keeps envelopes across processes; None keeps them in this one.
        dry_runs_first: Shapes of one signature to run dry before an envelope is made for it.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        head_chunk_rows: int,
        caller_bytes_per_token: int,
        store: EnvelopeStore | None = None,
        dry_runs_first: int = DRY_RUNS_FIRST,
    ) -> None:
        self._runtime = runtime
        self._head_chunk_rows = head_chunk_rows
        self._caller_bytes_per_token = caller_bytes_per_token
        self._store = store
        self._dry = DryRunPricer(
            runtime, head_chunk_rows=head_chunk_rows, caller_bytes_per_token=caller_bytes_per_token
        )
        self._dry_runs_first = dry_runs_first
        self._shapes: dict[_Signature, set[str]] = {}
        # As solved, and with the caller's bytes.
        self._bare: dict[_Signature, Envelope | None] = {}
        self._envelopes: dict[_Signature, Envelope | None] = {}
        self._traced: TracedByKind = {}

    @property
    def caller_bytes_per_token(self) -> int:
        """Declared or traced bytes of the caller's own loss, per logical token."""
        return self._caller_bytes_per_token

    @caller_bytes_per_token.setter
    def caller_bytes_per_token(self, value: int) -> None:
        self._caller_bytes_per_token = value
        self._dry = DryRunPricer(self._runtime, head_chunk_rows=self._head_chunk_rows, caller_bytes_per_token=value)
        self._envelopes = {
            signature: None if bare is None else bare.with_caller(value) for signature, bare in self._bare.items()
        }

    @property
    def surroundings(self) -> dict[str, object]:
        """What decides the price of a pass beside its model and its features, as it is now."""
        return {
            "recompute": self._runtime.recompute,
            "head_chunk_rows": self._head_chunk_rows,
            "caller_bytes_per_token": self._caller_bytes_per_token,
        }

    def price(self, work: PassWork) -> Price:
        """Return the price of a pass."""
        envelope = self._envelope_for(work)
        if envelope is None:
            return self._dry.price(work)
        features = self.features(work)
        return envelope.price(features) if envelope.covers(features) else self._dry.price(work)

    def required_bytes(self, candidates: Sequence[PassFeatures], *, no_grad: bool = False) -> NDArray[np.int64]:
        """Return (N,) int64, the required bytes of candidates with features from ``features``, all at once.

        Raises:
            EnvelopeError: There is no envelope for them, or a pass makes a kind of call that was never traced.
        """
        envelope = self.envelope(no_grad=no_grad)
        if envelope is None:
            raise EnvelopeError("the envelope of this model failed its check; price passes one by one")
        return envelope.required_bytes(candidates)

    def timeline(self, work: PassWork) -> Timeline:
        """Return the allocation timeline of a pass, from a dry run; the caller's declared bytes are not in it."""
        return self._dry.timeline(work)

    def features(self, work: PassWork) -> PassFeatures:
        """Return the features of a pass."""
        return pass_features(self._runtime, work, head_chunk_rows=self._head_chunk_rows)

    def envelope(self, *, no_grad: bool = False, adapter: str | None = None) -> Envelope | None:
        """Return the envelope in force, made or loaded on first use; None when it failed its check."""
        return self._envelope_of(_Signature(self._runtime.recompute, no_grad, adapter))

    def _envelope_of(self, signature: _Signature) -> Envelope | None:
        if signature not in self._envelopes:
            self._keep(signature, self._load_or_make(signature))
        return self._envelopes[signature]

    def _envelope_for(self, work: PassWork) -> Envelope | None:
        # Without anything scored the model does not run, and a dry run is over at once.
        # Outputs beside log-probs are priced by dry runs: few batches ask for them, and always in few shapes.
        if not work.head.num_rows or not work.scores_only:
            return None
        signature = _Signature(self._runtime.recompute, work.no_grad, work.adapter, work.recomputed)
        if signature in self._envelopes:
            return self._envelopes[signature]
        found = self._load(signature) if signature not in self._shapes else None
        if found is not None:
            self._keep(signature, found)
            return self._envelopes[signature]
        shapes = self._shapes.setdefault(signature, set())
        shapes.add(work.shape_key)
        # Both give the same bytes. A few shapes are run dry sooner than an envelope is made; made once as much time
        # has gone into dry runs as it takes, it never costs more than twice what the better choice would have.
        if len(shapes) <= self._dry_runs_first:
            return None
        return self._envelope_of(signature)

    def _keep(self, signature: _Signature, made: Envelope | None) -> None:
        self._bare[signature] = made
        self._envelopes[signature] = None if made is None else made.with_caller(self._caller_bytes_per_token)

    def facts(self, *, no_grad: bool = False, adapter: str | None = None) -> dict[str, object]:
        """Return what an envelope is stored under."""
        return self._facts(_Signature(self._runtime.recompute, no_grad, adapter))

    def _facts(self, signature: _Signature) -> dict[str, object]:
        return {"signature": repr(signature), "runtime": self._runtime.signature}

    def _load(self, signature: _Signature) -> Envelope | None:
        return None if self._store is None else self._store.load(self._facts(signature))

    def _load_or_make(self, signature: _Signature) -> Envelope | None:
        found = self._load(signature)
        if found is not None:
            return found
        try:
            made = make_envelope(
                self._runtime, no_grad=signature.no_grad, adapter=signature.adapter, recomputed=signature.recomputed,
                traced=self._traced,
            )  # fmt: skip
        except EnvelopeError as error:
            warnings.warn(
                f"the memory of this model is not priced by an envelope ({error}); every new shape of a pass is run "
                "dry instead, which takes a second or so each",
                RuntimeWarning,
                stacklevel=2,
            )
            return None
        if self._store is not None:
            self._store.save(self._facts(signature), made)
        return made


def make_envelope(
    runtime: Runtime,
    *,
    no_grad: bool = False,
    adapter: str | None = None,
    recomputed: int | None = None,
    traced: TracedByKind | None = None,
) -> Envelope:
    """Return the envelope of a runtime's passes, traced, solved and checked against held-out passes.

    Args:
        runtime: The model.
        no_grad, adapter, recomputed: As of the passes (``PassWork``).
        traced: Keeps traces that serve any number of recomputed layers from one call to the next.

    Raises:
        EnvelopeError: Live bytes are not affine in the features, or a held-out pass is priced too far off.
    """
    dry = DryRunPricer(runtime, head_chunk_rows=_SAMPLE_CHUNK_ROWS, caller_bytes_per_token=0)
    samples = SamplePasses(no_grad=no_grad, adapter=adapter)
    depth = runtime.facts.num_layers
    example = _with(next(SamplePasses(no_grad=no_grad, adapter=adapter).held_out()), recomputed)
    both_kinds = recomputed if two_kinds(runtime, example) else None
    if both_kinds is not None and depth <= max(layers for layers, _ in TWO_KINDS):
        raise EnvelopeError(f"{depth} layers are too few to tell recomputed ones from others")
    mode = mode_of(runtime, example)
    known = (traced or {}).get((no_grad, adapter, mode))
    if known is None:
        known = (
            [
                *(_traced(runtime, dry, _with(work, recomputed), both=True) for work in samples.counting()),
                *(_traced(runtime, dry, _with(work, recomputed), both=False) for work in samples.calls()),
            ],
            [_traced(runtime, dry, _with(work, recomputed), both=True) for work in samples.held_out()],
        )
    if traced is not None:
        traced[no_grad, adapter, mode] = known
    passes, held_out = known
    envelope = solve(passes, num_layers=depth, categories=category_names(mode), recomputed=both_kinds)
    for one in held_out:
        exact = price_of(one.at(depth, both_kinds), mode, num_layers=depth, recomputed=both_kinds, caller_bytes=0)
        _check(envelope, one.features, exact)
    return envelope


def _with(work: PassWork, recomputed: int | None) -> PassWork:
    return work if recomputed is None else replace(work, recomputed=recomputed)


def _traced(runtime: Runtime, dry: DryRunPricer, work: PassWork, *, both: bool) -> TracedPass:
    """Return a sample pass at the depths that tell the rest, or, for one that shows kinds of calls, at the least."""
    features = all_calls(runtime, work, head_chunk_rows=_SAMPLE_CHUNK_ROWS)
    if two_kinds(runtime, work):
        if not both:
            return TracedPass(features=features, shallow=dry.trace(work, 2, 1), deeper=None)
        base, more_recomputed, more_kept = (dry.trace(work, *counts) for counts in TWO_KINDS)
        return TracedPass(features=features, shallow=base, deeper=more_recomputed, wider=more_kept)
    depth = runtime.facts.num_layers
    shallow, deeper = (SHALLOW, DEEPER) if depth > DEEPER else (depth, depth)
    below = dry.alike(work, shallow if both else 1)
    above = (below if deeper == shallow else dry.alike(work, deeper)) if both else None
    return TracedPass(features=features, shallow=below, deeper=above)


def _check(envelope: Envelope, features: PassFeatures, traced: Price) -> None:
    """Raise ``EnvelopeError`` unless a held-out pass is priced within the limits, peak and retained bytes."""
    found = envelope.price(replace(features, logical_tokens=0))
    for what, ours, exact in (
        ("needs", found.required_bytes, traced.required_bytes),
        ("retains", found.retained_bytes, traced.retained_bytes),
    ):
        if not (1 - MOST_BELOW) * exact <= ours <= (1 + MOST_ABOVE) * exact:
            raise EnvelopeError(
                f"a held-out pass of {features.packed_rows} packed rows {what} {exact} bytes by its own trace and "
                f"{ours} by the envelope"
            )

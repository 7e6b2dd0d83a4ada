"""The papers' claims: hypotheses about runs (claim), their results (evidence, quantities), effects and verdicts."""

from fedflat.runs.claims.claim import Claim, Part, Ranking, load_claim, load_studies, shipped_claims
from fedflat.runs.claims.effect import Effect, State, beside_best, state_of
from fedflat.runs.claims.evidence import Evidence, digest, shipped_evidence
from fedflat.runs.claims.verdict import Finding, concluded, further_seeds, judge

__all__ = [
    "Claim",
    "Effect",
    "Evidence",
    "Finding",
    "Part",
    "Ranking",
    "State",
    "beside_best",
    "concluded",
    "digest",
    "further_seeds",
    "judge",
    "load_claim",
    "load_studies",
    "shipped_claims",
    "shipped_evidence",
    "state_of",
]

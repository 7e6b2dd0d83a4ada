"""Federated rounds: broadcast, local training, admission of uploads, merging and metrics."""

from fedflat.rounds.accountant import ledger, ledger_of
from fedflat.rounds.admission import check_samples, counted_samples
from fedflat.rounds.client import ABOUT, STAGES, About, Feed, Question, Questions, Worker, lent_generator
from fedflat.rounds.cohort import cohort_seed, cohort_size, draw_cohort
from fedflat.rounds.faults import misfit, misfit_memory
from fedflat.rounds.interface import Apart, ClientMemory, Engine, chunks, groups, one_thread, unless_seen
from fedflat.rounds.measures import gradient_norm, margin_loss
from fedflat.rounds.medians import NORMS
from fedflat.rounds.metrics import Score, bytes_of, flat_record, score
from fedflat.rounds.server import RoundReport, conduct, first_state, view
from fedflat.rounds.setup import Broadcast, Problem, Refusal, failure
from fedflat.rounds.state import ServerState

__all__ = [
    "ABOUT",
    "NORMS",
    "STAGES",
    "About",
    "Apart",
    "Broadcast",
    "ClientMemory",
    "Engine",
    "Feed",
    "Problem",
    "Question",
    "Questions",
    "Refusal",
    "RoundReport",
    "Score",
    "ServerState",
    "Worker",
    "bytes_of",
    "check_samples",
    "chunks",
    "cohort_seed",
    "cohort_size",
    "conduct",
    "counted_samples",
    "draw_cohort",
    "failure",
    "first_state",
    "flat_record",
    "gradient_norm",
    "groups",
    "ledger",
    "ledger_of",
    "lent_generator",
    "margin_loss",
    "misfit",
    "misfit_memory",
    "one_thread",
    "score",
    "unless_seen",
    "view",
]

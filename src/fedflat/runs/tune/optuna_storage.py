"""A search in Optuna's storage, for its dashboard and plots; Optuna itself is not needed to tune."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedflat.errors import RecipeError
from fedflat.runs.sweep.overrides import spelled
from fedflat.runs.tune.search import Plan, Trial, Tuned


def to_optuna(plan: Plan, found: Sequence[Tuned], storage: Any, name: str) -> None:
    """Writes a finished search to a storage, as one study for each method; existing trials stay as they are.

    Trials of the last stage are complete, earlier ones pruned, failed ones failed. The scores at the end of each stage
    are intermediate values. A larger score is better, so every study is maximised.

    Args:
        plan: the search.
        found: its result.
        storage: Optuna's storage, or its address, as in `sqlite:///search.db`.
        name: the studies are called `NAME: METHOD`.

    Raises:
        RecipeError: Optuna is not installed, or the storage cannot be opened.
    """
    try:
        import optuna
    except ImportError:
        raise RecipeError("--optuna needs Optuna: pip install 'fedflat[optuna]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    for each in found:
        try:
            study = optuna.create_study(
                storage=storage, study_name=f"{name}: {each.method}", direction="maximize", load_if_exists=True
            )
        except Exception as error:  # whatever the storage's driver raises
            raise RecipeError(f"--optuna {storage}: cannot be opened ({' '.join(str(error).split())[:200]})") from None
        there = {old.user_attrs.get("settings") for old in study.get_trials(deepcopy=False)}
        for trial in each.trials:
            if _label(trial) not in there:
                study.add_trial(_frozen(optuna, plan, trial))


def _label(trial: Trial) -> str:
    return spelled(trial.settings)


def _frozen(optuna: Any, plan: Plan, trial: Trial) -> Any:
    """A trial as Optuna keeps it; values that it cannot store are kept as text."""
    choices = {name: [_plain(v) for v in plan.space.axes[name]] for name in trial.settings}
    scores = {round: score for round, score in trial.scores.items() if score is not None}
    last = trial.scores.get(plan.rounds)
    states = optuna.trial.TrialState
    failed = None in trial.scores.values()
    return optuna.trial.create_trial(
        state=states.FAIL if failed else states.COMPLETE if last is not None else states.PRUNED,
        value=last,
        params={name: _plain(value) for name, value in trial.settings.items()},
        distributions={name: optuna.distributions.CategoricalDistribution(each) for name, each in choices.items()},
        intermediate_values=scores,
        user_attrs={"settings": _label(trial)},
    )


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else spelled(value)

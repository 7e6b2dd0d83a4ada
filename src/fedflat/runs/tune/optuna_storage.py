"""A search in Optuna's storage, for its dashboard and plots; Optuna itself is not needed to tune."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedflat.errors import RecipeError
from fedflat.runs.sweep.overrides import spelled
from fedflat.runs.tune.search import Plan
from fedflat.runs.tune.tuned import Trial, Tuned


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
    optuna = _optuna()
    opened = open_storage(storage)
    for each in found:
        try:
            study = optuna.create_study(
                storage=opened, study_name=f"{name}: {each.method}", direction="maximize", load_if_exists=True
            )
            there = {old.user_attrs.get("settings") for old in study.get_trials(deepcopy=False)}
            for trial in each.trials:
                if _label(trial) not in there:
                    study.add_trial(_frozen(optuna, plan, trial))
        except Exception as error:  # whatever the driver of the storage raises, or trials of another space in the study
            raise RecipeError(_cannot(storage, "written", error)) from None


def open_storage(storage: Any) -> Any:
    """Opens a storage; a search does so before it begins, so that a mistake in the address does not cost hours.

    Raises:
        RecipeError: Optuna is not installed, or the storage cannot be opened.
    """
    optuna = _optuna()
    try:
        return optuna.storages.get_storage(storage)
    except Exception as error:  # whatever the driver of the storage raises
        raise RecipeError(_cannot(storage, "opened", error)) from None


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise RecipeError("--optuna needs Optuna: pip install 'fedflat[optuna]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _cannot(storage: Any, done: str, error: Exception) -> str:
    return f"--optuna {storage}: cannot be {done} ({' '.join(str(error).split())[:200]})"


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

"""What people see while they wait, and at the end."""

import io

from rich.console import Console

from fedflat.report.display import RoundProgress, comparison, fitted, split_table
from fedflat.report.flatness_table import side_by_side


def shown(terminal, rounds=40):
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=100)
    with RoundProgress("fedsam", rounds, console) as progress:
        for done in range(1, rounds + 1):
            progress({"round": done, "accuracy": done / 100})
    return text.getvalue()


def test_a_terminal_shows_round_accuracy_speed_and_time_left():
    text = shown(terminal=True)
    for part in ("fedsam", "40/40", "accuracy 0.4000", "rounds/s"):
        assert part in text


def test_elsewhere_there_are_about_twenty_plain_lines_however_many_rounds():
    for rounds in (20, 400):
        lines = shown(terminal=False, rounds=rounds).splitlines()
        assert len(lines) == 20
        assert lines[-1].startswith(f"fedsam: round {rounds}/{rounds}  accuracy")
        assert "\x1b" not in lines[-1]


def test_a_run_without_numbers_still_has_its_row():
    history = [{"round": 1, "consistency": None}]
    text = io.StringIO()
    Console(file=text, width=100).print(
        comparison([("x", history, dict(bytes_down=1, bytes_up=1, seconds=0.1))], "test")
    )
    assert "–" in text.getvalue()


def test_adapters_show_what_is_smaller_for_them_with_digits_that_tell():
    sizes = dict(bytes_down=18_432, bytes_up=2_500_000, bytes_kept=0, bytes_checkpoint=3e10)
    summary = dict(parameters_trained=768, parameters=8768, seconds=0.1, **sizes)
    text = io.StringIO()
    Console(file=text, width=200).print(comparison([("x", [{"round": 1}], summary)], "test"))
    for part in ("768 of 8,768", "MB down", "0.0184", "MB up", "2.5", "MB kept by a client", "0.0", "30,000.0"):
        assert part in text.getvalue()


def test_a_split_fits_eighty_columns_with_ten_classes_and_with_a_hundred():
    for classes in (10, 100):
        text = io.StringIO()
        counts = [[100 + c for c in range(classes)] for _ in range(30)]
        Console(file=text, width=80).print(split_table(counts))
        assert f"30 clients, {sum(map(sum, counts))} samples, {classes} classes" in text.getvalue()
        assert "…" in text.getvalue()
        assert text.getvalue().count("10…") == 0


def test_a_table_too_wide_for_the_screen_keeps_every_value_beside_a_name_of_any_length():
    long = "feddyn(penalty=0.1, dual='all', balanced=False) + man(zeta=0.15, layers='all', attention=False)"
    columns = {
        f"{long}\n− fedavg": {"λ1": "-2.71 [-4.1, -1.3], 3 seeds"},
        "fedsam\n− fedavg": {"λ1": "-2.2 (one seed)"},
    }
    for width in (60, 80):
        text = io.StringIO()
        Console(file=text, width=width).print(fitted(side_by_side("differences", columns | {"c": {}}), width))
        words = " ".join(text.getvalue().split())
        assert all(part in words for part in ("λ1", "-2.71", "[-4.1,", "-1.3],", "-2.2 (one seed)"))

"""What people see while they wait, and at the end."""

import io

from rich.console import Console

from fedflat.report.display import RoundProgress, comparison, split_table


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


def test_a_split_fits_eighty_columns_with_ten_classes_and_with_a_hundred():
    for classes in (10, 100):
        text = io.StringIO()
        counts = [[100 + c for c in range(classes)] for _ in range(30)]
        Console(file=text, width=80).print(split_table(counts))
        assert f"30 clients, {sum(map(sum, counts))} samples, {classes} classes" in text.getvalue()
        assert "…" in text.getvalue()
        assert text.getvalue().count("10…") == 0

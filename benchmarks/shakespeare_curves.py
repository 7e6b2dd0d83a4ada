"""The Shakespeare sweep as JSON lines and a figure: accuracy of the next character by rounds.

    fedflat sweep shakespeare --scale hours --out sweeps/shakespeare
    python benchmarks/shakespeare_curves.py sweeps/shakespeare docs/figures/shakespeare.jsonl curves.png

A line has the network, the method, and for each evaluated round the accuracy and the loss on the test windows of all
roles, and the seconds spent until then. Prints the table of docs/studies.md.
"""

import json
import sys
from pathlib import Path
from typing import Any

NETWORKS = {"char-lstm": "LSTM", "gpt": "GPT"}


def curve(run: Path) -> dict[str, Any]:
    """The evaluated rounds of a run."""
    network, method, _ = run.name.split("_")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    points, seconds = [], 0.0
    for record in records:
        seconds += record.get("seconds", 0.0)
        if "accuracy" in record:
            point = {name: record[name] for name in ("round", "accuracy", "loss")}
            points.append({**point, "seconds": round(seconds, 1)})
    return {"network": network, "method": method, "points": points}


def draw(curves: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    for axes, (network, title) in zip(figure.subplots(1, 2, sharey=True), NETWORKS.items(), strict=True):
        for each in [c for c in curves if c["network"] == network]:
            rounds, accuracy = ([point[name] for point in each["points"]] for name in ("round", "accuracy"))
            axes.plot(rounds, [100 * a for a in accuracy], marker="o", markersize=3, label=each["method"])
        axes.set(title=title, xlabel="round")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    figure.axes[0].set_ylabel("next characters predicted, %")
    figure.savefig(path, dpi=150)


def main() -> None:
    sweep, lines, picture = map(Path, sys.argv[1:])
    curves = [curve(run) for run in sorted(sweep.iterdir()) if (run / "metrics.jsonl").is_file()]
    lines.write_text("".join(json.dumps(each) + "\n" for each in curves), "utf-8")
    draw(curves, picture)
    rounds = sorted({point["round"] for each in curves for point in each["points"]})
    print(f"| network | method | {' | '.join(f'round {r}' for r in rounds)} | loss |")
    print("|---" * (3 + len(rounds)) + "|")
    for each in curves:
        found = {point["round"]: f"{100 * point['accuracy']:.1f}" for point in each["points"]}
        shown = " | ".join(found.get(r, "") for r in rounds)
        print(f"| {NETWORKS[each['network']]} | {each['method']} | {shown} | {each['points'][-1]['loss']:.3f} |")


if __name__ == "__main__":
    main()

"""Monitoring of a deployment: Prometheus metrics at /metrics, and a log with one JSON object per line.

Only the server's own numbers are published, never text from a client. The members of a cohort stay in the run's
directory because the privacy of `central_dp` relies on it; only their number appears here.
"""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from socket import SHUT_RDWR, socket
from socketserver import TCPServer
from typing import Any

from fedflat.errors import RecipeError
from fedflat.recipe import Deployment
from fedflat.runs import Record

# Every reason named in docs/reliability.md and docs/deployment.md; any other is counted as "other".
REASONS = {
    "absent", "base", "claim", "died", "doubled", "dtype", "foreign", "hung", "names", "norm", "not finite", "notes",
    "oversized", "policy", "raised", "shape", "silent", "stale", "weight",
}  # fmt: skip
SCRAPE = 5.0  # seconds that a scrape may take
GAUGES = {
    "round": "The last round that is finished.",
    "accuracy": "Accuracy of the global model when it was last evaluated.",
    "loss": "Loss of the global model when it was last evaluated.",
    "local_loss": "Mean loss of the clients in the last round.",
    "cohort": "Clients that were merged in the last round.",
    "epsilon": "Privacy spent so far; NaN where none holds.",
    "round_seconds": "Seconds that the last round took.",
}
METRIC = "A metric of the task, of the global model when it was last evaluated."
COUNTERS = {
    "rounds_skipped": "Rounds that were skipped with the state unchanged.",
    "refused": "Clients that were left out of a round, by reason.",
    "bytes": "Bytes of the vectors that went down to the clients and up to the server.",
    "seconds": "Seconds that all rounds took.",
}


def facts(record: Record, metrics: Sequence[str] = ()) -> dict[str, Any]:
    """Return what is published of a round: its numbers, the number of clients, and refusals by reason.

    Args:
        record: the record of the round.
        metrics: the names of the task's metrics.
    """
    reasons = (each["reason"] for each in record.get("refused", ()))
    numbers = ("accuracy", "loss", "local_loss", "epsilon", "lambda1", "bytes_down", "bytes_up", "seconds")
    return {
        "round": record["round"],
        **{name: record[name] for name in numbers if name in record},
        **({"metrics": found} if (found := {name: record[name] for name in metrics if name in record}) else {}),
        "cohort": len(record["cohort"]),
        "refused": dict(Counter(reason if reason in REASONS else "other" for reason in reasons)),
        "skipped": "skipped" in record,
    }


class Exposition:
    """The server's round metrics in Prometheus' text format. Counters start with the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gauges: dict[str, float] = {}
        self._metrics: dict[str, float] = {}
        self._totals: dict[tuple[str, str], float] = {
            ("rounds_skipped", ""): 0.0,
            ("bytes", 'direction="down"'): 0.0,
            ("bytes", 'direction="up"'): 0.0,
            ("seconds", ""): 0.0,
        }

    def __call__(self, record: Record, metrics: Sequence[str] = ()) -> None:
        """Add the record of a round, with metrics of these names."""
        told = facts(record, metrics)
        with self._lock:
            for name in GAUGES.keys() & told.keys():
                self._gauges[name] = _known(told[name])
            self._metrics |= {name: _known(value) for name, value in told.get("metrics", {}).items()}
            self._gauges["round_seconds"] = float(told["seconds"])
            self._add("rounds_skipped", "", told["skipped"])
            self._add("seconds", "", told["seconds"])
            for direction in "down", "up":
                self._add("bytes", f'direction="{direction}"', told[f"bytes_{direction}"])
            for reason, count in told["refused"].items():
                self._add("refused", f'reason="{reason}"', count)

    def _add(self, name: str, label: str, amount: float) -> None:
        self._totals[name, label] = self._totals.get((name, label), 0.0) + amount

    def text(self) -> str:
        """The full text of a scrape."""
        lines: list[str] = []
        with self._lock:
            for name, meaning in GAUGES.items():
                if name in self._gauges:
                    lines += _head(f"fedflat_{name}", "gauge", meaning)
                    lines.append(f"fedflat_{name} {_number(self._gauges[name])}")
            if self._metrics:
                lines += _head("fedflat_metric", "gauge", METRIC)
                lines += [f'fedflat_metric{{name="{name}"}} {_number(x)}' for name, x in sorted(self._metrics.items())]
            for name, meaning in COUNTERS.items():
                lines += _head(f"fedflat_{name}_total", "counter", meaning)
                for (owner, label), value in sorted(self._totals.items()):
                    if owner == name:
                        lines.append(f"fedflat_{name}_total{f'{{{label}}}' if label else ''} {_number(value)}")
        return "".join(f"{line}\n" for line in lines)


def _head(name: str, kind: str, meaning: str) -> list[str]:
    return [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]


def _known(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _number(value: float) -> str:
    return "NaN" if math.isnan(value) else repr(value)


class Listener(TCPServer):
    """Handles one scrape at a time, so that many connections use only one thread and little memory."""

    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], exposition: Exposition) -> None:
        self.exposition = exposition
        super().__init__(address, Page)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Handle a scrape within a few seconds: a slow sender would otherwise delay even the end of the run."""
        end = threading.Timer(SCRAPE, _hang_up, [request])
        end.start()
        try:
            super().finish_request(request, client_address)
        finally:
            end.cancel()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect during a scrape."""


def _hang_up(connection: socket) -> None:
    with suppress(OSError):  # the connection has already ended
        connection.shutdown(SHUT_RDWR)


class Page(BaseHTTPRequestHandler):
    """Serves GET /metrics and nothing else."""

    server: Listener
    timeout = SCRAPE
    server_version, sys_version = "fedflat", ""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404)
            return
        content = self.server.exposition.text().encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Do not log scrapes."""


@contextmanager
def monitored(settings: Deployment) -> Iterator[list[Any]]:
    """Yield the callbacks for the record of each round and the names of its metrics; serve /metrics if configured.

    Raises:
        RecipeError: if the configured port cannot be opened.
    """
    callbacks: list[Any] = [log_round] if settings.log == "json" else []
    if not settings.metrics:
        yield callbacks
        return
    exposition = Exposition()
    try:
        listener = Listener((settings.metrics_host, settings.metrics), exposition)
    except OSError as error:
        raise RecipeError(
            f"deployment.metrics = {settings.metrics}: cannot listen on {settings.metrics_host} ({error.strerror})"
        ) from None
    thread = threading.Thread(target=listener.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        yield [*callbacks, exposition]
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join()


def say(text: str, settings: Deployment) -> None:
    """Write a sentence to the server's log."""
    print(text if settings.log == "text" else _line("message", {"message": text}), flush=True)


def log_round(record: Record, metrics: Sequence[str] = ()) -> None:
    """Log a round as one line of JSON, with metrics of these names."""
    print(_line("round", facts(record, metrics)), flush=True)


def _line(event: str, content: dict[str, Any]) -> str:
    return json.dumps({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **content})

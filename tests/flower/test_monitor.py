"""/metrics and the log of a deployment: a format that Prometheus reads, true numbers, and nothing from a client."""

import http.client
import json
import math
import re
import socket
import threading
import time
from contextlib import suppress

import pytest

pytest.importorskip("flwr")
monitor = pytest.importorskip("fedflat.flower.monitor")
from fedflat.errors import RecipeError  # noqa: E402
from fedflat.recipe import Deployment  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
FIRST = {"round": 1, "local_loss": 2.25, "cohort": [4, 7], "bytes_down": 100, "bytes_up": 60, "accuracy": 0.5,
         "loss": 1.5, "seconds": 0.5, "notes": {"cosine": 0.25}}  # fmt: skip
SECOND = {"round": 2, "local_loss": None, "cohort": [], "bytes_down": 100, "bytes_up": 0, "seconds": 0.25,
          "skipped": "client 7 says: evil", "epsilon": None, "epsilon_missing": "evil",
          "refused": [{"client": 4, "reason": "not finite", "detail": "evil"},
                      {"client": 7, "reason": "norm", "detail": "evil"},
                      {"client": 9, "reason": "norm", "detail": "evil"},
                      {"client": 8, "reason": 'evil"} 1\nevil 2', "detail": "evil"}]}  # fmt: skip
SAMPLE = re.compile(
    r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{([a-zA-Z_]\w*)="([^"\\\n]*)"\})? (NaN|[+-]?(?:Inf|[\d.]+(?:e[+-]?\d+)?))'
)


def parsed(text):
    """Prometheus' text format 0.0.4, as far as it is used: (name, label's value) → number. The rest is an error."""
    assert text.endswith("\n")
    found, kinds, helped = {}, {}, set()
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name = line.split(" ")[2]
            assert name not in helped and len(line.split(" ", 3)[3]) > 5
            helped.add(name)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert kind in ("gauge", "counter") and name not in kinds and name in helped
            assert name.endswith("_total") == (kind == "counter")
            kinds[name] = kind
        else:
            name, _, label, value = SAMPLE.fullmatch(line).groups()
            assert name == [*kinds][-1], "samples follow their TYPE, and all of a metric stand together"
            assert (name, label) not in found
            found[name, label] = float(value)
    return found


@pytest.fixture
def told():
    exposition = monitor.Exposition()
    exposition(FIRST)
    exposition(SECOND)
    return exposition.text()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def scraped(port, path="/metrics", method="GET"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request(method, path)
    answer = connection.getresponse()
    return answer.status, answer.headers, answer.read().decode()


# --------------------------------------------------------------------------------------------------------------------
# The numbers
# --------------------------------------------------------------------------------------------------------------------


def test_gauges_have_the_last_value_and_counters_the_sum(told):
    numbers = parsed(told)
    assert math.isnan(numbers.pop(("fedflat_epsilon", None))) and math.isnan(numbers.pop(("fedflat_local_loss", None)))
    assert numbers == {
        ("fedflat_round", None): 2,
        ("fedflat_accuracy", None): 0.5,
        ("fedflat_loss", None): 1.5,
        ("fedflat_cohort", None): 0,
        ("fedflat_round_seconds", None): 0.25,
        ("fedflat_rounds_skipped_total", None): 1,
        ("fedflat_refused_total", "not finite"): 1,
        ("fedflat_refused_total", "norm"): 2,
        ("fedflat_refused_total", "other"): 1,
        ("fedflat_bytes_total", "down"): 200,
        ("fedflat_bytes_total", "up"): 60,
        ("fedflat_seconds_total", None): 0.75,
    }


def test_the_metrics_of_any_task_have_gauges_by_name(capsys):
    exposition, names = monitor.Exposition(), ["r2", "mse"]
    for record in ({"r2": 0.75, "mse": 0.5, "time": 3.0}, {"r2": None, "mse": 0.25}, {}):
        record = {name: value for name, value in FIRST.items() if name != "accuracy"} | record
        exposition(record, metrics=names)
        monitor.log_round(record, metrics=names)
    numbers = parsed(exposition.text())
    assert math.isnan(numbers["fedflat_metric", "r2"]) and numbers["fedflat_metric", "mse"] == 0.25
    assert ("fedflat_metric", "time") not in numbers and ("fedflat_accuracy", None) not in numbers
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line.get("metrics") for line in lines] == [{"r2": 0.75, "mse": 0.5}, {"r2": None, "mse": 0.25}, None]


def test_before_the_first_round_there_are_zeros_and_no_made_up_gauges():
    numbers = parsed(monitor.Exposition().text())
    assert set(numbers.values()) == {0.0} and ("fedflat_accuracy", None) not in numbers


def test_neither_metrics_nor_log_have_words_or_numbers_of_clients(told, capsys):
    monitor.log_round(SECOND)
    for text in told, capsys.readouterr().out:
        assert "evil" not in text and "client" not in text.replace("clients", "").replace("Clients", "")
        assert "cosine" not in text


def test_every_reason_of_the_documents_is_known():
    from pathlib import Path

    docs = Path(__file__).parents[2] / "docs"
    named = set()
    for page in "reliability.md", "deployment.md":
        table = (docs / page).read_text("utf-8").split("| reason |")[1].split("\n\n")[0]
        for row in table.splitlines()[2:]:
            named |= set(re.findall(r"`([a-z ]+)`", row.split("|")[1]))
    assert len(named) > 15 and named <= monitor.REASONS


# --------------------------------------------------------------------------------------------------------------------
# The endpoint
# --------------------------------------------------------------------------------------------------------------------


def test_it_is_off_unless_a_port_is_set_and_then_it_is_on_this_machine_alone():
    settings = Deployment()
    assert settings.metrics == 0 and settings.metrics_host == "127.0.0.1"
    with monitor.monitored(settings) as callbacks:
        assert callbacks == []


def test_a_scrape_gets_the_text_and_other_paths_and_methods_nothing():
    port = free_port()
    with monitor.monitored(Deployment(metrics=port)) as (exposition,):
        exposition(FIRST)
        status, headers, text = scraped(port)
        assert status == 200 and headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert parsed(text)["fedflat_round", None] == 1 and text == exposition.text()
        assert "Python" not in headers["Server"]
        assert scraped(port, "/metrics?x=1")[0] == 200 and scraped(port, "/")[0] == 404
        assert scraped(port, "/../../etc/passwd")[0] == 404 and scraped(port, method="POST")[0] == 501
    with pytest.raises(ConnectionRefusedError):
        scraped(port)


def test_a_port_that_is_taken_is_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with (
            pytest.raises(RecipeError, match=f"deployment.metrics = {port}: cannot listen on 127.0.0.1"),
            monitor.monitored(Deployment(metrics=port)),
        ):
            pass


def test_who_connects_and_says_nothing_holds_nobody_for_long(monkeypatch, capsys):
    monkeypatch.setattr(monitor.Page, "timeout", 0.2)
    port = free_port()
    with monitor.monitored(Deployment(metrics=port)), socket.create_connection(("127.0.0.1", port)):
        assert scraped(port)[0] == 200
    assert capsys.readouterr().err == ""


def test_nor_does_who_sends_a_byte_now_and_then(monkeypatch):
    """Each byte begins the wait for the next one anew; the end of the run must not wait for the last."""
    monkeypatch.setattr(monitor, "SCRAPE", 0.3)
    port, over = free_port(), threading.Event()

    def drip():
        with socket.create_connection(("127.0.0.1", port)) as connection, suppress(OSError):
            while not over.wait(0.05):
                connection.sendall(b"G")

    thread = threading.Thread(target=drip)
    with monitor.monitored(Deployment(metrics=port)):
        thread.start()
        time.sleep(0.2)
        begun = time.monotonic()
    assert time.monotonic() - begun < 5
    over.set()
    thread.join()


# --------------------------------------------------------------------------------------------------------------------
# A deployment
# --------------------------------------------------------------------------------------------------------------------


def test_a_deployments_metrics_are_those_of_its_records_and_change_no_bit(deployed, small, simulated, monkeypatch):
    port, texts = free_port(), []
    seen = monitor.Exposition.__call__

    def watched(exposition, record, metrics):
        seen(exposition, record, metrics)
        texts.append(scraped(port)[2])

    monkeypatch.setattr(monitor.Exposition, "__call__", watched)
    model, records = deployed(small(f"deployment.metrics={port}"))
    assert [parsed(text)["fedflat_round", None] for text in texts] == [1, 2, 3]
    last = parsed(texts[-1])
    assert last["fedflat_accuracy", None] == last["fedflat_metric", "accuracy"] == records[-1]["accuracy"]
    assert last["fedflat_cohort", None] == len(records[-1]["cohort"]) == 3
    for direction in "down", "up":
        total = sum(record[f"bytes_{direction}"] for record in records)
        assert last["fedflat_bytes_total", direction] == total
    assert (model, records) == simulated(small())


def test_a_log_of_json_has_an_object_for_each_line_and_each_round(deployed, small, capsys):
    _, records = deployed(small('deployment.log="json"'))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["event"] for line in lines} == {"message", "round"} and all(line["time"] for line in lines)
    assert "nodes are not identified by keys" in lines[0]["message"]
    rounds = [line for line in lines if line["event"] == "round"]
    assert [line["round"] for line in rounds] == [1, 2, 3]
    assert [line["accuracy"] for line in rounds] == [record["accuracy"] for record in records]
    assert [line["metrics"] for line in rounds] == [{"accuracy": record["accuracy"]} for record in records]
    assert rounds[0]["cohort"] == 3 and rounds[0]["refused"] == {} and rounds[0]["skipped"] is False


def test_neither_is_any_of_the_clients_business(small):
    from fedflat.flower.policy import digest

    assert digest(small("deployment.metrics=9095", 'deployment.log="json"')) == digest(small())

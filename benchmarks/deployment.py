"""One recipe in the simulator, on Ray and over Flower: the same bits everywhere, also when parts of it are killed.

    python benchmarks/deployment.py [--only matrix simulation failures node start] [--method …] [--killed …]

Real processes on this machine: a SuperLink and three SuperNodes, with TLS and registered keys. Needs fedflat[dev],
Linux and about 15 minutes. Prints Markdown tables; exits 1 if a digest differs or a run does not end.
"""

import argparse
import hashlib
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from loopback import HOST, InProcess, Loopback, free_ports, lines, wait
from timing import interleaved

from fedflat.flower import client_app
from fedflat.flower.service import serve
from fedflat.recipe import Recipe, load
from fedflat.runs.build import prepare
from fedflat.runs.experiment import execute

METHODS = ("fedavg", "scaffold", "fedsmoo", "fedsol", "feddyn+man(0.1)")
ROUNDS, CLIENTS = 3, 3
COMMON = [f"split.clients={CLIENTS}", f"server.cohort={CLIENTS}", f"server.rounds={ROUNDS}", "engine.group=1",
          "deployment.draws=recipe"]  # fmt: skip
PARTS = ("matrix", "simulation", "failures", "node", "start")
KILLED = ("ServerApp", "SuperLink", "SuperExec")
PATIENCE = 600.0  # seconds after which a run counts as hanging
AGAIN = "flwr run again"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--method", nargs="+", choices=METHODS, default=METHODS, help="of the matrix")
    parser.add_argument("--killed", nargs="+", choices=KILLED, default=KILLED, help="of the failures")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all processes of a deployment end with this one
    parts: dict[str, Callable[[Path], bool]] = {
        "matrix": partial(matrix, options.method),
        "simulation": simulation,
        "failures": partial(failures, options.killed),
        "node": node_killed,
        "start": start,
    }
    good = True
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            good &= parts[name](Path(folder))
    return 0 if good else 1


def recipe(method: str, engine: str = "inline") -> Recipe:
    return load(None, [*COMMON, f"method={method}", f"engine.name={engine}", "engine.workers=2"])


def digest(out: Path) -> str:
    """SHA-256 of a run's model, in short."""
    return hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()[:12]


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def seconds(out: Path) -> list[float]:
    return [record["seconds"] for record in records(out)]


def simulated(method: str, out: Path, engine: str = "inline") -> str:
    execute(prepare(recipe(method, engine)), out)
    return digest(out)


def finished(out: Path) -> float:
    """Wait until a run has ended well, and give the seconds that it took."""
    return wait((out / "summary.json").exists, PATIENCE, f"the end of {out.name}")


# --------------------------------------------------------------------------------------------------------------------
# The same bits everywhere
# --------------------------------------------------------------------------------------------------------------------


def matrix(methods: Sequence[str], folder: Path) -> bool:
    """Every method, five ways."""
    found: dict[str, dict[str, str]] = {}
    with connected(folder) as site:
        for method in methods:
            outs = {way: folder / f"{method}-{way}" for way in ("inline", "pool", "ray", "in-process", "deployment")}
            row = {engine: simulated(method, outs[engine], engine) for engine in ("inline", "pool", "ray")}
            serve(InProcess(client_app(recipe(method)), CLIENTS), recipe(method), outs["in-process"])
            site.adopt(recipe(method))
            site.run(outs["deployment"])
            finished(outs["deployment"])
            found[method] = row | {way: digest(outs[way]) for way in ("in-process", "deployment")}
            found[method]["seconds a round"] = " ".join(f"{s:.1f}" for s in seconds(outs["deployment"]))
    columns = [*found[methods[0]]]
    print(f"| method | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for method, row in found.items():
        print(f"| {method} | {' | '.join(row.values())} |")
    equal = [len({value for way, value in row.items() if way != "seconds a round"}) == 1 for row in found.values()]
    print(f"\n{sum(equal)} of {len(equal)} methods equal to the bit\n", flush=True)
    return all(equal)


@contextmanager
def connected(folder: Path, *options: str) -> Iterator[Loopback]:
    """A deployment whose three nodes are connecting."""
    site = Loopback(folder, recipe("fedavg"))
    try:
        site.link(*options)
        site.register()
        for client in range(CLIENTS):
            site.node(client)
        yield site
    finally:
        site.close()


def simulation(folder: Path) -> bool:
    """Flower's own simulation of the app that `fedflat flower init` writes."""
    site, port = Loopback(folder, recipe("scaffold")), str(free_ports(1))
    config = site.app / "flwr" / "config.toml"
    config.write_text(config.read_text().replace(f"{HOST}:18200", f"{HOST}:{port}"))
    try:
        link = [". ./environment.sh && exec flower-superlink --insecure --simulation", "--host", HOST, "--port", port]
        site.start("sh", "-c", " ".join([*link, "--disable-runtime-dependency-installation"]))
        resources = f"num-supernodes={CLIENTS} client-resources-num-cpus=1"
        wait(lambda: submitted(site, folder / "out", resources), 60, "the SuperLink to answer")
        finished(folder / "out")
    finally:
        site.close()
    equal = digest(folder / "out") == simulated("scaffold", folder / "here")
    spent = " ".join(f"{s:.1f}" for s in seconds(folder / "out"))
    print(f"Flower's simulation of SCAFFOLD: {spent} s a round, {'equal' if equal else 'NOT equal'} to the bit\n")
    return equal


def submitted(site: Loopback, out: Path, resources: str) -> bool:
    try:
        return bool(site.run(out, "", "simulation", "--federation-config", resources))
    except RuntimeError:  # it does not answer yet
        return False


# --------------------------------------------------------------------------------------------------------------------
# Parts that are killed in the second round
# --------------------------------------------------------------------------------------------------------------------


def failures(names: Sequence[str], folder: Path) -> bool:
    expected = simulated("scaffold", folder / "inline")
    print("| killed in round 2 | then | seconds to the end | finished rounds lost | model |\n|---|---|---|---|---|")
    cases = dict(zip(KILLED, (server_killed, link_killed, link_restarted), strict=True))
    good = True
    for number, (name, case) in enumerate((name, cases[name]) for name in names):
        place = folder / str(number)
        place.mkdir()
        then, spent, gone = case(place)
        model, right = judged(place / "out", expected)
        print(f"| {name} | {then} | {spent:.0f} | {gone} | {model} |", flush=True)
        good &= right and gone == 0
    return good


def judged(out: Path, expected: str) -> tuple[str, bool]:
    """The model is the undisturbed one, unless uploads of one round did not arrive."""
    missing = [record["refused"] for record in records(out) if "refused" in record]
    if missing:
        return f"without {sum(map(len, missing))} upload(s)", len(missing) == 1
    equal = digest(out) == expected
    return "equal to the bit" if equal else "DIFFERS", equal


def lost(out: Path) -> int:
    """Finished rounds that the newest checkpoint does not hold."""
    return lines(out / "metrics.jsonl") - int(max((out / "checkpoints").glob("*.json")).stem)


def killed(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a process alone, as the kernel does it that runs out of memory."""
    process.kill()
    process.wait()


def in_second_round(site: Loopback, out: Path, changes: str = "") -> None:
    site.adopt(recipe("scaffold"))
    site.run(out, changes)
    wait(lambda: lines(out / "metrics.jsonl") == 1, PATIENCE, "the first round")
    time.sleep(2)


def server_killed(folder: Path) -> tuple[str, float, int]:
    """SIGKILL to the ServerApp; a new `flwr run` goes on."""
    out = folder / "out"
    with connected(folder) as site:
        in_second_round(site, out)
        (server,) = site.inhabitants("flwr-serverapp")
        os.kill(server, signal.SIGKILL)
        gone = lost(out)
        site.run(out)
        return AGAIN, finished(out), gone


def link_killed(folder: Path) -> tuple[str, float, int]:
    """SIGKILL to the SuperLink, with which its ServerApp ends; both are started again."""
    out = folder / "out"
    with connected(folder) as site:
        in_second_round(site, out)
        killed(site.first)
        gone = lost(out)
        site.link()
        site.run(out)
        return f"SuperLink started again, {AGAIN}", finished(out), gone


def link_restarted(folder: Path) -> tuple[str, float, int]:
    """The same where the ServerApp has a process of its own: the run goes on by itself.

    A message that was on its way is lost, and the deadline says how long its reply is waited for.
    """
    out, secret = folder / "out", folder / "secret"
    secret.write_bytes(secrets.token_bytes(32))
    options = ("--isolation", "process", "--superexec-auth-secret-file", str(secret))
    with connected(folder, *options) as site:
        trust = ("--root-certificates", "keys/ca.pem", "--superexec-auth-secret-file", str(secret))
        site.start("flower-superexec", "--runtime-api-address", site.address, *trust)
        in_second_round(site, out, "admission.deadline=60")
        killed(site.first)
        gone = lost(out)
        site.link(*options)
        return "SuperLink started again", finished(out), gone


def node_killed(folder: Path) -> bool:
    """SIGKILL to a SuperNode; no deadline is set, so that Flower's own notice of its death is waited for."""
    out = folder / "out"
    with connected(folder) as site:
        in_second_round(site, out)
        killed(site.started[-1])
        begun, tries = time.monotonic(), 0
        finished(out)
        while (node := site.node(CLIENTS - 1)) and exited(node, 15):
            tries += 1
        back = time.monotonic() - begun - 15
    found = records(out)
    print("\nA SuperNode killed in round 2, no deadline set:\n")
    print("| round | seconds | cohort | refused |\n|---|---|---|---|")
    for record in found:
        refused = "; ".join(f"client {r['client']}: {r['reason']}, {r['detail']}" for r in record.get("refused", ()))
        print(f"| {record['round']} | {record['seconds']:.1f} | {record['cohort']} | {refused} |")
    print(f"\nStarted again, it was refused {tries} times and let in {back:.0f} s after the kill.\n", flush=True)
    return len(found) == ROUNDS and [record["cohort"] for record in found[1:]] == [[0, 1]] * 2


def exited(process: subprocess.Popen[bytes], patience: float) -> bool:
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        return False
    return True


# --------------------------------------------------------------------------------------------------------------------
# A client's start
# --------------------------------------------------------------------------------------------------------------------

FIRST = """
import sys; sys.path.insert(0, {place!r})
from fedflat.flower import client_app
app = client_app({recipe!r})
from loopback import InProcess
from fedflat.flower.nodes import Nodes
from fedflat.recipe import load
assert Nodes(InProcess(app, 1), load({recipe!r})).online() == {{0: 100}}
"""


def start(folder: Path) -> bool:
    """A process that imports torch, beside one that imports the ClientApp and answers its first message."""
    file = folder / "recipe.toml"
    file.write_text(recipe("scaffold").to_toml())
    first = FIRST.format(place=str(Path(__file__).parent), recipe=str(file))
    programs = {"import torch": "import torch", "first message": first}
    spent = interleaved({name: lambda code=code: python(code) for name, code in programs.items()}, 5)
    beside = [message - torch for torch, message in zip(*spent.values(), strict=True)]
    print("| a fresh process | seconds, median of 5 |\n|---|---|")
    for name, values in {**spent, "the difference": beside}.items():
        print(f"| {name} | {statistics.median(values):.2f} |")
    return statistics.median(beside) < 3.0


def python(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    sys.exit(main())

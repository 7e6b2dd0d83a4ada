"""Flower on this machine: the ClientApp called in this process, or SuperLink and SuperNodes with TLS on loopback."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity

from fedflat.flower.keys import write_keys
from fedflat.flower.project import write_app
from fedflat.recipe import Recipe

BIN = Path(sys.executable).parent
HOST = "127.0.0.1"


class InProcess:
    """A Grid whose nodes are calls of a ClientApp; the node of client i is 100 + i."""

    def __init__(self, app: ClientApp, clients: int, **config: str) -> None:
        # Private names of Flower: a message that is made outside of a run asks for them.
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
        self.app, self._names = app, count()
        self._replies: dict[str, list[Message]] = {}
        self.contexts = {
            100 + i: Context(1, 100 + i, {"client": i, **config}, RecordDict(), run_config={}) for i in range(clients)
        }

    def get_node_ids(self) -> list[int]:
        return [*self.contexts]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        names = []
        for message in messages:
            names.append(f"message-{next(self._names)}")
            message.metadata.__dict__["_message_id"] = names[-1]
            self._replies[names[-1]] = self.answers(message)
        return names

    def pull_messages(self, names: Iterable[str]) -> list[Message]:
        return [reply for name in names for reply in self._replies.pop(name, ())]

    def answers(self, message: Message) -> list[Message]:
        """What a node replies. As in a deployment, what the ClientApp raises becomes an error."""
        try:
            return [self.app(message, self.contexts[message.metadata.dst_node_id])]
        except Exception as error:
            return [Message(Error(code=2, reason=f"{type(error).__name__}: {error}"), reply_to=message)]


class Loopback:
    """A deployment as its folder describes it: real processes, encrypted connections, registered keys."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self.app, self.clients = folder.resolve() / "wards", recipe.split.clients
        self._port, self._first_node = free_ports(1), free_ports(self.clients)
        write_app(self.app, recipe, port=self._port)
        write_keys(self.app / "keys", [HOST], self.clients)
        self.env = {
            **os.environ,
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "FLWR_HOME": str(self.app / "flwr"),
            "HOST": HOST,
            "NODE_PORT": str(self._first_node),
        }
        self.started: list[subprocess.Popen[bytes]] = []

    def adopt(self, recipe: Recipe) -> None:
        """Server and clients agree on another recipe; what clients answer is by the default policy."""
        (self.app / "wards" / "recipe.toml").write_text(recipe.to_toml(), "utf-8")
        (self.app / "policy.toml").write_text("[answers]\nmin_samples = 1\n", "utf-8")

    @property
    def first(self) -> subprocess.Popen[bytes]:
        """The process that was started first: the SuperLink."""
        return self.started[0]

    @property
    def address(self) -> str:
        return f"{HOST}:{self._port}"

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        """A process in the app's folder, where its children are too."""
        with (self.app.parent / f"{len(self.started)}.log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=self.app, env=self.env, stdout=log, stderr=log, start_new_session=True
            )
        self.started.append(process)
        return process

    def log(self, process: subprocess.Popen[bytes]) -> Path:
        """What a process has said."""
        return self.app.parent / f"{self.started.index(process)}.log"

    def link(self, *options: str) -> subprocess.Popen[bytes]:
        """A SuperLink that answers."""
        process = self.start("./superlink.sh", *options)
        wait(lambda: process.poll() is None and answers(HOST, self._port), 60, "the SuperLink to answer")
        return process

    def node(self, client: int, *options: str) -> subprocess.Popen[bytes]:
        return self.start("./supernode.sh", str(client), *options)

    def register(self) -> None:
        for client in range(self.clients):
            self.flwr("supernode", "register", f"keys/client-{client}.pub", "deployment")

    def flwr(self, *words: str) -> dict[str, Any]:
        """A command of Flower's, and its answer."""
        source = '. ./environment.sh && exec flwr "$@" --format json'
        done = subprocess.run(
            ["sh", "-c", source, "flwr", *words], cwd=self.app, env=self.env, capture_output=True, timeout=120
        )
        answer: dict[str, Any] = json.loads(done.stdout)
        if not answer["success"]:
            raise RuntimeError(f"flwr {' '.join(words)}: {answer}")
        return answer

    def run(self, out: Path, changes: str = "", where: str = "deployment", *options: str) -> str:
        """Submit the app, and give the name of the run."""
        config = f'out="{out}" set="{changes}"'
        return str(self.flwr("run", ".", where, "-c", config, *options)["run-id"])

    def said(self, run: str) -> str:
        """What the server of a run has said."""
        source = f". ./environment.sh && exec flwr log {run} deployment --show"
        done = subprocess.run(["sh", "-c", source], cwd=self.app, env=self.env, capture_output=True, timeout=120)
        return done.stdout.decode("utf-8", "replace")

    def inhabitants(self, name: str = "") -> list[int]:
        """The processes of that name in the app's folder: those that were started here, and their children."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or is not ours to look at
                if (entry / "cwd").readlink() == self.app and name.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
        return found

    def close(self) -> None:
        """End all of them, also those that have outlived their parents."""
        for process in self.started:
            process.kill()
        for pid in self.inhabitants():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.started:
            process.wait(30)


def wait(done: Callable[[], object], seconds: float, what: str) -> float:
    """Wait until it is so, and give the seconds that it took."""
    begun = time.monotonic()
    while not done():
        if time.monotonic() - begun > seconds:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        time.sleep(0.05)
    return time.monotonic() - begun


def answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def free_ports(many: int) -> int:
    """The first of so many neighbouring ports that nobody uses, below those that Linux gives to connections."""
    while True:
        first = random.SystemRandom().randint(20000, 32000)
        if all(bindable(HOST, port) for port in range(first, first + many)):
            return first


def bindable(host: str, port: int) -> bool:
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((host, port))
        except OSError:
            return False
    return True


def lines(path: Path) -> int:
    """The rounds in a run's metrics."""
    return path.read_bytes().count(b"\n") if path.exists() else 0

"""Flower: its simulation on Ray with one actor for each core, its FedAvg strategy, its message API.

    python contenders/flower.py SPEC.json

There is a supernode for each client. The strategy names the client in the message instead of drawing nodes, so that no
time goes into asking 1,000 nodes for their partition-id first.
"""

import os
import sys
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch
from common import Job, Stopwatch, fit, trained
from processes import adopt, end_family
from torch.utils.data import TensorDataset

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

REGISTERING = 300.0  # seconds until all nodes must be registered; with 1,000 a whole first round took 11


@cache
def prepared(path: str) -> tuple[Job, list[TensorDataset]]:
    """The job and its data, loaded once by each actor."""
    job = Job.read(path)
    torch.set_num_threads(1)
    torch.manual_seed(job.seed + os.getpid())
    return job, job.clients()


def train(message: Message, context: Context) -> Message:
    task = message.content["config"]
    job, clients = prepared(task["spec"])
    samples = clients[task["client"]]
    model = job.network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=False)
    fit(model, samples, job)
    content = {"arrays": ArrayRecord(trained(model)), "metrics": MetricRecord({"num-examples": len(samples)})}
    return Message(RecordDict(content), reply_to=message)


class Named(FedAvg):
    """FedAvg whose cohorts are given: client k is the k-th node."""

    def __init__(self, job: Job, spec: str) -> None:
        super().__init__(fraction_evaluate=0.0)
        self._job, self._spec, self.watch = job, spec, Stopwatch(job)
        self._nodes: list[int] = []

    def wait_for(self, count: int, grid: Grid) -> None:
        """Wait until all nodes are registered, which happens one by one."""
        deadline = time.monotonic() + REGISTERING
        while True:
            asked = time.monotonic()
            nodes = sorted(grid.get_node_ids())
            if len(nodes) >= count:
                break
            if asked > deadline:
                raise TimeoutError(f"only {len(nodes)} of {count} nodes were registered within {REGISTERING:.0f} s")
            # The more nodes there are, the longer it takes to ask for them, and none is registered meanwhile.
            time.sleep(max(0.1, 10 * (time.monotonic() - asked)))
        self._nodes = nodes

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        for client in self._job.cohorts[server_round - 1]:
            task = ConfigRecord({"client": client, "spec": self._spec})
            content = RecordDict({"arrays": arrays, "config": task})
            yield Message(content, dst_node_id=self._nodes[client], message_type=MessageType.TRAIN)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        good = [reply for reply in replies if not reply.has_error()]
        if len(good) < len(self._job.cohorts[server_round - 1]):
            raise RuntimeError(f"round {server_round}: only {len(good)} clients replied")
        arrays, metrics = super().aggregate_train(server_round, good)
        self.watch.lap(arrays.to_torch_state_dict().values())
        return arrays, metrics


def main() -> None:
    spec = str(Path(sys.argv[1]).resolve())
    os.environ.setdefault("FLWR_HOME", str(Path(spec).with_suffix(".flwr")))
    # Actors import this file and what it imports.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    job = Job.read(spec)
    client, server = ClientApp(), ServerApp()
    client.train()(train)
    strategy, supernodes = Named(job, spec), job.client_count()

    @server.main()
    def rounds(grid: Grid, context: Context) -> None:
        strategy.wait_for(supernodes, grid)
        strategy.start(grid, ArrayRecord(trained(job.network())), num_rounds=len(job.cohorts))

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    start = {"init_args": {"num_cpus": job.workers, "include_dashboard": False}}
    adopt()
    try:
        strategy.watch.resume()
        run_simulation(server, client, num_supernodes=supernodes, backend_config=resources | start)
        strategy.watch.report("flower", "flwr", "ray")
    finally:
        end_family()  # Flower asks its actors to end and stops Ray at once, so that some never hear of it


if __name__ == "__main__":
    # The module by its name and not as __main__: only then do the actors find one cache instead of copies of it.
    import flower

    flower.main()

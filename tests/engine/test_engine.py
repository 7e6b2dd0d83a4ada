"""The same numbers to the bit on every engine, for any number of workers and any order of clients."""

import fcntl
import hashlib
import mmap
import os
import re
import subprocess
import sys
import time
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fedflat import Dataset, Federation, FedflatError, Samples, federate, models, train
from fedflat.engine import cluster, in_process, pool
from fedflat.engine.heap import MMAP_THRESHOLD, settled_worker
from fedflat.engine.inline import Inline
from fedflat.engine.shared import Shared
from fedflat.engine.store import Scratch, Tables
from fedflat.errors import RunError, TrainingError
from fedflat.methods.parser import parse
from fedflat.methods.uploads import Upload, collect
from fedflat.models import blocks, winograd
from fedflat.models.blocks import Convolution
from fedflat.models.vector import Network
from fedflat.recipe import Evaluation, Local, Server
from fedflat.rounds.client import Worker
from fedflat.rounds.server import conduct, first_state, view
from fedflat.rounds.setup import Broadcast, Problem
from fedflat.runs.loading import show

F_SETPIPE_SZ = 1031


def fingerprint(result):
    weights = torch.cat([p.detach().reshape(-1) for p in result.model.parameters()])
    history = [{k: v for k, v in record.items() if k != "seconds"} for record in result.history]
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest(), history


@pytest.mark.parametrize("method", ["fedavg", "feddyn + man(0.15)", "fedsam"])
def test_workers_do_not_change_a_bit(digits, method):
    settings = dict(model="mlp", method=method, rounds=3, cohort=5, epochs=2, batch=16, momentum=0.5)
    runs = [train(digits, **settings, engine="inline")]
    runs += [train(digits, **settings, engine="pool", workers=n) for n in (1, 2, 4)]
    assert all(fingerprint(run) == fingerprint(runs[0]) for run in runs[1:])


def test_convolutions_and_augmentation_do_not_change_a_bit_either(digits):
    from fedflat import Augment, Federation

    federation = Federation(digits.dataset, digits.shards, Augment(crop=1, flip=0.5, cutout=2))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10))
    start = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    prints = []
    for engine in (dict(engine="inline"), dict(engine="pool", workers=3)):
        net.load_state_dict(start)
        prints.append(fingerprint(train(federation, net, "fedsam", rounds=2, cohort=6, **engine)))
    assert prints[0] == prints[1]


def test_nor_do_convolutions_by_winograds_algorithm(digits, monkeypatch):
    def net():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), Convolution(64, 64, 3, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(256, 10),
        )  # fmt: skip

    settings = dict(method="fedsam", rounds=2, cohort=4, steps=3, batch=10)
    pooled = [train(digits, net(), **settings, engine="pool", workers=n) for n in (1, 2)]
    calls = []
    monkeypatch.setattr(blocks, "convolve", lambda *given: calls.append(given) or winograd.convolve(*given))
    inline = train(digits, net(), **settings, engine="inline")
    assert calls
    assert [fingerprint(run) for run in pooled] == [fingerprint(inline)] * 2


def test_bernoulli_cohorts_of_any_size_fit_the_pool(digits):
    settings = dict(rounds=6, cohort=0.4, sampling="bernoulli", method="feddyn")
    runs = [train(digits, **settings, engine=e) for e in ("inline", "pool")]
    assert len({len(record["cohort"]) for record in runs[0].history}) > 1
    assert fingerprint(runs[0]) == fingerprint(runs[1])


class Poisoned(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        if self.training:
            raise ValueError("the user's bug")
        return self.head(x.flatten(1))


def test_a_failing_client_is_named_by_the_pool_and_raises_its_own_error_inline(digits):
    named = r"client \d+ in round 0: raised: ValueError while training: the user's bug \(test_engine.py, line \d+\)"
    with pytest.raises(TrainingError, match=named):
        train(digits, Poisoned(), engine="pool", workers=2, rounds=1, failures="stop")
    with pytest.raises(ValueError, match="the user's bug"):
        train(digits, Poisoned(), engine="inline", rounds=1, failures="stop")


@pytest.mark.parametrize("engine", ["inline", "pool"])
def test_a_run_in_which_every_client_fails_stops_and_says_why(digits, engine):
    named = r"2 rounds in a row were skipped.*client \d+ in round 1: raised: ValueError while training: the user's bug"
    with pytest.raises(TrainingError, match=named):
        train(digits, Poisoned(), engine=engine, rounds=5, patience=2)


def test_a_worker_that_dies_is_an_error_and_not_a_hang(digits):
    class Dies(Poisoned):
        def forward(self, x):
            if self.training:
                import os

                os._exit(9)
            return self.head(x.flatten(1))

    with pytest.raises(TrainingError, match="died: its worker process died with exit code 9, while training"):
        train(digits, Dies(), engine="pool", workers=2, rounds=1, failures="stop")


@pytest.mark.parametrize("engine", ["inline", "pool"])
def test_numbers_that_are_no_longer_finite_stop_the_run_and_name_the_client(digits, engine):
    with pytest.raises(FedflatError, match=r"rounds in a row were skipped.*client \d+ in round \d+: .*lower local.lr"):
        train(digits, rounds=30, lr=1e9, engine=engine)


def test_the_container_limit_counts(monkeypatch, tmp_path):
    limit = tmp_path / "cpu.max"
    limit.write_text("150000 100000\n")
    monkeypatch.setattr(pool, "CPU_LIMIT", limit)
    assert pool.cores() == 1
    limit.write_text("max 100000\n")
    assert pool.cores() >= 1


def test_batch_norm_statistics_are_averaged_or_kept_or_refused(digits):
    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))

    averaged = train(digits, net(), rounds=2, cohort=4, batch=0, engine="inline")
    pooled = train(digits, net(), rounds=2, cohort=4, batch=0, engine="pool", workers=2)
    both = [run.model.state_dict() for run in (averaged, pooled)]
    assert all(torch.equal(both[0][name], both[1][name]) for name in both[0]), "also what counts the batches"
    assert torch.equal(averaged.model[2].running_mean, pooled.model[2].running_mean)
    assert not torch.equal(averaged.model[2].running_mean, torch.zeros(8))
    up, down = (averaged.history[0][key] for key in ("bytes_up", "bytes_down"))
    parameters = sum(p.numel() for p in averaged.model.parameters())
    assert up == down == 4 * 4 * (parameters + 16)
    local = train(digits, net(), rounds=2, cohort=4, batch=0, engine="inline", model_buffers="local")
    assert torch.equal(local.model[2].running_mean, torch.zeros(8))
    assert local.history[0]["bytes_up"] == 4 * 4 * parameters
    with pytest.raises(FedflatError, match=r'model.buffers = "refuse".*2.running_mean'):
        train(digits, net(), rounds=1, model_buffers="refuse")


def test_federations_can_be_larger_than_the_cohort_ever_is():
    federation = federate("digits", "iid", 300)
    assert len(train(federation, rounds=2, cohort=3, engine="pool").history) == 2


@pytest.mark.parametrize("method", ["fedavg", "fedsam", "fedsol(scope='head') + man(0.1)", "moon"])
def test_bf16_computes_in_bfloat16_and_keeps_everything_else_in_float32(digits, method):
    settings = dict(model="mlp", method=method, rounds=2, cohort=4, epochs=1, batch=16)
    full, half, pooled = (
        train(digits, **settings, precision=precision, engine=engine)
        for precision, engine in (("float32", "inline"), ("bf16", "inline"), ("bf16", "pool"))
    )
    assert fingerprint(half) == fingerprint(pooled)
    assert next(half.model.parameters()).dtype == torch.float32
    full_weights, half_weights = (
        torch.cat([p.detach().flatten() for p in result.model.parameters()]) for result in (full, half)
    )
    difference = float((full_weights - half_weights).norm() / full_weights.norm())
    assert 1e-6 < difference < 0.05


def test_workers_that_were_spawned_do_what_forked_ones_do(digits):
    network = Network(models.build("mlp", (1, 8, 8), 10, hidden=(8,)))
    problem, weights = Problem.of(digits, network, parse("feddyn"), Local()), []
    first = first_state(problem)
    for start in ("fork", "spawn"):
        state = first
        with closing(pool.Pool(problem, state, slots=4, workers=2, start=start)) as engine:
            for cohort in ([0, 1, 2, 3], [2, 3, 4]):
                state, _ = conduct(problem, state, engine, cohort)
        weights.append(state.weights)
    assert torch.equal(*weights)


def test_the_servers_network_can_be_put_away_while_a_pool_is_open(digits):
    problem = Problem.of(digits, Network(models.build("mlp", (1, 8, 8), 10, hidden=(8,))), parse("fedavg"), Local())
    first = first_state(problem)
    kept = first.weights.clone()
    with closing(pool.Pool(problem, first, slots=2, workers=2)) as engine:
        problem.network.put_away()
        assert problem.network.weights.untyped_storage().nbytes() == 4
        second, _ = conduct(problem, first, engine, [0, 1])
        third, _ = conduct(problem, second, engine, [2, 3])
        assert problem.network.weights.untyped_storage().nbytes() == 4
    assert torch.equal(first.weights, kept) and not torch.equal(second.weights, kept)
    show(problem, third)
    assert torch.equal(problem.network.weights, third.weights)
    assert problem.network.weights.data_ptr() not in {state.weights.data_ptr() for state in (first, second, third)}


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_memory_begins_with_the_initial_weights_wherever_the_federation_stands(digits, start):
    weights = []
    for engine in (lambda p, _: Inline(p), lambda p, s: pool.Pool(p, s, slots=2, workers=1, start=start)):
        network = Network(models.build("mlp", (1, 8, 8), 10, torch.Generator().manual_seed(0), hidden=(8,)))
        problem = Problem.of(digits, network, parse("moon"), Local(lr=0.5))
        state = replace(first_state(problem), weights=network.weights.sign() / 10)
        with closing(engine(problem, state)) as trained:
            state, _ = conduct(problem, state, trained, [0, 1])
        weights.append(state.weights)
    assert torch.equal(*weights)


@dataclass
class Room:
    """What a file system tells of itself."""

    free: float


@pytest.mark.parametrize("room", ["all", "round"])
def test_a_round_stays_in_memory_if_it_fits_even_if_the_memory_of_all_clients_does_not(digits, monkeypatch, room):
    network = Network(models.build("mlp", (1, 8, 8), 10, hidden=(8,)))
    problem = Problem.of(digits, network, parse("scaffold"), Local())
    first = first_state(problem)
    vector = first.weights.nbytes
    # Of each of a round's two clients: its Δ and control, the new memory, and two to spare. Of all clients, the memory.
    vectors = 2 * 5 + (problem.federation.clients if room == "all" else 0)
    monkeypatch.setattr("fedflat.engine.store.shutil.disk_usage", lambda _: Room(1.1 * vectors * vector + 1))
    weights = []
    for engine in Inline(problem), pool.Pool(problem, first, slots=2, workers=2):
        state = first
        with closing(engine):
            if isinstance(engine, pool.Pool):
                assert (engine._scratch.in_memory, engine._kept.in_memory) == (True, room == "all")
            for cohort in ([0, 1], [1, 2]):
                state, _ = conduct(problem, state, engine, cohort)
        weights.append(state.weights)
    assert torch.equal(*weights)


@pytest.mark.parametrize("full", ["Scratch", "Shared"])
def test_a_pool_without_room_leaves_no_files_behind(digits, monkeypatch, full):
    problem = Problem.of(digits, Network(models.build("mlp", (1, 8, 8), 10, hidden=(8,))), parse("scaffold"), Local())
    made = []

    def scratch(size):
        if made and full == "Scratch":
            raise RunError("no room")
        made.append(Scratch(size))
        return made[-1]

    def shared(*_):
        raise RunError("no room")

    monkeypatch.setattr(pool, "Scratch", scratch)
    monkeypatch.setattr(pool, "Shared", shared)
    with pytest.raises(RunError, match="no room"):
        pool.Pool(problem, first_state(problem), slots=2, workers=2)
    assert made and not any(each.path.exists() for each in made)


@pytest.fixture
def scratches(monkeypatch):
    """The folders that were made for the memory of clients, for which there is no room."""
    made = []

    def no_room(*_):
        raise RunError("no room")

    monkeypatch.setattr(in_process, "Scratch", lambda size: made.append(Scratch(size)) or made[-1])
    monkeypatch.setattr(in_process, "Memory", no_room)
    return made


def test_an_engine_in_this_process_without_room_leaves_no_files_behind(digits, scratches):
    problem = Problem.of(digits, Network(models.build("mlp", (1, 8, 8), 10, hidden=(8,))), parse("scaffold"), Local())
    with pytest.raises(RunError, match="no room"):
        Inline(problem)
    assert [each.path.exists() for each in scratches] == [False]


def test_a_cluster_without_room_is_left_as_well(digits, scratches, monkeypatch):
    problem = Problem.of(digits, Network(models.build("mlp", (1, 8, 8), 10, hidden=(8,))), parse("scaffold"), Local())
    left = []
    monkeypatch.setattr(cluster, "_connect", lambda *_: (SimpleNamespace(shutdown=lambda: left.append(True)), True))
    with pytest.raises(RunError, match="no room"):
        cluster.Cluster(problem)
    assert left == [True] and [each.path.exists() for each in scratches] == [False]


def test_a_pool_that_cannot_start_all_workers_keeps_none(digits, monkeypatch):
    problem = Problem.of(digits, Network(models.build("mlp", (1, 8, 8), 10, hidden=(8,))), parse("scaffold"), Local())
    hire, pools = pool.Pool._hire, []

    def first_only(self, number):
        pools.append(self)
        if number:
            raise BlockingIOError("no more processes")
        hire(self, number)

    monkeypatch.setattr(pool.Pool, "_hire", first_only)
    with pytest.raises(BlockingIOError, match="no more processes"):
        pool.Pool(problem, first_state(problem), slots=2, workers=2)
    ((_, process),) = pools[0]._workers.values()
    assert not process.is_alive()
    assert not pools[0]._scratch.path.exists() and not pools[0]._kept.path.exists()


RESIDENT = """
import re
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
import torch
from fedflat import federate, models
from fedflat.engine import pool, worker
from fedflat.methods.parser import parse
from fedflat.models.vector import Network
from fedflat.recipe import Local
from fedflat.rounds.setup import Problem
from fedflat.rounds.server import conduct, first_state

torch.set_num_threads(1)
digits = federate("digits", "dirichlet", 8, alpha=0.3, seed=1)

def resident():
    network = Network(models.build("mlp", (1, 8, 8), 10, hidden=(2000, 500)))
    problem = Problem.of(digits, network, parse("fedsam"), Local())
    with closing(pool.Pool(problem, state := first_state(problem), slots=2, workers=2)) as engine:
        conduct(problem, state, engine, [0, 1])
        rolled = [Path(f"/proc/{p.pid}/smaps_rollup").read_text() for _, p in engine._workers.values()]
    return sum(int(re.search(r"Private_Dirty: *(\\d+) kB", text)[1]) for text in rolled) / 1024

given_back = resident()
worker.give_freed_memory_back = lambda: None
print(resident() - given_back)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator, and reads /proc")
def test_a_worker_gives_a_large_models_freed_memory_back_after_its_first_client():
    """In a process of its own: other tests' settings of the heap would be inherited by the workers."""
    more = subprocess.run([sys.executable, "-c", RESIDENT], capture_output=True, text=True, check=True).stdout
    assert float(more) > 5  # MB: Δ of 4.5 MB in each of two workers, at the least


def held(process, folder, files=r"(?:upload|kept)\.\w+"):
    """The kB of files in a folder that a process holds."""
    maps = Path(f"/proc/{process}/smaps").read_text()
    return sum(map(int, re.findall(rf"{folder}/{files}\n.*?^Rss: *(\d+) kB", maps, re.DOTALL | re.MULTILINE)))


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads /proc")
def test_the_server_does_not_hold_large_uploads_that_it_has_looked_at(digits):
    network = Network(models.build("mlp", (1, 8, 8), 10, hidden=(900, 1300)))
    problem = Problem.of(digits, network, parse("fedsmoo"), Local(steps=1))
    first = first_state(problem)
    with closing(pool.Pool(problem, first, slots=4, workers=2)) as engine:
        broadcast = Broadcast(0, 0.1, problem.method.broadcast(view(problem, first)))
        uploads = collect(engine.local_rounds(broadcast, range(4)), "uniform")
        assert min(upload.norms["dual"] for upload in uploads) > 0
        for name in "delta", "dual":
            uploads.sum(name)
            assert held(os.getpid(), engine._scratch.path) < network.size * 4 / 1024
        assert held(os.getpid(), engine._scratch.path, r"(?:sent|first)\.\w+") == 0


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads /proc")
def test_no_step_holds_what_only_its_plan_has_read(digits):
    """The client's memory, and the model from which it starts; s of FedSMOO is read in every step."""
    network = Network(models.build("mlp", (1, 8, 8), 10, hidden=(900, 1300)))
    problem = Problem.of(digits, network, parse("fedsmoo"), Local(steps=2))
    state, read, left = first_state(problem), [], []

    def feed(batches):
        files = r"(?:sent\.weights|first\.\w+|memory\.\w+)"
        read.append(held(os.getpid(), scratch.path, files))
        for batch in shared.fed(batches):
            left.append(held(os.getpid(), scratch.path, files))
            yield batch

    with closing(Scratch(0)) as scratch:
        shared = Shared(scratch, scratch, problem, state, slots=1, workers=1)
        shared.send(problem.method.broadcast(view(problem, state)))
        worker = Worker(problem, first=shared.first[0], feed=feed)
        for _ in range(2):
            _, kept = worker.local_round(Broadcast(0, 0.1, shared.board[0]), 3, shared.memory[3])
            shared.memory.keep(3, kept)
    assert min(read) > 3 * network.size * 4 / 1024 and left == [0] * 4


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads /proc")
def test_no_process_holds_large_uploads_and_new_memory_after_the_round_and_not_a_bit_changes(digits):
    network = Network(models.build("mlp", (1, 8, 8), 10, hidden=(900, 1300)))
    problem, weights = Problem.of(digits, network, parse("fedsmoo"), Local(steps=1)), []
    first = first_state(problem)
    for engine in Inline(problem), pool.Pool(problem, first, slots=4, workers=2):
        state = first
        with closing(engine):
            for cohort in (range(4), range(2, 6)):
                state, _ = conduct(problem, state, engine, cohort)
            if isinstance(engine, pool.Pool):
                family = [os.getpid(), *(process.pid for _, process in engine._workers.values())]
                given = r"(?:sent|first|upload|kept)\.\w+"
                kilobytes = sum(held(process, engine._scratch.path, given) for process in family)
        weights.append(state.weights)
    assert torch.equal(*weights)
    assert kilobytes < network.size * 4 / 1024


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_memory_and_open_files_do_not_grow_over_the_rounds(digits):
    network, local = Network(models.build("mlp", (1, 8, 8), 10, hidden=(8,))), Local(steps=1, batch=8)
    problem = Problem.of(digits, network, parse("scaffold"), local)
    server, state = Server(cohort=5), first_state(problem)
    with closing(pool.Pool(problem, state, slots=5, workers=2)) as engine:
        seen = []
        for round in range(240):
            state, _ = conduct(problem, state, engine, [(round + i) % digits.clients for i in range(5)], server)
            if round in (80, 239):
                family = [os.getpid(), *(process.pid for _, process in engine._workers.values())]
                pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in family)
                files = sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in family)
                seen.append((pages * os.sysconf("SC_PAGE_SIZE") / 2**20, files))
    (before, open_before), (after, open_after) = seen
    assert after - before < 4, "MB, of three processes together"
    assert open_after == open_before


@pytest.mark.skipif(not hasattr(mmap, "MADV_REMOVE"), reason="only Linux can free a part of a shared file")
def test_an_update_that_nobody_looks_at_goes_once_it_is_summed_and_the_sum_is_the_same_to_the_bit(digits):
    network = Network(models.build("mlp", (1, 8, 8), 10, hidden=(900, 1300)))
    room, weights = [], []
    for watch in None, Evaluation(measures=["consistency"]):
        problem = Problem.of(digits, network, parse("fedavg"), Local())
        state = replace(first_state(problem), weights=torch.ones(network.size) / 100)
        with closing(pool.Pool(problem, state, slots=6, workers=2)) as engine:
            merged, _ = conduct(problem, state, engine, range(6), Server(cohort=6), watch)
            room.append((engine._scratch.path / "upload.delta").stat().st_blocks * 512)
        weights.append(merged.weights)
    assert torch.equal(*weights)
    assert room[0] < network.size * 4 < 6 * network.size * 4 <= room[1]


@pytest.mark.parametrize("method", ["fedavg", "feddyn", "fedavgm"])
def test_updates_are_kept_singly_for_a_part_that_looks_at_more_than_their_average(digits, method, monkeypatch):
    problem = Problem.of(digits, Network(models.build("mlp", (1, 8, 8), 10)), parse(method), Local())
    state = first_state(problem)
    gone: list[int] = []
    spent = Upload.spent
    monkeypatch.setattr(Upload, "spent", lambda upload: gone.append(upload.client) or spent(upload))
    with closing(Inline(problem)) as engine:
        conduct(problem, state, engine, [1, 2, 5], Server(cohort=3))
    assert sorted(gone) == ([] if method == "feddyn" else [1, 2, 5])


@dataclass(frozen=True)
class Leaving(Upload):
    """An upload that tells when its Δ is no longer needed."""

    gone: list[int] = field(default_factory=list)

    def spent(self):
        self.gone.append(self.client)
        return super().spent()


def test_a_client_that_is_away_does_not_hold_the_sum_up():
    def arriving():
        for client in (7, 5, 4):
            yield Leaving(client, 1, 1, 0.1, 0.0, torch.tensor([float(client)]), gone=gone)
            if client == 7:
                away.add(9)
            seen.append([*gone])

    away, gone, seen = set[int](), list[int](), list[list[int]]()
    uploads = collect(arriving(), "uniform", [9, 7, 4, 5], away, keep=False)
    assert seen == [[], [7], [7, 4, 5]]
    assert [upload.client for upload in uploads] == [7, 4, 5]
    assert uploads.average("delta") == (7 + 4 + 5) / 3


def test_a_pool_whose_round_was_given_up_says_so_instead_of_mixing_rounds(digits):
    problem = Problem.of(digits, Network(models.build("mlp", (1, 8, 8), 10, hidden=(8,))), parse("fedavg"), Local())
    state = first_state(problem)
    with closing(pool.Pool(problem, state, slots=6, workers=2)) as engine:
        next(engine.local_rounds(Broadcast(0, 0.1, problem.method.broadcast(view(problem, state))), range(6)))
        with pytest.raises(TrainingError, match="given up half-way; start a new engine"):
            conduct(problem, state, engine, [0, 1])


def test_a_worker_that_died_between_two_rounds_is_replaced_and_nobody_is_refused(digits):
    problem = Problem.of(digits, Network(models.build("mlp", (1, 8, 8), 10, hidden=(8,))), parse("fedavg"), Local())
    state = first_state(problem)
    with closing(pool.Pool(problem, state, slots=2, workers=1)) as engine:
        state, _ = conduct(problem, state, engine, [0, 1])
        ((number, process),) = engine._workers.values()
        while int(engine._shared.busy[0][number]):
            time.sleep(0.01)
        process.kill()
        process.join()
        _, report = conduct(problem, state, engine, [0, 1])
        assert (report.cohort, report.refused) == ([0, 1], [])


def test_more_tasks_than_the_pipe_holds_are_laid_as_it_empties(digits):
    problem = Problem.of(
        digits, Network(models.build("mlp", (1, 8, 8), 10, hidden=())), parse("fedavg"), Local(steps=1)
    )
    cohort = [i % digits.clients for i in range(600)]
    with closing(pool.Pool(problem, first_state(problem), slots=600, workers=2)) as engine:
        fcntl.fcntl(engine._tasks.fileno(), F_SETPIPE_SZ, 4096)
        broadcast = Broadcast(0, 0.1, problem.method.broadcast(view(problem, first_state(problem))))
        assert len(list(engine.local_rounds(broadcast, cohort))) == 600


def test_soft_labels_go_one_by_one(digits):
    soft = torch.nn.functional.one_hot(digits.dataset.train.labels, 10).float()
    data = digits.dataset
    samples = Samples(data.train.inputs, soft)
    federation = Federation(Dataset("soft", samples, samples, 10, data.mean, data.std), digits.shards)
    runs = [train(federation, rounds=1, cohort=8, engine="inline", group=group) for group in (1, 4)]
    assert fingerprint(runs[0])[0] == fingerprint(runs[1])[0]


@pytest.mark.parametrize("fails", [False, True])
def test_freed_memory_is_kept_from_a_workers_second_step_on_however_the_first_one_ends(digits, monkeypatch, fails):
    def loss(logits, labels):
        seen.append("step")
        return logits.sum() * (1 / 0 if fails else 1)

    seen = []
    monkeypatch.setattr(
        "fedflat.engine.heap._glibc", lambda _, option, value: option == MMAP_THRESHOLD and seen.append(value)
    )
    problem = Problem.of(
        digits, Network(models.build("mlp", (1, 8, 8), 10)), parse("fedavg"), Local(steps=2), loss=loss
    )
    worker, broadcast = (
        settled_worker(problem),
        Broadcast(0, 0.1, problem.method.broadcast(view(problem, first_state(problem)))),
    )
    for number in (0, 1):
        with pytest.raises(ZeroDivisionError) if fails else nullcontext():
            worker.local_round(broadcast, number, None)
    first = [2**25, 2**16, "step", 2**25]
    assert seen == ([*first, "step"] if fails else [*first, "step", "step", "step"])


@pytest.mark.parametrize("method", ["fedsmoo", "fedsmoo(crowd='all')", "scaffold"])
def test_vectors_that_are_uploaded_and_kept_change_no_bit(digits, method):
    settings = dict(model="mlp", method=method, rounds=3, cohort=5, batch=16, lr=0.1, measures=[])
    pooled = train(digits, **settings, engine="pool", workers=2)
    assert fingerprint(pooled) == fingerprint(train(digits, **settings, engine="inline"))


def test_a_vector_that_is_both_uploaded_and_kept_is_stored_once(digits, monkeypatch):
    written, write = [], Tables.write
    monkeypatch.setattr(
        Tables, "write", lambda self, row, vectors: written.append(sorted(vectors)) or write(self, row, vectors)
    )
    problem = Problem.of(digits, Network(models.build("mlp", (1, 8, 8), 10, hidden=(12,))), parse("fedsmoo"))
    state = first_state(problem)
    scratch = Scratch(0)
    with closing(scratch):
        shared = Shared(scratch, scratch, problem, state, slots=1, workers=1)
        worker = Worker(problem)
        sent = problem.method.broadcast(view(problem, state))
        upload, kept = worker.local_round(Broadcast(0, 0.1, sent), 3, None)
        written.clear()
        message = shared.stripped(upload, kept, 0)
        assert len(message["same"]) == 1 and {*message["same"].values()} < {*kept}
        assert [name for names in written for name in names] == ["delta", *kept]
        back = shared.completed(message, 0)
        assert back.vectors.keys() == upload.vectors.keys()
        assert all(torch.equal(back.vectors[name], vector) for name, vector in upload.vectors.items())


def uploads_of(*values, keep=True):
    sent = (Upload(i, 1 + i, 1, 0.1, 0.0, torch.tensor([value])) for i, value in enumerate(values))
    return collect(sent, "samples", keep=keep)


def test_an_update_that_is_spent_holds_no_numbers_any_more_and_average_and_norms_stay():
    uploads = uploads_of(3.0, 6.0, keep=False)
    assert [upload.norm for upload in uploads] == [3.0, 6.0]
    assert [upload.delta.numel() for upload in uploads] == [0, 0]
    assert uploads.average("delta").tolist() == [(1 * 3.0 + 2 * 6.0) / 3]


def test_a_round_without_uploads_has_an_empty_average():
    uploads = uploads_of()
    assert (len(uploads), uploads.weights, uploads.average("delta").numel()) == (0, [], 0)


@pytest.mark.parametrize(("by", "shares"), [("uniform", [1 / 3, 1 / 3, 1 / 3]), ("samples", [1 / 6, 2 / 6, 3 / 6])])
def test_the_average_counts_clients_or_their_samples(by, shares):
    rows = torch.tensor([[1.0, -3.0], [5.0, 0.5], [2.0, 8.0]], dtype=torch.float64)
    uploads = collect((Upload(i, 1 + i, 1, 0.1, 0.0, row, {"own": -row}) for i, row in enumerate(rows)), by)
    expected = torch.tensor(shares, dtype=torch.float64) @ rows
    assert uploads.weights == pytest.approx(shares)
    torch.testing.assert_close(uploads.average("delta"), expected)
    torch.testing.assert_close(uploads.average("own"), -expected)


def test_each_upload_keeps_its_own_norm_under_a_parts_names():
    uploads = uploads_of(3.0, -6.0, 4.0)
    norms = [upload.norm for upload in uploads]
    assert [upload.norm for upload in uploads.named({})] == norms == [3.0, 6.0, 4.0]


def test_a_part_sees_its_own_vectors_by_its_own_names_and_no_others():
    vectors = {"Mine.dual": torch.tensor([2.0]), "Another.dual": torch.tensor([5.0])}
    uploads = collect([Upload(i, 1, 1, 0.1, 0.0, torch.tensor([1.0]), vectors) for i in range(2)], "uniform")
    own = uploads.named({"dual": "Mine.dual"})
    assert [list(upload.vectors) for upload in own] == [["dual"], ["dual"]]
    assert own.average("dual") == 2 and own.sum("dual") == 4 and own.average("delta") == 1


def test_one_upload_alone_is_its_own_sum_and_average():
    uploads = collect([Upload(0, 9, 1, 0.1, 0.0, torch.tensor([3.0]), {"own": torch.tensor([5.0])})], "samples")
    assert uploads.sum("delta") == uploads.average("delta") == 3
    assert uploads.sum("own") == uploads.average("own") == 5

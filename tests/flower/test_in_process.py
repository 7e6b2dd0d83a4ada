"""The deployment's two sides, joined by calls in this process: the simulator's numbers, also after a crash."""

import io
import logging
import signal
from dataclasses import replace

import pytest

from fedflat import Dataset, Samples, trusted
from fedflat.errors import DataError, RecipeError, RunError, TrainingError
from fedflat.runs.build import gather, prepare

pytest.importorskip("flwr")
changed = pytest.importorskip("fedflat.flower.service").changed
pytestmark = pytest.mark.filterwarnings("ignore")
METHODS = ("fedavg", "scaffold", "fedsmoo", "fedsol", "fedadamw", "feddyn + man(0.1)")
BATCH_NORM = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))
"""


@pytest.mark.parametrize("method", METHODS)
def test_model_and_records_equal_the_simulators_to_the_bit(deployed, method, small, simulated):
    recipe = small(f"method={method}")
    assert deployed(recipe) == simulated(recipe)


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_so_do_those_of_a_model_with_batch_norm(deployed, tmp_path, monkeypatch, buffers, small, simulated):
    (tmp_path / "batch_norm_net.py").write_text(BATCH_NORM)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(trusted, "_packages", {"batch_norm_net"})
    recipe = small("model=batch_norm_net:Net", f"model.buffers={buffers}")
    assert deployed(recipe) == simulated(recipe)


def test_clients_share_no_steps_even_if_the_recipe_lets_them(deployed, small, simulated):
    assert deployed(small("engine.group=0")) == simulated(small())


def own_samples(recipe):
    """A hook whose clients know only what the recipe's split gives them; the server knows one training sample."""
    federation = gather(recipe)
    known = federation.dataset

    def data(client: int) -> Dataset:
        indices = federation.shard(client) if client >= 0 else slice(1)
        return replace(known, train=Samples(known.train.inputs[indices], known.train.labels[indices]))

    return data


def test_a_data_hook_that_gives_the_splits_samples_changes_nothing(deployed, small, simulated):
    recipe = small("method=feddyn")
    assert deployed(recipe, data=own_samples(recipe)) == simulated(recipe)


def test_each_side_knows_a_clients_share_of_all_samples(small):
    from fedflat.flower.own import NOBODY, own_problem, with_sizes

    recipe = small()
    whole = gather(recipe)
    sizes = {client: whole.samples(client) for client in range(4)}
    everyone = sum(sizes.values())
    server = with_sizes(own_problem(recipe, NOBODY, 1, own_samples(recipe)), sizes).federation
    for client in range(4):
        own = own_problem(recipe, client, everyone, own_samples(recipe)).federation
        assert own.share(client) == server.share(client) == whole.share(client)
        with pytest.raises(DataError, match=f"client {client} was asked for the samples of client {client + 1}"):
            own.shard(client + 1)


def test_the_sharpness_that_clients_measure_is_the_simulators(deployed, small, simulated):
    recipe = small("server.rounds=1", "evaluation.sharpness=1", "evaluation.sharpness_samples=100")
    there, here = deployed(recipe), simulated(recipe)
    assert there == here
    assert here[1][0]["lambda1"] > 0


def test_what_clients_measure_on_their_own_samples_is_null(deployed, small):
    measures = ["gradient", "margin", "local_sharpness"]
    _, records = deployed(small("server.rounds=2", f"evaluation.measures={measures}"))
    assert [[record[name] for name in measures] for record in records] == [[None] * 3] * 2


def test_changes_that_concern_the_server_alone_are_the_servers_to_make(deployed, tmp_path, small, simulated):
    (tmp_path / "recipe.toml").write_text(small().to_toml())
    longer = changed(tmp_path / "recipe.toml", "server.rounds=4 admission.deadline=5")
    assert deployed(longer, source=tmp_path / "recipe.toml") == simulated(small("server.rounds=4"))


@pytest.mark.parametrize("change", ["method=fedprox", "local.lr=0.05", "evaluation.sharpness=1", "model.hidden=[9]"])
def test_changes_of_what_clients_do_are_refused_before_anything_begins(small, change):
    with pytest.raises(RecipeError, match=rf"^set: {change.partition('.')[0].partition('=')[0]} affects the clients"):
        changed(small(), change)


def test_the_servers_log_has_the_sentence_of_a_mistake_and_no_traceback(small, loopback):
    from flwr.app import Context, RecordDict
    from flwr.supercore.logger import FLOWER_LOGGER

    from fedflat.flower import client_app, server_app

    said = logging.StreamHandler(io.StringIO())
    FLOWER_LOGGER.addHandler(said)
    context = Context(1, 0, {}, RecordDict(), run_config={"set": "local.lr=0.05"})
    try:
        server_app(small())(loopback.InProcess(client_app(small()), 4), context)
    except RecipeError as error:
        FLOWER_LOGGER.error("%s raised an exception", "ServerApp", exc_info=error)  # as Flower does
    FLOWER_LOGGER.removeHandler(said)
    FLOWER_LOGGER.filters.clear()
    (line,) = said.stream.getvalue().splitlines()
    assert line.startswith("fedflat: set: local affects the clients")


def test_memory_stays_with_the_client(loopback, deployed, small):
    crossed = set()

    class Watched(loopback.InProcess):
        def answers(self, message):
            (reply,) = super().answers(message)
            crossed.update(reply.content["vectors"])
            return [reply]

    deployed(small("method=scaffold"), Watched)
    assert crossed == {*prepare(small("method=scaffold")).uploads} == {"delta", "control_change"}


# --------------------------------------------------------------------------------------------------------------------
# A server that goes on
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("method", ["scaffold", "fedsmoo"])
def test_a_server_that_is_killed_goes_on_to_the_same_bits(deployed, tmp_path, method, lost, small, simulated, cut_in):
    recipe, memory = small(f"method={method}", "server.rounds=4"), str(tmp_path / "memory")
    with pytest.raises(ConnectionAbortedError):
        deployed(recipe, cut_in(3), memory=memory)
    for file in (tmp_path / "out" / "checkpoints").glob("00000003.*") if lost else ():
        file.unlink()  # as if it had been killed between the clients' last uploads and its checkpoint
    assert deployed(recipe, memory=memory) == simulated(recipe)


def test_every_round_is_saved_whatever_the_recipe_says(deployed, tmp_path, small, cut_in):
    recipe = small("checkpoint.every=50", "server.rounds=4")
    with pytest.raises(ConnectionAbortedError):
        deployed(recipe, cut_in(3))
    assert (tmp_path / "out" / "checkpoints" / "00000003.json").exists()


def test_it_waits_for_clients_before_it_goes_on(deployed, loopback, tmp_path, small, cut_in):
    recipe = small("deployment.wait=0.3")
    with pytest.raises(ConnectionAbortedError):
        deployed(recipe, cut_in(1))

    class Empty(loopback.InProcess):
        def get_node_ids(self):
            return []

    with pytest.raises(TrainingError, match=r"^only 0 of 4 clients are connected after 0.3 s \(missing: 0, 1, 2, 3\)"):
        deployed(recipe, Empty)
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("content", ["", "{", None])
def test_a_directory_without_a_sound_journal_is_not_gone_on_with(deployed, tmp_path, content, small, cut_in):
    with pytest.raises(ConnectionAbortedError):
        deployed(small(), cut_in(1))
    journal = tmp_path / "out" / "deployment.json"
    journal.unlink() if content is None else journal.write_text(content)
    with pytest.raises(RunError, match=r"deployment.json.* another `out`$"):
        deployed(small())


def test_a_server_that_is_told_to_end_does_so_at_once(deployed, loopback, small):
    class Told(loopback.InProcess):
        """As Flower does it when the SuperLink is gone: an interrupt, in the middle of a round."""

        def answers(self, message):
            if message.metadata.group_id == "1":
                signal.raise_signal(signal.SIGINT)
            return super().answers(message)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            deployed(small(), Told)
    finally:
        signal.signal(signal.SIGINT, before)

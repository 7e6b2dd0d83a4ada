"""Who a node is: the client whose key it has, and nobody else."""

import subprocess
from shutil import copytree
from statistics import median
from types import SimpleNamespace

import pytest

from fedflat.errors import RunError, TrainingError
from fedflat.runs.build import prepare

flwr = pytest.importorskip("flwr.app")
identity = pytest.importorskip("fedflat.flower.identity")
write_keys = pytest.importorskip("fedflat.flower.keys").write_keys
serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
pytestmark = pytest.mark.filterwarnings("ignore")
IMPOSTOR = 7


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deployment") / "keys"
    write_keys(folder, ["127.0.0.1"], clients=5)
    return folder


def as_flower_has_it(path):
    """A public key as Flower's node list has it: PEM."""
    key = serialization.load_ssh_public_key(path.read_bytes())
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


@pytest.fixture
def keyed(loopback, keys):
    """A grid whose nodes have registered keys: client i's node that of client i, and more as given (node: client)."""

    def grid(**more):
        class Keyed(loopback.InProcess):
            def __init__(self, app, clients, **config):
                super().__init__(app, clients, **config)
                self.keys = {node: f"client-{node - 100}.pub" for node in self.contexts}
                for node, (key, claim) in more.get("others", {}).items():
                    context = flwr.Context(1, node, {**config, "client": claim}, flwr.RecordDict(), run_config={})
                    # The impostor is listed first, as a node with a smaller number would be.
                    self.contexts = {node: context, **self.contexts}
                    self.keys[node] = key

            def get_nodes(self):
                return [SimpleNamespace(node_id=node, public_key=self.key(node)) for node in self.contexts]

            def key(self, node):
                name = self.keys[node]
                return as_flower_has_it(keys / name) if name else b"no key at all"

        return Keyed

    return grid


def asked(grid, heard):
    class Watched(grid):
        def answers(self, message):
            heard.append((message.metadata.dst_node_id, message.metadata.message_type))
            return super().answers(message)

    return Watched


def test_a_fingerprint_is_that_of_ssh_keygen(keys):
    found = subprocess.run(["ssh-keygen", "-lf", keys / "client-1.pub"], capture_output=True, text=True)
    if found.returncode:
        pytest.skip("there is no ssh-keygen here")
    assert identity.fingerprint((keys / "client-1.pub").read_bytes()) == found.stdout.split()[1]


def test_flowers_form_and_the_files_have_one_fingerprint(keys):
    path = keys / "client-3.pub"
    assert identity.fingerprint(as_flower_has_it(path)) == identity.fingerprint(path.read_bytes()) != ""
    assert identity.fingerprint(b"") == identity.fingerprint(b"\x00" * 5000) == ""


@pytest.mark.parametrize(
    ("key", "why"),
    [("client-1.pub", "its key is client 1's, but it claims to be client 2"),
     ("client-4.pub", "does not belong to a client"),
     (None, "its key of unknown kind does not belong to a client")],
)  # fmt: skip
def test_a_node_that_claims_anothers_number_is_refused(deployed, small, simulated, keyed, keys, capsys, key, why):
    heard = []
    grid = asked(keyed(others={IMPOSTOR: (key, 2)}), heard)
    assert deployed(small(), grid, keys=keys) == simulated(small())
    assert (IMPOSTOR, "train") not in heard and (102, "train") in heard
    assert why in capsys.readouterr().out


def test_nor_is_it_believed_while_the_true_client_is_away(deployed, small, keyed, keys):
    class Alone(keyed(others={IMPOSTOR: ("client-1.pub", 2)})):
        def get_nodes(self):
            return [node for node in super().get_nodes() if node.node_id != 102]

    with pytest.raises(TrainingError, match=r"only 3 of 4 clients .*missing: 2.* its key is client 1's"):
        deployed(small("deployment.wait=1"), Alone, keys=keys)


def test_an_impostor_cannot_displace_the_node_that_its_key_belongs_to(deployed, small, simulated, keyed, keys):
    """Client 1's owner starts a second node as client 2: client 1's own stays who it is."""
    grid = keyed(others={IMPOSTOR: ("client-1.pub", 2), IMPOSTOR + 1: ("client-1.pub", 0)})
    assert deployed(small(), grid, keys=keys) == simulated(small())


def test_a_reply_from_another_node_than_the_one_asked_is_none(deployed, small, loopback, simulated):
    class Crossed(loopback.InProcess):
        """A node answers in the place of another one's message."""

        def answers(self, message):
            (reply,) = super().answers(message)
            if message.metadata.dst_node_id == 102 and message.metadata.message_type == "train":
                reply.metadata.__dict__["_src_node_id"] = 101
            return [reply]

    _, records = deployed(small("admission.deadline=0.5"), Crossed)
    refused = {(r["client"], r["reason"]) for record in records for r in record.get("refused", ())}
    assert refused == {(2, "hung")}


def test_a_table_of_keys_must_be_sound(tmp_path, keys):
    with pytest.raises(RunError, match=r"has no client-\*.pub"):
        identity.read_table(tmp_path, 3)
    for client in range(2):
        (tmp_path / f"client-{client}.pub").write_bytes((keys / "client-0.pub").read_bytes())
    with pytest.raises(RunError, match="client 0 has the same key"):
        identity.read_table(tmp_path, 3)
    (tmp_path / "client-1.pub").write_text("ssh-rsa nothing")
    with pytest.raises(RunError, match="not a public key"):
        identity.read_table(tmp_path, 3)


# --------------------------------------------------------------------------------------------------------------------
# How many samples it may claim
# --------------------------------------------------------------------------------------------------------------------

UNEQUAL = "split={name='sizes', exponent=1.5, clients=4}"


@pytest.fixture
def agreed(tmp_path, keys):
    """A function that gives a copy of the keys with a samples.toml of this text."""

    def made(text):
        folder = tmp_path / "agreed"
        copytree(keys, folder, dirs_exist_ok=True)
        (folder / "samples.toml").write_text(text)
        return folder

    return made


def table_of(sizes):
    return "".join(f"{client} = {n}\n" for client, n in sizes.items())


def test_samples_that_were_agreed_on_count_in_full_as_in_a_simulation(deployed, small, simulated, keyed, keys, agreed):
    sizes = {i: prepare(small(UNEQUAL)).federation.samples(i) for i in range(4)}
    assert max(sizes.values()) > 3 * median(sizes.values())
    expected = simulated(small(UNEQUAL))
    assert deployed(small(UNEQUAL), keyed(), keys=agreed(table_of(sizes))) == expected


def test_where_nothing_was_agreed_on_they_count_up_to_the_median(deployed, small, simulated, keyed, keys):
    expected = simulated(small(UNEQUAL))
    assert deployed(small(UNEQUAL), keyed(), keys=keys)[0] != expected[0]


def test_a_client_that_claims_more_than_was_agreed_on_is_none(deployed, small, keyed, agreed):
    sizes = {i: prepare(small()).federation.samples(i) for i in range(4)}
    less = agreed(table_of({**sizes, 2: sizes[2] - 1}))
    why = rf"only 3 of 4 .*client 2 claims {sizes[2]} samples, and samples.toml allows {sizes[2] - 1}"
    with pytest.raises(TrainingError, match=why):
        deployed(small("deployment.wait=1"), keyed(), keys=less)


@pytest.mark.parametrize(
    ("text", "why"),
    [("0 = 5\n2 = 5", "client 1 is missing; list every client, as in `1 = 1200`"),
     ("0 = 5\n1 = 5\n2 = 5\n3 = 5", "'3' is not a client from 0 to 2"),
     ("0 = 5\n1 = -5\n2 = 5", "client 1: -5 is not a whole number from 1 on"),
     ("0 = 5\n1 = true\n2 = 5", "client 1: True is not a whole number"),
     ("0 = 5\n01 = 5\n2 = 5", "'01' is not a client"),
     ("0 = ", "cannot be read")],
)  # fmt: skip
def test_a_mistake_in_the_table_of_samples_is_one_sentence(tmp_path, text, why):
    (tmp_path / "samples.toml").write_text(text)
    with pytest.raises(RunError, match=why):
        identity.read_agreed(tmp_path, 3)


def test_without_keys_it_says_so(deployed, small, capsys):
    deployed(small("server.rounds=1"))
    assert "nodes are not identified by keys" in capsys.readouterr().out


def test_flowers_simulation_whose_nodes_have_no_keys_runs_an_app_that_has_them(
    deployed, small, simulated, keys, loopback
):
    """Its grid lists nodes too, with empty keys."""

    class InMemoryGrid(loopback.InProcess):
        def get_nodes(self):
            return [SimpleNamespace(node_id=node, public_key=b"") for node in self.contexts]

    assert pytest.importorskip("flwr.superlink.grid.inmemory_grid").InMemoryGrid.__name__ == InMemoryGrid.__name__
    assert deployed(small(), InMemoryGrid, keys=keys) == simulated(small())

"""`fedflat flower init` and `keys`: an app that Flower takes, certificates that hold, one sentence for a mistake."""

import io
import re
import socket
import ssl
import subprocess
import sys
import threading
import tomllib
import zipfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from fedflat.cli import main
from fedflat.errors import RecipeError, RunError
from fedflat.recipe import load

pytest.importorskip("flwr")
build = pytest.importorskip("flwr.cli.build").build_fab_from_disk
write_app = pytest.importorskip("fedflat.flower.project").write_app
write_keys = pytest.importorskip("fedflat.flower.keys").write_keys
renew = pytest.importorskip("fedflat.flower.keys").renew
known_clients = pytest.importorskip("fedflat.flower.keys").known_clients
read_table = pytest.importorskip("fedflat.flower.identity").read_table
is_valid_name = pytest.importorskip("flwr.supercore.utils").is_valid_name
x509 = pytest.importorskip("cryptography.x509")
serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
pytestmark = pytest.mark.filterwarnings("ignore")
DOCS = Path(__file__).parents[2] / "docs"
CHANGES = ["method=scaffold", "split.clients=3", "server.cohort=2"]
RECIPE = load(None, CHANGES)


@pytest.fixture
def fedflat(monkeypatch, capsys):
    """`fedflat …` in this process: its exit code, and all that it says as one line."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["fedflat", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            main()
        said = capsys.readouterr()
        return left.value.code or 0, " ".join((said.out + said.err).split())

    return run


# --------------------------------------------------------------------------------------------------------------------
# init
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("insecure", [False, True])
def test_what_init_writes_compiles_and_loads(tmp_path, monkeypatch, insecure):
    app = tmp_path / f"Ward-{insecure:d}"
    name = write_app(app, RECIPE, insecure)
    assert name == f"ward_{insecure:d}"
    monkeypatch.syspath_prepend(app)
    for side, kind in ("client", "ClientApp"), ("server", "ServerApp"):
        assert type(imported(f"{name}.{side}", app / name / f"{side}.py").app).__name__ == kind
    assert load(app / name / "recipe.toml") == load(None, [*CHANGES, "split.seed=0"])
    for script in *app.glob("*.sh"), app / "bin" / "flwr-clientapp":
        assert script.stat().st_mode & 0o111
        subprocess.run(["sh", "-n", script], check=True)


def imported(name, path):
    found = spec_from_file_location(name, path)
    module = module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_the_recipe_of_the_docs_becomes_an_app_with_its_two_clients(fedflat, tmp_path):
    (text,) = re.findall(r"```toml\n(.*?)```", (DOCS / "deployment.md").read_text("utf-8"), re.S)
    (tmp_path / "recipe.toml").write_text(text)
    code, said = fedflat("flower", "init", tmp_path / "wards", "--recipe", tmp_path / "recipe.toml")
    assert code == 0, said
    assert load(tmp_path / "wards" / "wards" / "recipe.toml").split.clients == 2


def test_nothing_is_left_to_fill_in(tmp_path):
    write_app(tmp_path / "wards", RECIPE)
    files = [file for file in (tmp_path / "wards").rglob("*") if file.is_file()]
    assert len(files) == 20
    assert not [file for file in files if re.search(r"@[A-Z]", file.read_text())]


def test_security_is_there_unless_one_asks_for_less(tmp_path):
    for name, insecure in ("safe", False), ("open", True):
        write_app(tmp_path / f"{name}-wards", RECIPE, insecure)
    safe, bare = ({f: (tmp_path / f"{name}-wards" / f).read_text() for f in ("superlink.sh", "supernode.sh")}
                  for name in ("safe", "open"))  # fmt: skip
    assert not any("--insecure" in text for text in safe.values())
    assert "--enable-supernode-auth" in safe["superlink.sh"] and "--ssl-keyfile" in safe["superlink.sh"]
    assert "--auth-supernode-private-key" in safe["supernode.sh"] and "--root-certificates" in safe["supernode.sh"]
    assert all("--insecure" in text for text in bare.values())


def test_clients_get_the_app_and_neither_keys_nor_what_the_server_wrote(tmp_path):
    app = tmp_path / "wards"
    write_app(app, RECIPE)
    write_keys(app / "keys", ["127.0.0.1"], 3)
    for private in "run/metrics.jsonl", "run/deployment.json", "memory/notes.md", "flwr/apps/old/client.py":
        (app / private).parent.mkdir(parents=True, exist_ok=True)
        (app / private).write_text("{}")
    with zipfile.ZipFile(io.BytesIO(build(app))) as archive:
        sent = {name for name in archive.namelist() if not name.startswith(".info")}
    own = {f"wards/{name}" for name in ("__init__.py", "client.py", "server.py", "data.py", "recipe.toml")}
    assert sent == own | {"pyproject.toml", "README.md"}


def test_flowers_configuration_names_server_and_authority(tmp_path):
    write_app(tmp_path / "wards", RECIPE, port=9999)
    table = tomllib.loads((tmp_path / "wards" / "flwr" / "config.toml").read_text())["superlink"]
    assert table["deployment"]["address"] == "127.0.0.1:9999"
    assert table["deployment"]["root-certificates"] == str(tmp_path / "wards" / "keys" / "ca.pem")


def test_a_folder_that_is_not_empty_is_left_as_it_is(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(RunError, match="is not empty; choose another directory"):
        write_app(tmp_path, RECIPE)
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("name", ["7", "class", "site", "torch", "…"])
def test_a_folder_whose_name_no_package_can_have_is_refused(tmp_path, name):
    with pytest.raises(RecipeError, match=rf"^{name}: .*; choose another directory$"):
        write_app(tmp_path / name, RECIPE)
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("name", ["my-wards", "Wards-of-2026", "w" * 32])
def test_flower_builds_the_app_under_the_name_of_its_folder(name, tmp_path):
    write_app(tmp_path / name, RECIPE)
    project = tomllib.loads((tmp_path / name / "pyproject.toml").read_text())["project"]
    assert project["name"] == name and is_valid_name(name) == (True, "")
    assert build(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "such_as"),
    [("my_wards", "my-wards"), ("my wards", "my-wards"), ("2024-wards", "wards"), ("w" * 33, "w" * 32), ("_", "wards")],
)
def test_a_name_that_flower_does_not_take_is_refused_with_one_that_it_takes(name, such_as, tmp_path):
    assert not is_valid_name(name)[0] and is_valid_name(such_as)[0]
    with pytest.raises(
        RecipeError, match=f"^{name}: Flower accepts names .* such as {such_as}; choose another directory"
    ):
        write_app(tmp_path / name, RECIPE)
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("place", ["$(touch here)", 'a"b', "50%", "a\nb", "`x`"])
def test_a_path_that_would_be_more_than_a_path_in_a_script_is_refused(place, tmp_path):
    with pytest.raises(RecipeError, match="scripts and units cannot name a path with"):
        write_app(tmp_path / place / "wards", RECIPE)
    assert [*tmp_path.iterdir()] == []


# --------------------------------------------------------------------------------------------------------------------
# keys
# --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deployment") / "keys"
    write_keys(folder, ["server.example", "127.0.0.1"], clients=2)
    return folder


def shaken_hands(keys, name, authority):
    """A TLS connection to a server with these keys, by one who trusts an authority and calls it by a name."""
    there = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    there.load_cert_chain(keys / "server.pem", keys / "server.key")
    ours, theirs = socket.socketpair()
    ours.settimeout(10), theirs.settimeout(10)

    def serve():
        try:
            there.wrap_socket(theirs, server_side=True).close()
        except OSError:
            theirs.close()

    server = threading.Thread(target=serve)
    server.start()
    try:
        with ssl.create_default_context(cafile=authority).wrap_socket(ours, server_hostname=name) as secured:
            return secured.version()
    finally:
        ours.close()
        server.join()


def expires(path):
    return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc


def test_the_authority_outlives_the_servers_certificate_which_is_renewed_for_the_same_clients(tmp_path):
    folder = tmp_path / "keys"
    write_keys(folder, ["server.example", "127.0.0.1"], clients=1, days=30)
    first = expires(folder / "server.pem")
    assert (expires(folder / "ca.pem") - first).days > 3000
    kept = {name: (folder / name).read_bytes() for name in ("ca.pem", "client-0")}
    assert (folder / "server.key").stat().st_mode & 0o077 == 0
    renew(folder, ["server.example", "127.0.0.1"], days=400)
    assert (expires(folder / "server.pem") - first).days == 370
    assert (folder / "server.key").stat().st_mode & 0o077 == 0
    assert {name: (folder / name).read_bytes() for name in kept} == kept
    assert shaken_hands(folder, "server.example", folder / "ca.pem") == "TLSv1.3"


def test_a_renewal_without_its_authority_or_beyond_it_is_refused(tmp_path):
    folder = tmp_path / "keys"
    write_keys(folder, ["127.0.0.1"], clients=1)
    with pytest.raises(RecipeError, match=r"the authority expires in 36\d\d days; use at most"):
        renew(folder, ["127.0.0.1"], days=5000)
    write_keys(tmp_path / "others", ["127.0.0.1"], clients=1)
    (folder / "ca.key").write_bytes((tmp_path / "others/ca.key").read_bytes())
    with pytest.raises(RunError, match=r"ca\.key is not the key of ca\.pem"):
        renew(folder, ["127.0.0.1"])
    (folder / "ca.key").unlink()
    with pytest.raises(RunError, match=r"renewing needs ca\.key and ca\.pem"):
        renew(folder, ["127.0.0.1"])


@pytest.mark.parametrize("name", ["server.example", "127.0.0.1"])
def test_who_trusts_the_authority_trusts_the_server_under_its_names(keys, name):
    assert shaken_hands(keys, name, keys / "ca.pem") == "TLSv1.3"


def test_clients_are_added_by_one_command(fedflat, tmp_path):
    app = tmp_path / "wards"
    write_app(app, RECIPE)
    write_keys(app / "keys", ["127.0.0.1"], 3)
    kept = {path: path.read_bytes() for path in (app / "keys").iterdir()}
    code, said = fedflat("flower", "keys", app, "--add", 2)
    assert code == 0 and "clients 3 to 4 are added" in said and "register keys/client-4.pub" in said
    assert load(app / "wards" / "recipe.toml").split.clients == 5
    assert known_clients(app / "keys") == [0, 1, 2, 3, 4]
    assert {path: path.read_bytes() for path in kept} == kept
    assert (app / "keys" / "client-4").stat().st_mode & 0o077 == 0
    volumes = (app / "compose.server.yaml").read_text()
    assert all(f"./keys/client-{client}.pub:{app}/keys/client-{client}.pub:ro" in volumes for client in range(5))
    assert len(read_table(app / "keys", 5)) == 5


def test_a_clients_key_is_renewed_alone(fedflat, tmp_path):
    write_keys(tmp_path / "keys", ["127.0.0.1"], 2)
    kept = {path: path.read_bytes() for path in (tmp_path / "keys").iterdir()}
    code, said = fedflat("flower", "keys", tmp_path, "--renew-client", 1)
    assert code == 0 and "client 1 gets keys/client-1" in said
    changed = {path.name for path, content in kept.items() if path.read_bytes() != content}
    assert changed == {"client-1", "client-1.pub"} and len(read_table(tmp_path / "keys", 2)) == 2
    assert fedflat("flower", "keys", tmp_path, "--renew-client", 7)[0] == RecipeError.exit_code
    assert "say by which name" in fedflat("flower", "keys", tmp_path)[1]


def test_but_under_no_other_name_and_by_no_other_authority(keys, tmp_path):
    write_keys(tmp_path / "other", ["server.example"], clients=0)
    for name, folder in ("elsewhere.example", keys), ("server.example", tmp_path / "other"):
        with pytest.raises(ssl.SSLCertVerificationError):
            shaken_hands(keys, name, folder / "ca.pem")


def test_clients_have_keys_of_the_kind_that_flower_reads(keys):
    for client in range(2):
        private = serialization.load_ssh_private_key((keys / f"client-{client}").read_bytes(), None)
        public = serialization.load_ssh_public_key((keys / f"client-{client}.pub").read_bytes())
        assert private.curve.name == "secp384r1"
        assert private.public_key().public_numbers() == public.public_numbers()


def test_private_files_are_for_their_owner_only(keys):
    private = {file.name for file in keys.iterdir() if file.stat().st_mode & 0o777 == 0o600}
    assert private == {"ca.key", "server.key", "client-0", "client-1"}


def test_keys_are_never_written_over(keys):
    before = (keys / "ca.key").read_bytes()
    with pytest.raises(RunError, match="already contains keys, which existing nodes use; move them away first"):
        write_keys(keys, ["127.0.0.1"], clients=2)
    assert (keys / "ca.key").read_bytes() == before


@pytest.mark.parametrize("host", ["server:8443", "https://server", "two words", ""])
def test_a_host_is_a_name_alone(tmp_path, host):
    with pytest.raises(RecipeError, match="give only a name or an address, without port or scheme"):
        write_keys(tmp_path / "keys", [host], clients=1)
    assert not (tmp_path / "keys").exists()


# --------------------------------------------------------------------------------------------------------------------
# The command line
# --------------------------------------------------------------------------------------------------------------------


def test_two_commands_make_an_app_with_keys(fedflat, tmp_path):
    code, said = fedflat("flower", "init", tmp_path / "wards", "--set", "split.clients=2", "method=scaffold")
    assert code == 0 and said.endswith(f"the app wards is ready; {tmp_path}/wards/README.md says how to run it")
    code, said = fedflat("flower", "keys", tmp_path / "wards", "--host", "server.example")
    assert (code, said) == (0, f"{tmp_path}/wards/keys: 8 files; keep ca.key offline")


def test_a_client_can_see_which_recipe_it_would_agree_to(fedflat, tmp_path):
    write_app(tmp_path / "wards", RECIPE)
    agreed = tomllib.loads((tmp_path / "wards" / "policy.toml").read_text())["recipe"]
    assert fedflat("flower", "digest", tmp_path / "wards") == (0, agreed)
    assert fedflat("flower", "digest", tmp_path) == (
        2, f"fedflat: {tmp_path}: contains no app (no recipe.toml); give the folder of an app")  # fmt: skip


def test_mistakes_on_the_command_line_are_one_sentence(fedflat, tmp_path):
    advice = "give the folder of an app, or set --clients"
    told = (2, f"fedflat: {tmp_path}: contains no app (no recipe.toml); {advice}")
    assert fedflat("flower", "keys", tmp_path, "--host", "h") == told
    code, said = fedflat("flower", "init", tmp_path / "wards", "--set", "method=fedsoam")
    assert code == 2 and "did you mean fedsam?" in said
    assert not (tmp_path / "wards").exists()


def test_a_deployment_is_not_gone_on_with_in_the_simulator(fedflat, tmp_path):
    (tmp_path / "recipe.toml").write_text(RECIPE.to_toml())
    (tmp_path / "deployment.json").write_text("{}")
    sentence = f"fedflat: {tmp_path}: its clients are elsewhere; continue this deployment with `flwr run`"
    assert fedflat("resume", tmp_path) == (RunError.exit_code, sentence)


@pytest.mark.parametrize("command", [["init", "wards"], ["keys", ".", "--host", "h"], ["digest", "."]])
def test_flower_is_an_extra(fedflat, monkeypatch, command):
    monkeypatch.setitem(sys.modules, "flwr", None)
    assert fedflat("flower", *command) == (2, "fedflat: a deployment needs Flower: pip install 'fedflat[flower]'")

"""What `fedflat flower init` writes for operators: Compose files and systemd units that are sound and give little away.

Neither Docker Compose nor a running systemd is needed. Compose files are read as YAML and compared with the keys that
the Compose specification has; units go through `systemd-analyze verify` where that is, and a structural check anyway.
"""

import configparser
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from fedflat.recipe import load

pytest.importorskip("flwr")
write_app = pytest.importorskip("fedflat.flower.project").write_app
write_keys = pytest.importorskip("fedflat.flower.keys").write_keys
health = pytest.importorskip("fedflat.flower.health")
yaml = pytest.importorskip("yaml")
SIDES = ["server", "client"]
# Of the Compose specification, what our files use.
SERVICE = {
    "build": str, "image": str, "command": list, "working_dir": str, "user": str, "ports": list, "environment": dict,
    "healthcheck": dict, "restart": str, "stop_grace_period": str, "init": bool, "read_only": bool, "tmpfs": list,
    "cap_drop": list, "security_opt": list, "pids_limit": int, "logging": dict, "secrets": list, "volumes": list,
}  # fmt: skip
GIVEN = {"OWNER": "1000:1000", "CLIENT": "1", "SUPERLINK": "fl.example.org:8443", "DATA": "/srv/samples"}
WRITABLE = {"server": {"run", "flwr"}, "client": {"memory"}}


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    folder = tmp_path_factory.mktemp("app") / "wards"
    write_app(folder, load(None, ["split.clients=2"]))
    write_keys(folder / "keys", ["127.0.0.1"], 2)
    return folder


def interpolated(text, given):
    """The text with its variables filled in as Compose does it; one that is wanted and not there is a KeyError."""

    def value(found):
        name, default = found[1], found[2] or ""
        return given.get(name, default[2:]) if default.startswith(":-") else given[name]

    return re.sub(r"\$\{(\w+)(:[-?][^}]*)?\}", value, text)


def composed(folder, side, given=GIVEN):
    lines = (folder / f"compose.{side}.yaml").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#"))
    return yaml.safe_load(interpolated(text, given))


# --------------------------------------------------------------------------------------------------------------------
# Compose
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", SIDES)
def test_a_compose_file_has_keys_and_types_of_the_specification(app, side):
    file = composed(app, side)
    assert {*file} <= {"services", "secrets"} and [*file["services"]] == [side]
    service = file["services"][side]
    assert {name: type(value) for name, value in service.items()} == {name: SERVICE[name] for name in service}
    assert all(isinstance(value, str) for value in service["environment"].values())
    assert {*service["healthcheck"]} == {"test", "interval", "timeout", "retries", "start_period"}
    assert all(re.fullmatch(r"\d+s", service["healthcheck"][name]) for name in ("interval", "timeout", "start_period"))
    assert service["healthcheck"]["test"][:2] == ["CMD", "python"]
    assert all(isinstance(value, str) for value in service["logging"]["options"].values())


@pytest.mark.parametrize("side", SIDES)
def test_a_container_has_few_rights_and_comes_back(app, side):
    service = composed(app, side)["services"][side]
    assert service["read_only"] is True and service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"] and service["restart"] == "unless-stopped"
    assert service["environment"]["HEALTH"] == service["healthcheck"]["test"][-1]
    assert not {"privileged", "network_mode", "pid", "cap_add", "devices"} & {*service}


@pytest.mark.parametrize(("side", "wanted"), [("server", ["OWNER"]), ("client", [*GIVEN])])
def test_compose_asks_for_what_only_the_operator_knows(app, side, wanted):
    for name in wanted:
        with pytest.raises(KeyError, match=name):
            composed(app, side, {key: value for key, value in GIVEN.items() if key != name})


@pytest.mark.parametrize("side", SIDES)
def test_only_what_the_side_writes_is_writable_and_every_mounted_file_is_there(app, side):
    volumes = [volume.split(":") for volume in composed(app, side)["services"][side]["volumes"]]
    own = [(app / source, mode) for source, _, *mode in volumes if source.startswith("./")]
    assert {path.name for path, mode in own if not mode} == WRITABLE[side]
    assert [path for path, _ in own if not path.exists()] == []
    assert [source for source, _, *_ in volumes if not source.startswith("./")] == (
        [] if side == "server" else [GIVEN["DATA"]]
    )
    assert {mode for _, _, *rest in volumes for mode in rest} == {"ro"}


@pytest.mark.parametrize(("side", "secret"), [("server", "server.key"), ("client", "client-1")])
def test_private_keys_come_as_secrets_and_nothing_else_of_keys_but_what_is_public(app, side, secret):
    file = composed(app, side)
    service = file["services"][side]
    targets = {
        s if isinstance(s, str) else s["target"]: s if isinstance(s, str) else s["source"] for s in service["secrets"]
    }
    assert {*targets.values()} == {*file["secrets"]}
    assert file["secrets"][targets[secret]] == {"file": f"./keys/{secret}"}
    assert all((app / entry["file"]).exists() for entry in file["secrets"].values())
    mounted = {volume.split(":")[0] for volume in service["volumes"]}
    assert all(name.endswith((".pub", "ca.pem")) for name in mounted if "keys" in name) and "./keys" not in mounted
    assert not any("ca.key" in entry["file"] for entry in file["secrets"].values())


def test_the_image_has_nothing_of_the_folder_in_it(app):
    assert (app / ".dockerignore").read_text().splitlines()[-1] == "*"
    lines = (app / "Dockerfile").read_text()
    assert not re.search(r"^(COPY|ADD) ", lines, re.M) and re.search(r"^USER (?!root|0)", lines, re.M)


def test_an_insecure_app_has_no_secrets_to_hand_over(tmp_path):
    write_app(tmp_path / "open-wards", load(None, ["split.clients=2"]), insecure=True)
    for side in SIDES:
        file = composed(tmp_path / "open-wards", side)
        assert file["services"][side]["secrets"] == [] and "secrets" not in file
        assert not any("keys" in volume for volume in file["services"][side]["volumes"])
        assert "LoadCredential" not in next((tmp_path / "open-wards/systemd").glob(f"*{side}*")).read_text()


# --------------------------------------------------------------------------------------------------------------------
# systemd
# --------------------------------------------------------------------------------------------------------------------


class Settings(configparser.RawConfigParser):
    optionxform = staticmethod(str)


def unit(app, side):
    settings = Settings(strict=False, delimiters="=", comment_prefixes="#")
    settings.read(app / "systemd" / f"wards-{side}{'@' * (side == 'client')}.service")
    return settings


@pytest.mark.parametrize("side", SIDES)
def test_a_unit_runs_without_privileges_writes_little_and_comes_back(app, side):
    service = unit(app, side)["Service"]
    assert service["User"] == "fedflat" and service["Restart"] == "always"
    assert service["NoNewPrivileges"] == "yes" and service["CapabilityBoundingSet"] == ""
    assert service["ProtectSystem"] == "strict" and service["ProtectHome"] == "read-only"
    allowed = {"server": {"run", "flwr"}, "client": {"memory", "flwr"}}[side]
    assert service["ReadWritePaths"].split() == [f'"{app}/{name}"' for name in sorted(allowed, reverse=True)]
    assert "fedflat.flower.health" in service["ExecStartPost"]
    text = (app / "systemd").joinpath(f"wards-{side}{'@' * (side == 'client')}.service").read_text()
    handed = re.findall(r"^LoadCredential=([^:]+):(.*)$", text, re.M)
    assert handed and all(place == f"{app}/keys/{name}" for name, place in handed) and "KEYS=%d" in text
    assert "ca.key" not in {name for name, _ in handed}


@pytest.fixture
def installed(app, tmp_path):
    """The units as they would be installed, the client's for client 1."""
    shutil.copy(app / "systemd/wards-server.service", tmp_path)
    shutil.copy(app / "systemd/wards-client@.service", tmp_path / "wards-client@1.service")
    return sorted(map(str, tmp_path.iterdir()))


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
def test_systemd_finds_nothing_wrong_with_the_units(installed):
    found = subprocess.run(["systemd-analyze", "verify", "--man=no", *installed], capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
def test_systemd_rates_their_exposure_below_two_of_ten(installed):
    for path in installed:
        command = ["systemd-analyze", "security", "--offline=true", "--threshold=20", path]
        found = subprocess.run(command, capture_output=True, text=True)
        if "unrecognized option" in found.stderr:
            pytest.skip("this systemd rates no files")
        assert found.returncode == 0, found.stdout[-300:]


# --------------------------------------------------------------------------------------------------------------------
# Scripts and health
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("script", "wanted"), [("superlink.sh", "server.key"), ("supernode.sh", "client-1")])
def test_the_scripts_take_keys_and_health_from_where_they_are_handed(app, tmp_path, script, wanted):
    command = tmp_path / f"flower-{script.removesuffix('.sh')}"
    command.write_text('#!/bin/sh\nprintf "%s\\n" "$@"')
    command.chmod(0o755)

    def said(**environment):
        path = {"PATH": f"{tmp_path}:/usr/bin:/bin", **environment}
        return subprocess.run([app / script, "1"], env=path, capture_output=True, text=True, check=True).stdout.split(
            "\n"
        )

    # The stand-in comes before the app's own bin/, as that has only flwr-clientapp.
    assert f"keys/{wanted}" in said() and "--health-server-address" not in said()
    handed = said(KEYS="/run/my secrets", HEALTH="127.0.0.1:9000")
    assert f"/run/my secrets/{wanted}" in handed
    assert handed[handed.index("--health-server-address") + 1] == "127.0.0.1:9000"


@contextmanager
def service(status):
    grpc = pytest.importorskip("grpc")
    from grpc_health.v1 import health as served
    from grpc_health.v1 import health_pb2_grpc

    server, servicer = grpc.server(ThreadPoolExecutor(1)), served.HealthServicer()
    servicer.set("", status)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@pytest.mark.parametrize(("status", "code"), [(1, 0), (2, 1)])  # SERVING, NOT_SERVING
def test_health_is_what_the_service_says(status, code):
    with service(status) as address:
        assert health.main(address) == code


def test_where_nobody_listens_it_is_not_healthy(capsys):
    with service(1) as address:
        pass
    assert health.main(address) == 1
    assert capsys.readouterr().err == f"{address}: does not report that it is serving\n"

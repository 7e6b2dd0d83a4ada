"""Writes a ready-to-run Flower app: recipe, data hook, and the commands to run it."""

from __future__ import annotations

import keyword
import re
import sys
from importlib import resources
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from fedflat.errors import RecipeError, RunError
from fedflat.files import private_directory, read_whole, write_whole, written_to
from fedflat.flower.policy import digest, named_code
from fedflat.methods import CentralPrivacy, Privacy, parse
from fedflat.recipe import Recipe, load, overridden

PORT = 8443
LONGEST = 32  # Flower's limit on the characters of an app's name
NAME = rf"[A-Za-z][A-Za-z0-9-]{{0,{LONGEST - 1}}}"
PRODUCTS = 200  # Hessian products of one measurement: Lanczos rarely needs more
FILES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    ".gitignore": "gitignore",
    "superlink.sh": "superlink.sh",
    "supernode.sh": "supernode.sh",
    "policy.toml": "policy.toml",
    "bin/flwr-clientapp": "clientapp",
    "environment.sh": "environment.sh",
    "Dockerfile": "Dockerfile",
    ".dockerignore": "dockerignore",
    "compose.server.yaml": "compose.server.yaml",
    "compose.client.yaml": "compose.client.yaml",
    "systemd/@NAME@-server.service": "server.service",
    "systemd/@NAME@-client@.service": "client.service",
    "flwr/config.toml": "config.toml",
    "@NAME@/client.py": "client.py",
    "@NAME@/server.py": "server.py",
    "@NAME@/data.py": "data.py",
}
SECURE = {
    "SERVER": '--ssl-certfile "${KEYS:-keys}/server.pem" --ssl-keyfile "${KEYS:-keys}/server.key" '
    '--ssl-ca-certfile "${KEYS:-keys}/ca.pem" --enable-supernode-auth',
    "CLIENT": '--root-certificates "${KEYS:-keys}/ca.pem" --auth-supernode-private-key "${KEYS:-keys}/client-$client"',
    "TRUST": 'root-certificates = "@DIR@/keys/ca.pem"',
    "KEYS": "fedflat flower keys . --host HOST         # certificates and keys, once; HOST as the clients call it",
    "TABLE": "@DIR@/keys",
    "REGISTER": "for key in keys/client-*.pub; do flwr supernode register $key deployment; done",
    "SERVERSECRETS": "server.key, server.pem, ca.pem",
    "SERVERFILES": "secrets:\n  server.key: {file: ./keys/server.key}\n  server.pem: {file: ./keys/server.pem}\n"
    "  ca.pem: {file: ./keys/ca.pem}",
    "CLIENTSECRETS": 'ca.pem, {source: client, target: "client-${CLIENT}"}',
    "CLIENTFILES": 'secrets:\n  ca.pem: {file: ./keys/ca.pem}\n  client: {file: "./keys/client-${CLIENT}"}',
    "CREDENTIALS": "KEYS=%d",
    "SERVERCREDENTIALS": "LoadCredential=server.key:@DIR@/keys/server.key\n"
    "LoadCredential=server.pem:@DIR@/keys/server.pem\nLoadCredential=ca.pem:@DIR@/keys/ca.pem",
    "CLIENTCREDENTIALS": "LoadCredential=ca.pem:@DIR@/keys/ca.pem\nLoadCredential=client-%i:@DIR@/keys/client-%i",
}
# Placeholders for the files that Compose and systemd pass to the processes.
HANDED = ("SERVERSECRETS", "SERVERFILES", "CLIENTSECRETS", "CLIENTFILES", "CREDENTIALS", "SERVERCREDENTIALS",
          "CLIENTCREDENTIALS")  # fmt: skip
INSECURE = {
    "SERVER": "--insecure",
    "CLIENT": "--insecure",
    "TRUST": "insecure = true",
    "KEYS": "# connections are neither encrypted nor authenticated (--insecure)",
    "TABLE": "",
    "REGISTER": "# no keys to register",
    **dict.fromkeys(HANDED, ""),
}


def write_app(directory: Path, recipe: Recipe, insecure: bool = False, port: int = PORT) -> str:
    """Write the app and return the name of its package.

    Args:
        directory: an empty or new directory, which gives the app its name.
        recipe: the recipe of the deployment.
        insecure: whether to leave out encryption and authentication.
        port: the server's port.

    Raises:
        RunError: if the directory is not empty.
        RecipeError: if the name of the directory cannot be used.
    """
    directory = directory.resolve()
    if directory.exists() and not directory.is_dir():
        raise RunError(f"{directory}: is a file; choose another directory")
    if directory.exists() and any(directory.iterdir()):
        raise RunError(f"{directory}: is not empty; choose another directory")
    name = _package(directory)
    words = {**(INSECURE if insecure else SECURE), "NAME": name, "DIR": str(directory), "PORT": str(port)}
    words["APP"] = directory.name
    words |= {
        "CLIENTS": str(recipe.split.clients),
        "VERSION": version("fedflat"),
        "BIN": str(Path(sys.executable).parent),
    }
    words["PUBLICKEYS"] = "" if insecure else _public_keys(recipe.split.clients)
    recipe = without_seed(recipe)
    words |= _policy(recipe)
    with written_to(directory, "choose another directory"):
        for path, template in FILES.items():
            target = directory / _filled(path, words)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(_filled(_template(template), words), "utf-8")
            target.chmod(0o755 if target.suffix == ".sh" or target.parent.name == "bin" else 0o644)
        for kept in "run", "memory":  # containers and units write there and should not have to create it
            private_directory(directory / kept)
        (directory / name / "__init__.py").write_text("", "utf-8")
        (directory / name / "recipe.toml").write_text(recipe.to_toml(), "utf-8")
    return name


def _package(directory: Path) -> str:
    """The name of the app's package, from its directory; Flower, Python, scripts and units must all accept the name."""
    given = directory.name
    if not re.fullmatch(NAME, given, re.ASCII):
        plain = re.sub(r"[^A-Za-z0-9]+", "-", given).strip("-0123456789")[:LONGEST].strip("-") or "wards"
        raise RecipeError(
            f"{given}: Flower accepts names that start with a letter and contain letters, digits and hyphens, at most "
            f"{LONGEST}, such as {plain}; choose another directory"
        )
    if odd := re.search(r"[^\w ./+@,~-]", str(directory)):
        raise RecipeError(
            f"{directory}: scripts and units cannot name a path with {odd[0]!r}; choose another directory"
        )
    name = re.sub(r"-+", "_", given.lower()).strip("_")
    if not name.isidentifier() or keyword.iskeyword(name):
        raise RecipeError(f"{given}: cannot be the name of a Python package; choose another directory")
    if name in sys.stdlib_module_names or ((taken := find_spec(name)) and taken.origin):
        raise RecipeError(f"{given}: a Python package with that name exists already; choose another directory")
    return name


def without_seed(recipe: Recipe) -> Recipe:
    """Return the recipe that clients receive: without a seed that reveals draws, unless it is for a rehearsal."""
    if recipe.deployment.draws == "recipe":
        return recipe
    return overridden(recipe, ["seed=0", f"split.seed={recipe.split_seed}"])


def add_clients(directory: Path, count: int) -> tuple[int, int]:
    """Add clients to an app: to its recipe, and to the keys that the server's container sees.

    Args:
        directory: the app's folder.
        count: how many clients to add.

    Returns:
        The number of the first new client, and how many there are now.

    Raises:
        RecipeError: if there is no app in the folder.
    """
    path = next(directory.glob("*/recipe.toml"), None)
    if path is None:
        raise RecipeError(f"{directory}: contains no app (no recipe.toml); give the folder of an app")
    recipe = load(path)
    first, total = recipe.split.clients, recipe.split.clients + count
    larger, composed = overridden(recipe, [f"split.clients={total}"]), directory / "compose.server.yaml"
    with written_to(directory, "choose another directory"):
        if composed.is_file():
            text, place = read_whole(composed).decode(), str(directory.resolve())
            before, after = (_filled(_public_keys(n), {"DIR": place}) for n in (first, total))
            write_whole(composed, text.replace(before, after).encode(), public=True)
        write_whole(path, larger.to_toml().encode(), public=True)
    return first, total


def _public_keys(clients: int) -> str:
    """The public files in keys/ as volumes: the server's container sees nothing else of that folder."""
    keys = ["keys/ca.pem", *(f"keys/client-{client}.pub" for client in range(clients))]
    return "\n".join(f'      - "./{key}:@DIR@/{key}:ro"' for key in keys)


def _policy(recipe: Recipe) -> dict[str, str]:
    """The initial policy of the clients: it allows what the recipe needs, and no more."""
    guard, measured = parse(recipe.method).protection, recipe.evaluation.sharpness
    private = isinstance(guard, Privacy)
    part = ("central_dp" if isinstance(guard, CentralPrivacy) else "local_dp") if private else "none"
    least = f"clip = {guard.clip!r}\nnoise = {guard.noise!r}" if isinstance(guard, Privacy) else "# noise = 4.0"
    measurements = recipe.server.rounds // measured if measured and not private else 0
    scored = recipe.server.rounds // (recipe.evaluation.every or recipe.server.rounds) + 1
    return {
        "DIGEST": digest(recipe),
        "CODE": ", ".join(f'"{name}"' for name in named_code(recipe)),
        "TRAIN": str(2 * recipe.server.rounds),
        "HESSIAN": str(PRODUCTS * measurements),
        # At the client's own model and at the average; twice, as a round may be repeated.
        "CURVATURE": str(4 * scored if "local_curvature" in recipe.evaluation.measures and not private else 0),
        "PART": part,
        "PRIVACY": least,
    }


def _template(name: str) -> str:
    return (resources.files("fedflat.flower") / "template" / f"{name}.txt").read_text("utf-8")


def _filled(text: str, words: dict[str, str]) -> str:
    """Replace every @WORD@ in the text; a replacement may contain further ones."""
    while found := re.search(r"@([A-Z]+)@", text):
        text = text.replace(found[0], words[found[1]])
    return text

"""A ready Flower app in a folder: recipe, data hook, and the commands to run it."""

from __future__ import annotations

import keyword
import re
import sys
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

from fedflat.errors import RecipeError, RunError
from fedflat.folder import written_to
from fedflat.recipe import Recipe

PORT = 8443
FILES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    ".gitignore": "gitignore",
    "superlink.sh": "superlink.sh",
    "supernode.sh": "supernode.sh",
    "environment.sh": "environment.sh",
    "flwr/config.toml": "config.toml",
    "@NAME@/client.py": "client.py",
    "@NAME@/server.py": "server.py",
    "@NAME@/data.py": "data.py",
}
SECURE = {
    "SERVER": "--ssl-certfile keys/server.pem --ssl-keyfile keys/server.key --ssl-ca-certfile keys/ca.pem "
    "--enable-supernode-auth",
    "CLIENT": '--root-certificates keys/ca.pem --auth-supernode-private-key "keys/client-$client"',
    "TRUST": 'root-certificates = "@DIR@/keys/ca.pem"',
    "KEYS": "fedflat flower keys . --host HOST         # certificates and keys, once; HOST as the clients call it",
    "REGISTER": "for key in keys/client-*.pub; do flwr supernode register $key deployment; done",
}
INSECURE = {
    "SERVER": "--insecure",
    "CLIENT": "--insecure",
    "TRUST": "insecure = true",
    "KEYS": "# connections are neither encrypted nor authenticated (--insecure)",
    "REGISTER": "# no keys to register",
}


def write_app(directory: Path, recipe: Recipe, insecure: bool = False, port: int = PORT) -> str:
    """Write the app, and give its name; connections are encrypted and nodes authenticated, unless it is `insecure`."""
    directory = directory.resolve()
    name = re.sub(r"\W+", "_", directory.name.lower()).strip("_")
    if not name.isidentifier() or keyword.iskeyword(name):
        raise RecipeError(f"{directory.name}: cannot be the name of a Python package; choose another directory")
    if name in sys.stdlib_module_names or ((taken := find_spec(name)) and taken.origin):
        raise RecipeError(f"{directory.name}: a Python package of that name is there already; choose another directory")
    if directory.exists() and any(directory.iterdir()):
        raise RunError(f"{directory}: is not empty; choose another directory")
    words = {**(INSECURE if insecure else SECURE), "NAME": name, "DIR": str(directory), "PORT": str(port)}
    words["CLIENTS"] = str(recipe.split.clients)
    with written_to(directory, "choose another directory"):
        for path, template in FILES.items():
            target = directory / _filled(path, words)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(_filled(_template(template), words), "utf-8")
            target.chmod(0o755 if target.suffix == ".sh" else 0o644)
        (directory / name / "__init__.py").write_text("", "utf-8")
        (directory / name / "recipe.toml").write_text(recipe.to_toml(), "utf-8")
    return name


def _template(name: str) -> str:
    return (resources.files("fedflat.flower") / "template" / f"{name}.txt").read_text("utf-8")


def _filled(text: str, words: dict[str, str]) -> str:
    """The text with every @WORD@ replaced; a word may hold others."""
    while found := re.search(r"@([A-Z]+)@", text):
        text = text.replace(found[0], words[found[1]])
    return text

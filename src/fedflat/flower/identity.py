"""Maps nodes to clients by their public keys, and clients to the samples that they may claim.

The server keeps the clients' public keys in a folder, `client-3.pub` for client 3. Flower only admits nodes with a
registered key, and tells the server app which key it was. `samples.toml` beside them has the number of samples that
was agreed with each client, as in `3 = 1200`.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization

from fedflat.errors import RecipeError, RunError, shown
from fedflat.files import read_whole
from fedflat.recipe import parsed, read_text

AGREED = "samples.toml"
OPENSSH = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH


def fingerprint(key: bytes) -> str:
    """Return the SHA-256 of a PEM or OpenSSH public key, as `ssh-keygen -l` prints it; empty if it is not a key."""
    try:
        pem = key.lstrip().startswith(b"-----")
        read = serialization.load_pem_public_key if pem else serialization.load_ssh_public_key
        blob = base64.b64decode(read(key).public_bytes(*OPENSSH).split()[1])
    except Exception:  # untrusted bytes: the library may raise anything
        return ""
    return f"SHA256:{base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip('=')}"


def read_table(folder: Path, clients: int) -> dict[str, int]:
    """Read the public keys in a folder; return fingerprint → client.

    Raises:
        RunError: if a file is not a public key, two clients have the same key, or there is no key.
    """
    table: dict[str, int] = {}
    for path in sorted(folder.glob("client-*.pub")):
        number = re.fullmatch(r"client-(\d+)", path.stem)
        if not number or int(number[1]) >= clients:
            continue
        found = fingerprint(read_whole(path))
        if not found:
            raise RunError(f"{path}: not a public key that Flower accepts")
        if found in table:
            raise RunError(f"{path}: client {table[found]} has the same key; give every client its own")
        table[found] = int(number[1])
    if not table:
        raise RunError(f"{folder}: has no client-*.pub to identify the nodes by; see docs/deployment.md")
    return table


def read_agreed(folder: Path, clients: int) -> dict[int, int] | None:
    """Read samples.toml: the largest number of samples that each client may claim. None if there is no such file.

    Raises:
        RunError: if the file cannot be read, or a client is missing or unknown.
    """
    path = folder / AGREED
    if not path.exists():
        return None
    try:
        found = parsed(read_text(path), "not a table of samples")
    except (OSError, UnicodeDecodeError, RecipeError) as error:
        raise RunError(f"{path}: cannot be read ({error})") from None
    for name, samples in found.items():
        if not re.fullmatch(r"0|[1-9][0-9]{0,8}", name) or int(name) >= clients:
            raise RunError(f"{path}: {shown(name, 40)} is not a client from 0 to {clients - 1}")
        if type(samples) is not int or samples < 1:
            raise RunError(f"{path}: client {name}: {shown(samples, 40)} is not a whole number from 1 on")
    if missing := [client for client in range(clients) if str(client) not in found]:
        raise RunError(f"{path}: client {missing[0]} is missing; list every client, as in `{missing[0]} = 1200`")
    return {int(name): samples for name, samples in found.items()}


def has_keys(grid: object) -> bool:
    """Return whether the nodes of a grid have keys. Flower's simulation runs all nodes on one machine, without keys."""
    return hasattr(grid, "get_nodes") and type(grid).__name__ != "InMemoryGrid"


def known_nodes(listed: Iterable[Any], table: Mapping[str, int]) -> dict[int, tuple[int | None, str]]:
    """Return for each connected node the client of its key, if any, and the key's fingerprint."""
    keys = {int(node.node_id): fingerprint(bytes(node.public_key)) for node in listed}
    return {node: (table.get(key), key) for node, key in keys.items()}

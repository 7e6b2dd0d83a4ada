"""Maps nodes to clients by their public keys.

The server keeps the clients' public keys in a folder, `client-3.pub` for client 3. Flower only admits nodes with a
registered key, and tells the server app which key it was.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization

from fedflat.errors import RunError
from fedflat.files import read_whole

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


def has_keys(grid: object) -> bool:
    """Return whether the nodes of a grid have keys. Flower's simulation runs all nodes on one machine, without keys."""
    return hasattr(grid, "get_nodes") and type(grid).__name__ != "InMemoryGrid"


def known_nodes(listed: Iterable[Any], table: Mapping[str, int]) -> dict[int, tuple[int | None, str]]:
    """Return for each connected node the client of its key, if any, and the key's fingerprint."""
    keys = {int(node.node_id): fingerprint(bytes(node.public_key)) for node in listed}
    return {node: (table.get(key), key) for node, key in keys.items()}

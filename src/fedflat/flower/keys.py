"""Certificates and keys of a deployment: its certificate authority, the server's certificate, a key per client.

All are elliptic-curve keys in formats that Flower reads. Whoever holds `ca.key` can make certificates that every client
trusts: keep it offline once the deployment runs.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedflat.errors import RecipeError, RunError
from fedflat.files import private_directory, read_bytes, write_whole, written_to

AUTHORITY = 3650  # minimum lifetime of the authority, in days
PEM, NONE = serialization.Encoding.PEM, serialization.NoEncryption()


def write_keys(folder: Path, hosts: Sequence[str], clients: int, days: int = 365) -> list[Path]:
    """Write ca.pem, ca.key, server.pem, server.key, and client-i with client-i.pub for each client.

    Args:
        folder: an empty or new folder.
        hosts: the names or addresses by which clients reach the server.
        clients: the number of clients.
        days: the lifetime of the server's certificate.

    Returns:
        The files written.

    Raises:
        RunError: if the folder is not empty.
        RecipeError: if a host is not a plain name or address.
    """
    if folder.exists() and any(folder.iterdir()):
        raise RunError(f"{folder}: already contains keys, which existing nodes use; move them away first")
    names = [_host(host) for host in hosts]
    with written_to(folder, "choose another directory"):
        private_directory(folder)
        authority, server = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
        # The authority outlives the server's certificate, so renewing the latter needs no change at the clients.
        root = _certificate("fedflat deployment", authority, None, authority, (), max(AUTHORITY, 2 * days))
        own = _certificate(hosts[0], server, root, authority, names, days)
        written = [_private(folder / "ca.key", authority), _public(folder / "ca.pem", root.public_bytes(PEM))]
        written += [_private(folder / "server.key", server), _public(folder / "server.pem", own.public_bytes(PEM))]
        for client in range(clients):
            written += client_key(folder, client)
    return written


def client_key(folder: Path, client: int) -> list[Path]:
    """Write a client's new private and public key, replacing any existing ones."""
    key, path = ec.generate_private_key(ec.SECP384R1()), folder / f"client-{client}"
    form, formats = (
        serialization.PrivateFormat.OpenSSH,
        (serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH),
    )
    with written_to(folder, "choose another directory"):
        write_whole(path, key.private_bytes(PEM, form, NONE))
        write_whole(path.with_suffix(".pub"), key.public_key().public_bytes(*formats) + b"\n", public=True)
    return [path, path.with_suffix(".pub")]


def known_clients(folder: Path) -> list[int]:
    """Return the clients whose public keys are in a folder."""
    found = (re.fullmatch(r"client-(\d+)\.pub", path.name) for path in folder.glob("client-*.pub"))
    return sorted(int(each[1]) for each in found if each)


def renew(folder: Path, hosts: Sequence[str], days: int = 365) -> list[Path]:
    """Renew the server's certificate and key with the authority in `folder`; clients need no update.

    Args:
        folder: the folder with ca.key and ca.pem.
        hosts: the names or addresses by which clients reach the server.
        days: the lifetime of the new certificate.

    Returns:
        The files written.

    Raises:
        RunError: if ca.key and ca.pem cannot be read or do not belong together.
        RecipeError: if a host is not a plain name or address, or `days` is longer than the authority lasts.
    """
    names = [_host(host) for host in hosts]
    try:
        authority = serialization.load_pem_private_key(read_bytes(folder / "ca.key"), None)
        root = x509.load_pem_x509_certificate(read_bytes(folder / "ca.pem"))
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"{folder}: renewing needs ca.key and ca.pem in this folder ({error})") from None
    if not isinstance(authority, ec.EllipticCurvePrivateKey) or authority.public_key() != root.public_key():
        raise RunError(f"{folder}: ca.key is not the key of ca.pem")
    last = (root.not_valid_after_utc - datetime.now(UTC)).days
    if last < days:
        raise RecipeError(f"--days {days}: the authority expires in {last} days; use at most that many")
    server = ec.generate_private_key(ec.SECP256R1())
    own = _certificate(hosts[0], server, root, authority, names, days)
    private = server.private_bytes(PEM, serialization.PrivateFormat.PKCS8, NONE)
    with written_to(folder, "choose another directory"):
        write_whole(folder / "server.key", private)
        write_whole(folder / "server.pem", own.public_bytes(PEM), public=True)
    return [folder / "server.key", folder / "server.pem"]


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Certificate | None,
    signer: ec.EllipticCurvePrivateKey,
    names: Sequence[x509.GeneralName],
    days: int,
) -> x509.Certificate:
    """Create the authority's own certificate (no issuer), or a server's certificate for these names."""
    subject, now = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), datetime.now(UTC)
    root = issuer is None
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=root, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if root:
        builder = builder.add_extension(_usage(), critical=True)
    else:
        serves = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        builder = builder.add_extension(serves, critical=False)
    return builder.sign(signer, hashes.SHA256())


def _usage() -> x509.KeyUsage:
    others = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    unused = dict.fromkeys((*others, "encipher_only", "decipher_only"), False)
    return x509.KeyUsage(key_cert_sign=True, crl_sign=True, **unused)


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        if not re.fullmatch(r"[A-Za-z0-9*.-]+", name):
            raise RecipeError(f"host {name!r}: give only a name or an address, without port or scheme") from None
        return x509.DNSName(name)


def _private(path: Path, key: ec.EllipticCurvePrivateKey) -> Path:
    write_whole(path, key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, NONE))
    return path


def _public(path: Path, content: bytes) -> Path:
    write_whole(path, content, public=True)
    return path

"""Make a trial CA and the certificates of gateway, scheduler, worker and Redis: `make certs`, in .run/certs.

For trying TLS on one machine. A real installation takes the gateway's certificate from a public CA, and those of the
services from a CA that signs for nothing else: a holder of one of these may talk to workers.
"""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import os
import sys
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAYS = 90
ROLES = ("gateway", "scheduler", "worker", "redis")


def make(directory: Path, names: list[str], days: int = DAYS) -> list[Path]:
    """Write ca.pem and ROLE.pem with ROLE-key.pem (mode 0600) for each role, replacing existing files.

    names: host names and addresses by which gateway and Redis are reached, beside localhost.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Orcinus trial CA")])
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    ca = (
        _builder(ca_name, ca_name, ca_key, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    written = [_write(directory / "ca.pem", ca.public_bytes(serialization.Encoding.PEM), 0o644)]
    for role in ROLES:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"orcinus-{role}")])
        alternatives = [f"orcinus-{role}", role, "localhost", "127.0.0.1", "::1", *names]
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        certificate = (
            _builder(name, ca_name, key, days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([_general(one) for one in alternatives]), critical=False)
            .add_extension(x509.ExtendedKeyUsage(both), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
            .sign(ca_key, hashes.SHA256())
        )
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        public = certificate.public_bytes(serialization.Encoding.PEM)
        written += [
            _write(directory / f"{role}.pem", public, 0o644),
            _write(directory / f"{role}-key.pem", private, 0o600),
        ]
    return written


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _write(path: Path, content: bytes, mode: int) -> Path:
    """Write a file completely or not at all, and never with wider permissions than its own."""
    draft = path.with_suffix(".new")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    draft.replace(path)
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--name", action="append", default=[], help="host name or address of gateway and Redis")
    arguments = parser.parse_args()
    for path in make(arguments.directory, arguments.name):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Checks of certificate and key files before a server uses them."""

from __future__ import annotations

import ssl
from pathlib import Path

from shared.errors import ConfigurationError


def check_pair(certificate: Path, key: Path) -> None:
    """Raise ConfigurationError if a server cannot use the certificate with the key."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except OSError as error:  # SSLError is one
        raise ConfigurationError(f"TLS with {certificate} and {key}: {error}; give a matching PEM pair") from error


def readable(path: Path, name: str) -> Path:
    """Return the path. Raises ConfigurationError that names the setting `name` if the file cannot be read."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise ConfigurationError(f"{name}={path}: cannot be read: {error.strerror}; give a readable file") from error
    return path

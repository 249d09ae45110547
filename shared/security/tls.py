"""Files of certificates and keys, looked at before anything is served with them."""

from __future__ import annotations

import ssl
from pathlib import Path

from shared.errors import ConfigurationError


def check_pair(certificate: Path, key: Path) -> None:
    """Raises ConfigurationError for a certificate and a key that cannot be served with."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except OSError as error:  # SSLError is one
        raise ConfigurationError(f"cannot serve TLS with {certificate} and {key}: {error}") from error


def readable(path: Path, name: str) -> Path:
    """The path. Raises ConfigurationError naming the setting `name`."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise ConfigurationError(f"{name}={path} cannot be read: {error.strerror}") from error
    return path

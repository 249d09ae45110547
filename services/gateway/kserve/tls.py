"""The certificate of the gRPC front, which can be read again while it serves."""

from __future__ import annotations

from pathlib import Path

import grpc

from shared.tls import check_pair


class Certificate:
    """A chain and its key. gRPC asks `_renewed` at each handshake, on a thread of its own."""

    def __init__(self, chain: Path, key: Path) -> None:
        self._chain = chain
        self._key = key
        self._fresh: grpc.ServerCertificateConfiguration | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """What to listen with. Raises ConfigurationError for files that will not do."""
        return grpc.dynamic_ssl_server_credentials(self._read(), self._renewed)

    def renew(self) -> None:
        """Reads the files again, for connections that come from now on. Raises ConfigurationError."""
        self._fresh = self._read()

    def _read(self) -> grpc.ServerCertificateConfiguration:
        check_pair(self._chain, self._key)
        return grpc.ssl_server_certificate_configuration([(self._key.read_bytes(), self._chain.read_bytes())])

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """None: as before."""
        fresh, self._fresh = self._fresh, None
        return fresh

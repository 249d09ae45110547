"""gRPC channels between scheduler and worker, plain or with mutual TLS.

Both ends show certificates of one CA, which signs nothing else. The certificate of a worker has the name WORKER_NAME
instead of its address, because workers come and go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc

from shared.errors import ConfigurationError
from shared.security.tls import check_pair, readable
from shared.settings import InternalSettings

WORKER_NAME = "orcinus-worker"
Options = Sequence[tuple[str, Any]]


def server_credentials(settings: InternalSettings) -> grpc.ServerCredentials | None:
    """Return the credentials of a worker's server; None without mutual TLS. Raises ConfigurationError for bad files."""
    if settings.grpc_ca is None:
        return None
    ca, certificate, key = _files(settings)
    return grpc.ssl_server_credentials([(key, certificate)], root_certificates=ca, require_client_auth=True)


def channel_credentials(settings: InternalSettings) -> grpc.ChannelCredentials | None:
    """Return the credentials of a channel to a worker; None without mutual TLS. Raises ConfigurationError."""
    if settings.grpc_ca is None:
        return None
    ca, certificate, key = _files(settings)
    return grpc.ssl_channel_credentials(ca, key, certificate)


def channel(address: str, credentials: grpc.ChannelCredentials | None, options: Options = ()) -> grpc.Channel:
    """Return a blocking channel to a worker."""
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, credentials, options=worker_options(options))


def aio_channel(address: str, credentials: grpc.ChannelCredentials | None, options: Options = ()) -> grpc.aio.Channel:
    """Return a channel to a worker for asyncio."""
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=worker_options(options))


def worker_options(options: Options) -> list[tuple[str, Any]]:
    """Return the options of a channel that accepts only the certificate of a worker."""
    return [*options, ("grpc.ssl_target_name_override", WORKER_NAME)]


def _files(settings: InternalSettings) -> tuple[bytes, bytes, bytes]:
    """Return CA, certificate and key. Raises ConfigurationError."""
    if settings.grpc_ca is None or settings.grpc_cert is None or settings.grpc_key is None:
        raise ConfigurationError("mutual TLS: set all of ORCINUS_GRPC_CA, ORCINUS_GRPC_CERT and ORCINUS_GRPC_KEY")
    check_pair(settings.grpc_cert, settings.grpc_key)  # the errors of gRPC do not name a wrong file
    named = (("CA", settings.grpc_ca), ("CERT", settings.grpc_cert), ("KEY", settings.grpc_key))
    ca, certificate, key = (readable(path, f"ORCINUS_GRPC_{name}").read_bytes() for name, path in named)
    return ca, certificate, key

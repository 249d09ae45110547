"""gRPC channels between scheduler and worker, in the clear or with mutual TLS.

Both ends prove to each other that their certificates come from one CA, which signs for nothing else. A
worker is known by the name WORKER_NAME in its certificate and not by its address: workers come and go.
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
    """What a worker listens with; None without mutual TLS. Raises ConfigurationError for files that will not do."""
    if settings.grpc_ca is None:
        return None
    ca, certificate, key = _files(settings)
    return grpc.ssl_server_credentials([(key, certificate)], root_certificates=ca, require_client_auth=True)


def channel_credentials(settings: InternalSettings) -> grpc.ChannelCredentials | None:
    """What a worker is dialled with; None without mutual TLS. Raises ConfigurationError."""
    if settings.grpc_ca is None:
        return None
    ca, certificate, key = _files(settings)
    return grpc.ssl_channel_credentials(ca, key, certificate)


def channel(address: str, credentials: grpc.ChannelCredentials | None, options: Options = ()) -> grpc.Channel:
    """A blocking channel to a worker."""
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, credentials, options=worker_options(options))


def aio_channel(address: str, credentials: grpc.ChannelCredentials | None, options: Options = ()) -> grpc.aio.Channel:
    """The same for asyncio."""
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=worker_options(options))


def worker_options(options: Options) -> list[tuple[str, Any]]:
    """Options of a channel whose other end must show the certificate of a worker."""
    return [*options, ("grpc.ssl_target_name_override", WORKER_NAME)]


def _files(settings: InternalSettings) -> tuple[bytes, bytes, bytes]:
    """CA, certificate, key. Raises ConfigurationError."""
    if settings.grpc_ca is None or settings.grpc_cert is None or settings.grpc_key is None:
        raise ConfigurationError("mutual TLS needs all of ORCINUS_GRPC_CA, ORCINUS_GRPC_CERT and ORCINUS_GRPC_KEY")
    check_pair(settings.grpc_cert, settings.grpc_key)  # gRPC itself says nothing of use about a wrong file
    named = (("CA", settings.grpc_ca), ("CERT", settings.grpc_cert), ("KEY", settings.grpc_key))
    ca, certificate, key = (readable(path, f"ORCINUS_GRPC_{name}").read_bytes() for name, path in named)
    return ca, certificate, key

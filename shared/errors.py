"""The errors that services raise on purpose. Each says what was wrong, with which value, and what to do."""

from __future__ import annotations


class OrcinusError(Exception):
    """Base of every error that Orcinus raises on purpose."""


class ConfigurationError(OrcinusError):
    """A setting, a file or a device that the operator has to change. The process exits with 2."""


class ModelError(ConfigurationError):
    """A model directory that cannot be served."""


class InvalidRequest(OrcinusError):  # noqa: N818 - the HTTP term
    """A request that can never be served. `param` names the field."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class LeaseLostError(OrcinusError):
    """A write was refused because another scheduler holds the shard."""


class ProtocolError(OrcinusError):
    """The other side broke the contract of protos/."""

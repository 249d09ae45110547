"""The errors that services raise on purpose. Each says what was wrong, with which value, and what to do."""

from __future__ import annotations


class OrcinusError(Exception):
    """Base of every error that Orcinus raises on purpose."""


class ConfigurationError(OrcinusError):
    """A setting, a file or a device that the operator has to change. The process exits with 2."""


class ModelError(ConfigurationError):
    """A model directory that cannot be served."""


class LeaseLostError(OrcinusError):
    """A write was refused because another scheduler holds the shard."""


class ProtocolError(OrcinusError):
    """The other side broke the contract of protos/."""


class RankError(OrcinusError):
    """Another rank of the replica is gone, hangs or is out of step: this process is of no use any more and ends."""

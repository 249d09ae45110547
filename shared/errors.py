"""The errors that services raise on purpose. A message is `<thing>: <problem, value and limit>; <remedy>`."""

from __future__ import annotations


class OrcinusError(Exception):
    """Base of every error that Orcinus raises on purpose."""


class ConfigurationError(OrcinusError):
    """A setting, file or device that the operator must change. The process exits with 2."""


class ModelError(ConfigurationError):
    """A model directory that cannot be served."""


class LeaseLostError(OrcinusError):
    """Redis refused a write because another scheduler holds the shard."""


class ProtocolError(OrcinusError):
    """The other side broke the contract of protos/."""


class RankError(OrcinusError):
    """Another rank of the replica has died, hangs or is out of step. This process cannot go on and ends."""

"""The names of all Redis keys.

All keys of one model carry one literal hash tag (`hash_tag`); API keys and their buckets, which all models share, carry
another. docs/redis.md lists the writers and the lifetime of each key.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import lru_cache

CLASSES = ("realtime", "high", "normal", "low")
EPOCHS = 1 << 40  # bound of an epoch: it is at least Redis's clock in hundredths of a second
COUNTED_EPOCHS = 3 << 38  # a counter from here on was not written by a service and begins anew (lib.lua)
BELIEVED_EPOCHS = COUNTED_EPOCHS - (1 << 30)  # a worker that claims one from here on does not raise the counter
GROUP = "schedulers"

ALL_MODELS = "orcinus:{ALL}:"
"""Prefix of what all models of a Redis share: API keys, salt and buckets. No model has a tag of capital letters."""

_UNSAFE = re.compile(r"[^a-z0-9._-]+")
_GRAMMAR_NAME = re.compile(r"sha256:[0-9a-f]{64}")


def model_tag(name: str) -> str:
    """Return the served model name restricted to [a-z0-9._-], without dashes and dots at its ends, as it stands inside
    the braces of a key and in addresses.

    >>> model_tag("Demo Model/")
    'demo-model'
    """
    tag = _UNSAFE.sub("-", name.lower()).strip("-.")
    if not tag:
        raise ValueError(f"model name {name!r}: has no character of [a-z0-9_]; set --served-model-name")
    return tag


@lru_cache(maxsize=64)
def hash_tag(name: str) -> str:
    """Return what stands inside the braces: the name or, where it is more than its tag, the tag and a digest.

    Names that differ only in case or in characters that a tag cannot hold have different digests.

    >>> hash_tag("demo-model"), hash_tag("Qwen/Qwen3-0.6B")
    ('demo-model', 'qwen-qwen3-0.6b-fb68f5a6d13f')
    """
    tag = model_tag(name)
    return tag if tag == name else f"{tag}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def grammar_name(tenant: str, text: str) -> str:
    """Return the name by which the requests of a tenant refer to the text of a grammar in `queue:grammars`.

    No grammar is such a name, so a scheduler or worker that takes it for a text refuses it. Tenants share no text: the
    bytes that one is charged for tell nothing of the grammars of another.

    >>> grammar_name("alice", 'start: "a"')[:15], is_grammar_name('start: "a"')
    ('sha256:d4c14090', False)
    """
    digest = hashlib.sha256(tenant.encode() + b"\0" + text.encode())
    return f"sha256:{digest.hexdigest()}"


def is_grammar_name(text: str) -> bool:
    """Return whether `Sampling.grammar` of a request is a name, not the text itself."""
    return _GRAMMAR_NAME.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class Keys:
    """The key names of one served model, which is given by its exact name."""

    model: str

    @property
    def prefix(self) -> str:
        return f"orcinus:{{{hash_tag(self.model)}}}:"

    def requests(self, class_name: str) -> str:
        return f"{self.prefix}requests:{class_name}"

    def request_streams(self) -> list[str]:
        """Return the request streams, the most urgent class first."""
        return [self.requests(name) for name in CLASSES]

    def req(self, request_id: str) -> str:
        return f"{self.prefix}req:{request_id}"

    def prompt(self, request_id: str) -> str:
        return f"{self.prefix}prompt:{request_id}"

    def out(self, request_id: str, choice: int) -> str:
        return f"{self.prefix}out:{request_id}:{choice}"

    def logprobs(self, request_id: str, choice: int) -> str:
        return f"{self.prefix}logprobs:{request_id}:{choice}"

    def prompt_logprobs(self, request_id: str, prompt: int) -> str:
        return f"{self.prefix}prompt_logprobs:{request_id}:{prompt}"

    def tokens(self, gateway: str) -> str:
        return f"{self.prefix}tokens:{gateway}"

    def control(self, shard: str) -> str:
        return f"{self.prefix}control:{shard}"

    def lease(self, shard: str) -> str:
        return f"{self.prefix}lease:{shard}"

    @property
    def epoch(self) -> str:
        return f"{self.prefix}epoch"

    def shard_epoch(self, shard: str) -> str:
        """The last epoch of the shard; unlike the lease it outlives a pause."""
        return f"{self.epoch}:{shard}"

    def policy(self, shard: str) -> str:
        """The policy that was set at run time, JSON."""
        return f"{self.prefix}policy:{shard}"

    def lengths(self, shard: str) -> str:
        """Hash: output lengths of finished requests, int32, by their group of max_tokens."""
        return f"{self.prefix}lengths:{shard}"

    @property
    def background(self) -> str:
        """Set: gateways that deliver or have delivered background requests."""
        return f"{self.prefix}background"

    def background_of(self, gateway: str) -> str:
        """Set: ids of the background requests of a gateway."""
        return f"{self.background}:{gateway}"

    def adopter(self, request_id: str) -> str:
        """The gateway that is taking over a background request."""
        return f"{self.prefix}adopting:{request_id}"

    def response(self, response_id: str) -> str:
        """A response of `/v1/responses` that later ones may refer to, JSON; empty: forgotten."""
        return f"{self.prefix}response:{response_id}"

    @property
    def responses(self) -> str:
        """Sorted set: ids of stored responses by the time (ms) at which they expire; `keep.lua` adds to its name."""
        return f"{self.prefix}responses"

    def batch_lease(self, batch_id: str) -> str:
        """The epoch of the gateway that drives a batch."""
        return f"{self.prefix}batches:lease:{batch_id}"

    @property
    def batch_epoch(self) -> str:
        """The last epoch of any batch."""
        return f"{self.prefix}batches:epoch"

    def last_batch_epoch(self, batch_id: str) -> str:
        """The last epoch of a batch; unlike the lease it outlives a pause."""
        return f"{self.batch_epoch}:{batch_id}"

    @property
    def queue(self) -> str:
        """Hash: tokens and requests that wait for their first step, in total and by class; bytes until the end."""
        return f"{self.prefix}queue"

    @property
    def queue_tenants(self) -> str:
        """Hash: prompt tokens that wait for their first step, by tenant; scripts reach it from `queue`."""
        return f"{self.queue}:tenants"

    @property
    def queue_kept(self) -> str:
        """Stream: bytes of a tenant that stay behind the end of a request; scripts reach it from `queue`."""
        return f"{self.queue}:kept"

    @property
    def queue_bytes(self) -> str:
        """Hash: bytes of requests that have not ended, by tenant; scripts reach it from `queue`."""
        return f"{self.queue}:bytes"

    @property
    def queue_grammars(self) -> str:
        """Hash: texts of the grammars of requests that have not ended, and how many these are, by the name of each
        (`grammar_name`); scripts reach it from `queue`.
        """
        return f"{self.queue}:grammars"

    @property
    def workers(self) -> str:
        """Sorted set: worker ids by the time of their last heartbeat (ms of Redis's clock)."""
        return f"{self.prefix}workers"

    @property
    def shards(self) -> str:
        """Hash: the shards that schedulers lead or have led recently; a shard with a lease is led."""
        return f"{self.prefix}shards"

    def worker(self, worker_id: str) -> str:
        return f"{self.prefix}worker:{worker_id}"

    def alive(self, role: str, member: str) -> str:
        return f"{self.prefix}alive:{role}:{member}"

    @property
    def api_keys(self) -> str:
        """Hash: the record of each key of `orcinus keys`, by its id."""
        return f"{ALL_MODELS}keys"

    @property
    def keys_version(self) -> str:
        """Counter of the changes to `keys`."""
        return f"{ALL_MODELS}keys:version"

    @property
    def keys_salt(self) -> str:
        """The secret from which the salts of tenants are derived."""
        return f"{ALL_MODELS}keys:salt"

    @property
    def keys_used(self) -> str:
        """Hash: the time of the last use of each key, in seconds, rounded to the minute."""
        return f"{ALL_MODELS}keys:used"

    @property
    def model_keys(self) -> str:
        """As `api_keys`, where versions before this one kept the keys of one model."""
        return f"{self.prefix}keys"

    @property
    def model_keys_version(self) -> str:
        """As `keys_version`, of `model_keys`."""
        return f"{self.prefix}keys:version"

    @property
    def adapters(self) -> str:
        """Hash: the record of each LoRA adapter that a name stands for, by the name."""
        return f"{self.prefix}adapters"

    def drain(self, role: str, member: str) -> str:
        """Exists while an operator drains the process, which checks the key about once a second."""
        return f"{self.prefix}drain:{role}:{member}"

    def bucket(self, key_id: str) -> str:
        return f"{ALL_MODELS}bucket:{key_id}"

    def stats(self, shard: str) -> str:
        return f"{self.prefix}stats:{shard}"

    def stats_history(self, shard: str) -> str:
        return f"{self.prefix}stats:{shard}:history"

    def iterations(self, shard: str) -> str:
        return f"{self.prefix}stats:{shard}:iterations"

    def replicas(self, shard: str) -> str:
        """Hash: the figures of each replica of the shard as JSON, by worker id."""
        return f"{self.prefix}stats:{shard}:replicas"

    @property
    def events(self) -> str:
        return f"{self.prefix}events"

    @property
    def dead(self) -> str:
        return f"{self.prefix}dead"


class PlacerKeys(Keys):
    """The keys of the placer, which all models share; its lease and epochs are named as those of a shard."""

    __slots__ = ()

    @property
    def prefix(self) -> str:
        return f"{ALL_MODELS}placer:"

    @property
    def placements(self) -> str:
        """Hash: of each model what the placer wants of it (shared/placement.py), by its name."""
        return f"{self.prefix}placements"


PLACER = "placer"
"""In place of a shard in the names of its lease and epoch."""
PLACER_KEYS = PlacerKeys("")

"""Make the stack's secrets at its first start: the gateway's key, printed once, and the users of Redis.

Runs as the one-shot service `keys` of compose.yaml, before anything that reads them. What is there already is never
changed: a secret is renewed by removing its volume. `docker compose run --rm keys show` prints the key again.
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

from deploy import redis_users

SECRETS = Path("/secrets")
API_KEYS = SECRETS / "api" / "keys"


def write_once(path: Path, text: str, mode: int) -> bool:
    """Write `text` completely unless the file exists; return whether it was written."""
    draft = path.with_suffix(".new")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    finally:
        draft.unlink()
    return True


def main(arguments: list[str]) -> int:
    os.umask(0)
    if arguments == ["show"]:
        if not API_KEYS.exists():
            print("no key yet; run docker compose up, which makes it", file=sys.stderr)
            return 1
        print(API_KEYS.read_text(), end="")
        return 0
    if arguments:
        print(f"keys: unknown argument {arguments[0]!r}; there is only 'show'", file=sys.stderr)
        return 2
    # Redis runs under another system user; it reads its files through its supplementary group.
    passwords = {role: SECRETS / f"redis-{role}" / "password" for role in redis_users.ROLES}
    redis_users.make(passwords, SECRETS / "redis-users" / "users.acl")
    key = f"sk-orcinus-{secrets.token_urlsafe(32)}"
    if write_once(API_KEYS, f"{key}\n", 0o600):
        print(f"API key (shown only this once): {key}")
        print("the key again: docker compose run --rm keys show")
    else:
        print("the API key was made at an earlier start; to see it: docker compose run --rm keys show")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Write passwords of Redis's users, and the ACL file with their digests: `redis_users.py DIRECTORY`.

deploy/redis/users.acl says what each user may; Redis 7.0 or newer reads it (6.2 has no keys that may only be read).
What is there already is kept, so a second run changes no password; the ACL file follows the rules of this version.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
from pathlib import Path

RULES = Path(__file__).resolve().parent / "redis" / "users.acl"
ROLES = ("gateway", "scheduler", "worker", "placer", "ops", "viewer")


def write(path: Path, text: str, mode: int) -> None:
    """Write a file completely or not at all."""
    draft = path.with_suffix(".new")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def make(passwords: dict[str, Path], acl: Path, mode: int = 0o640) -> None:
    """Write a missing password file for each role, and the ACL file, which leaves out other roles. Raises OSError
    without the directory.
    """
    rules = RULES.read_text()
    for role, path in passwords.items():
        if not path.exists():
            write(path, secrets.token_hex(32), mode)
        rules = rules.replace("{" + role + "}", hashlib.sha256(path.read_text().strip().encode()).hexdigest())
    write(acl, "".join(line for line in rules.splitlines(keepends=True) if "#{" not in line), mode)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: redis_users.py DIRECTORY", file=sys.stderr)
        return 2
    directory = Path(arguments[0])
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    make({role: directory / f"{role}.password" for role in ROLES}, directory / "users.acl", 0o600)
    print(f"redis-server --aclfile {directory / 'users.acl'}")
    for role in ROLES:
        print(f"ORCINUS_REDIS_USERNAME={role} ORCINUS_REDIS_PASSWORD=$(cat {directory / role}.password)")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Numbers with their words. Imports nothing: `make run` says such lines before anything is installed."""


def counted(number: int, thing: str) -> str:
    """Return a number and its thing, as in `1 package` and `2 packages`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"

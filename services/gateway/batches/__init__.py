"""Files and batches: files on disk, batches as records and journals beside them, and what answers their lines.

`files.py`, `records.py` and `journal.py` are the disk; `driver.py` finds batches and holds their leases, `run.py` takes
one through its statuses. Routes are in `openai/files.py` and `openai/batches.py`; `openai` imports this package, never
the other way round.
"""

"""Models of the Hugging Face Hub on this machine: fetch one, list them, remove one.

Used by the command line and the launcher alone: only operators fetch, and no service imports this. huggingface_hub does
the transfer and owns the layout of its cache, which other tools share; the choice of files, the check of every file,
the disk and the words are here. Imports go from `fetch` to `store` to `shared.models.hub`.
"""

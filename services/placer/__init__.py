"""The placer: where the models of `models.yaml` take turns, it decides which of them have workers, and writes that to
Redis. It starts and stops nothing; the launcher does.

`decide.py` is pure. Nothing here imports another service.
"""

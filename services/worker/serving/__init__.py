"""Serve an engine to schedulers and to leaders of ranks: gRPC, the socket of a Run, the pipeline of steps behind both.

Imports the engine; `services.worker.main` alone imports this.
"""

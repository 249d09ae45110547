"""The stack that a chaos run hurts: its processes, proxies between them, Redis's clock, services that go wrong.

Imports `clock` of the harness alone; faults, load and checks import it.
"""

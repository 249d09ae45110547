"""The scheduler's decisions, pure: numpy and the standard library, no clock, no I/O.

`scheduler` is the entry. `planner` plans one step of a replica with `step`, `admission` and `preemption`; `results`
applies its answer. All work on `replica` (its `table` of running sequences, its blocks) and on `waiting`, and say what
they did to `outcome`. Imports go this way, down to `sequence` and `types`.
"""

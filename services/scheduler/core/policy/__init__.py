"""A policy: five parts, each an abstract base class in base.py, and their implementations by subject.

presets.py names the combinations. The parts read columns of a replica and never change them. This package imports the
table, the sequences and the types, and never the planner.
"""

"""The requests of a simulated run: traces and arrival processes (`traffic`), as columns (`workload`), from options
(`arrivals`).
"""

"""Measures on the device at hand what layers cost in each format, and what error they have there.

What lives here: distinct workloads of a model (``workloads``), running one in a format (``layer_runs``, ``attention``),
timing in turns (``timing``), results on disk (``cache``), and measuring within a budget (``calibrator``). What does
not: when a fit measures and what follows from it (``cost_watch``), and plain data on costs (``cost_table``).
"""

"""Fault simulation: one integer draws a whole world and everything that goes wrong in it, and checkers watch.

Read `play.py` first: a safety phase with faults, a liveness phase without, then everything must be at rest. What may be
drawn is in `scenario.py`, what goes wrong in `fault_plan.py` and `disturbances.py`, what must hold in `checks/`.
"""

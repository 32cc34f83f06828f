"""How fast and how good, measured: each module is one benchmark, `cells.py` says what they share.

Run from the root of the checkout: `python -m benchmarks.ppo_speed`. Results lie in `results/`,
one JSON file per cell; `python -m benchmarks.table` turns them into the tables of the README.
"""

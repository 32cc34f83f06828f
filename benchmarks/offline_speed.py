"""TD3+BC and IQL on recorded data: updates per second, ours against a plain eager loop and d3rlpy.

Data of Hopper's sizes made of normal numbers, networks 2 x 256 relu, batch 256, Adam. `eager` is
`eager_offline.py`, the plain torch loop in the manner of CORL; d3rlpy runs its own update on what
its own buffer draws. All take turns on one torch thread.

`four-seeds` has four seeds of TD3+BC as one job against one eager run after another, both on one
and on two threads; an update of each seed counts.
"""

import sys

from benchmarks import flops, peers
from benchmarks.cells import Cell, main
from benchmarks.learner_race import race

OBS, ACTIONS = 11, 3
SETTINGS = {"batch_size": 256, "hidden": [256, 256], "learning_rate": 3e-4}
OURS = {
    "ours, compiled": {"peer": peers.OURS, "script": "ours_offline.py", "compile": "on"},
    "ours, eager": {"peer": peers.OURS, "script": "ours_offline.py", "compile": "off"},
}
EAGER = {"eager": {"peer": peers.OURS, "script": "eager_offline.py"}}
D3RLPY = {
    "d3rlpy, eager": {"peer": "d3rlpy", "script": "d3rlpy_offline.py", "compile": "off"},
    "d3rlpy, compiled": {"peer": "d3rlpy", "script": "d3rlpy_offline.py", "compile": "on"},
}
LABELS = {"td3_bc": "TD3+BC", "iql": "IQL", "four-seeds": "TD3+BC, four seeds"}
"""What cells are called in tables."""
FOUR = {"ours, compiled, 4 seeds": OURS["ours, compiled"] | {"seeds": 4}}

CELLS = [
    Cell(
        name=name,
        config={
            "algo": algo,
            "floors": floors,
            "rows": 200_000,
            "settings": SETTINGS,
            "designs": designs,
            "threads": threads,
            "seconds": 3.0,
            "rounds": 7,
            "warm_up": 1,
        },
    )
    for name, algo, designs, threads, floors in (
        ("td3_bc", "td3_bc", OURS | EAGER | D3RLPY, (1,), {"eager": 1.3, "d3rlpy": 1.8}),
        ("iql", "iql", OURS | EAGER | D3RLPY, (1,), {"eager": 1.4, "d3rlpy": 1.8}),
        ("four-seeds", "td3_bc", FOUR | EAGER, (1, 2), {"eager": 2.0}),
    )
]


def measure(config: dict) -> dict:
    """One cell; the unit of work is an update of one seed.

    Returns:
        What `race` returns, and `ratios`: our fastest design over the fastest of each reference.
    """
    shared = {key: config[key] for key in ("algo", "rows", "settings")}
    count = {"td3_bc": flops.td3_bc_update, "iql": flops.iql_update}[config["algo"]]
    flop = count(OBS, ACTIONS, SETTINGS["hidden"], SETTINGS["batch_size"])
    found = race(config, shared, flop)
    best = {
        library: max(r["per_s"] for name, r in found["per_s"].items() if name.startswith(library))
        for library in ("ours", *config["floors"])
    }
    ratios = {name: round(best["ours"] / best[name], 3) for name in config["floors"]}
    return {**found, "ratios": ratios}


if __name__ == "__main__":
    sys.exit(main("offline_speed", CELLS, measure))

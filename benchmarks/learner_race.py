"""Libraries that run the same learner take turns, on several thread counts, beside bare products.

What the machine reaches in large matrix products (`matmul.py`) is measured in the same turns, so
that a rate can be told as a share of it: `share_of_peak` is what one unit of work needs in
floating-point operations (`flops.py`) times the rate, over the products' rate on as many threads.
"""

from benchmarks import peers


def race(config: dict, shared: dict, flop: int, mode: str = "") -> dict:
    """Median rates of all designs, our best over the others' best, and shares of the peak.

    Args:
        config: of a cell: `designs` (name -> peer, script and what the script is told; names of
            ours begin with "ours"), `threads`, `seconds`, `rounds`, `warm_up`.
        shared: what all scripts are told.
        flop: floating-point operations that a unit of work needs.
        mode: argument of the scripts.
    """
    designs = {
        f"{name}, {threads} thread{'s' * (threads > 1)}": (
            design["peer"],
            f"{design['script']} {mode}",
            {**shared, **design, "torch_threads": threads},
        )
        for name, design in config["designs"].items()
        for threads in config["threads"]
    }
    products = {
        f"products, {threads}": (peers.OURS, "matmul.py", {"torch_threads": threads})
        for threads in config["threads"]
    }
    slices = {key: config[key] for key in ("seconds", "rounds", "warm_up")}
    rates, versions = peers.race({**designs, **products}, **slices)
    peak = {n: rates.pop(f"products, {n}")["per_s"] for n in config["threads"]}
    return {
        "per_s": rates,
        **ratio_to_best({name: rate["per_s"] for name, rate in rates.items()}),
        "flop": flop,
        "peak_flop_per_s": {str(n): rate for n, rate in peak.items()},
        "share_of_peak": {
            name: round(rate["per_s"] * flop / peak[designs[name][2]["torch_threads"]], 4)
            for name, rate in rates.items()
        },
        "versions": versions,
    }


def ratio_to_best(per_s: dict[str, float]) -> dict:
    """Our fastest design over the fastest of the others."""
    ours = max((n for n in per_s if n.startswith("ours")), key=per_s.__getitem__)
    reference = max((n for n in per_s if not n.startswith("ours")), key=per_s.__getitem__)
    ratio = round(per_s[ours] / per_s[reference], 3)
    return {"best": ours, "best_reference": reference, "ratio": ratio}

"""Writes the result tables of README and docs from the JSON files in `results/`.

    python -m benchmarks.table            write them anew
    python -m benchmarks.table --check    exit status 1 if one is not current

A table stands between `<!-- table: NAME -->` and `<!-- /table -->`; NAME is one of `TABLES`. A
cell that was not measured says so in its row.

Reading order: `TABLES` at the end -> the builders above it -> `fill` -> `main`.
"""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks import adamo as adamo_cells
from benchmarks import aro_ddpg as aro_ddpg_cells
from benchmarks import (
    fast_halfcheetah,
    learners,
    memory,
    metadiffuser,
    offline_quality,
    offline_speed,
    peers,
    ppo_halfcheetah,
    sac_speed,
)
from benchmarks import ppo_loop as loop
from benchmarks.cells import RESULTS, ROOT, load
from benchmarks.ppo_halfcheetah import verdict

MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- /table -->)", re.DOTALL)

NOT_MEASURED = "not measured"


def fill(text: str, results: Path = RESULTS) -> str:
    """`text` with every marked table written anew. Raises ValueError for an unknown name."""

    def table(found: re.Match) -> str:
        name = found[2]
        if name not in TABLES:
            raise ValueError(f"unknown table {name!r}; known: {', '.join(TABLES)}")
        return f"{found[1]}{TABLES[name](results)}\n{found[3]}"

    return MARKED.sub(table, text)


def pages() -> list[Path]:
    """Pages that may hold tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check; 1 if a page was not current under `--check`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table")
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args(argv)
    stale = [page for page in pages() if fill(page.read_text()) != page.read_text()]
    for page in stale:
        print(f"{page.relative_to(ROOT)}: {'not current' if args.check else 'written'}")
        if not args.check:
            page.write_text(fill(page.read_text()))
    return 1 if args.check and stale else 0


# Pieces -------------------------------------------------------------------------------------


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; the first column is text, the others are numbers."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def measured_on(cells: dict[str, dict]) -> str:
    """The line below a table: machine, versions, day, commands."""
    if not cells:
        return ""
    hardware = {_hardware(c["hardware"]) for c in cells.values()}
    versions = {
        f"{p} {v}" for c in cells.values() for p, v in c["versions"].items() if p in SHOWN_VERSIONS
    }
    days = sorted({c["date"][:10] for c in cells.values()})
    benchmarks = sorted({c["benchmark"] for c in cells.values()})
    return (
        f"\n\n{'; '.join(sorted(hardware))}; {', '.join(sorted(versions))}; "
        f"{days[0] if len(days) == 1 else f'{days[0]} to {days[-1]}'}; "
        f"{', '.join(f'`python -m benchmarks.{b}`' for b in benchmarks)}."
    )


SHOWN_VERSIONS = ("torch", "mujoco")


def _hardware(hardware: dict) -> str:
    parts = [f"{hardware['cores']} cores of {hardware['cpu']}"]
    return ", ".join([*parts, *filter(None, [hardware.get("gpu")])])


# Tables -------------------------------------------------------------------------------------


def gpu(results: Path) -> str:
    """Speed on a GPU by number of environments, and Go1's time to walk there."""
    cells = {n: c for n, c in load("gpu", results).items() if not n.startswith("quick")}
    speed = [c for c in cells.values() if c["config"]["kind"] == "speed"]
    if not speed:
        return f"GPU: {NOT_MEASURED}."
    speed.sort(key=lambda c: (c["config"]["task"], c["config"]["num_envs"]))
    rows = [
        [
            f"{c['config']['task']}, {c['config']['num_envs']:,} environments",
            f"{c['result']['env_steps_per_s']:,.0f}",
            f"{c['result']['physics_env_steps_per_s']:,.0f}",
            f"{c['result']['added_mb']:,.0f} MB",
        ]
        for c in speed
    ]
    text = markdown(["", "env steps/s", "physics alone", "memory added"], rows)
    walk = cells.get("walk-go1")
    if walk:
        r = walk["result"]
        said = "passed" if r["verify_passed"] else "failed"
        text += f"\n\nGo1 from nothing on this GPU: {r['train_wall_s']:.0f} s; `verify` {said}."
    return text + measured_on(cells)


def ppo_speed(results: Path) -> str:
    """Env steps per second of PPO, and wall time of a million steps."""
    cells = load("ppo_speed", results)
    if "rate" not in cells:
        return f"PPO's speed: {NOT_MEASURED}."
    result = cells["rate"]["result"]
    whole = {
        "ours, compiled": "steps-ours-compiled",
        "ours, eager": "steps-ours-eager",
        "sb3, DummyVecEnv": "steps-sb3",
    }
    rows = []
    for name, rate in result["env_steps_per_s"].items():
        cell = cells.get(whole.get(name, ""))
        wall = f"{cell['result']['wall_s']:.0f} s" if cell else NOT_MEASURED
        rows.append([_design(name), f"{rate['per_s']:,.0f}", f"{result['ratio'][name]:.2f}", wall])
    head = ["PPO on HalfCheetah-v5", "env steps/s", "ratio to best reference", "1 M steps, cold"]
    return markdown(head, rows) + measured_on(cells)


def _design(name: str) -> str:
    return name.replace("sb3", "stable-baselines3").replace("ours", "ctrl-rl")


def halfcheetah(results: Path) -> str:
    """Return at one million steps, every seed, and the verdict."""
    cells = load("ppo_halfcheetah", results)
    rows, means = [], {}
    for peer, label in (("ctrl-rl", "ctrl-rl"), ("sb3", "stable-baselines3")):
        seeds = [
            float(np.mean(c["result"]["returns"])) for n, c in cells.items() if n.startswith(peer)
        ]
        means[peer] = np.array(seeds)
        shown = ", ".join(f"{x:,.0f}" for x in sorted(seeds)) or NOT_MEASURED
        rows.append([label, str(len(seeds)), shown])
    text = markdown(["Return on HalfCheetah-v5 at 1 M steps", "seeds", "each seed"], rows)
    if min(map(len, means.values())) >= 5:
        line = _verdict(means["ctrl-rl"], means["sb3"])
        text += f"\n\n{line[0].upper()}{line[1:]}"
    else:
        text += "\n\nFewer than five seeds on a side are shown, not judged."
    return text + measured_on(cells)


def ppo_loop(results: Path) -> str:
    """Env steps per second of PPO's loop without physics, the best of each library."""
    cells = load("ppo_loop", results)
    rows = []
    for cell in loop.CELLS:
        hidden = "-".join(map(str, cell.config["hidden"]))
        label = f"{cell.config['num_envs']} environments, {hidden}"
        floor = f"{cell.config['floor']:.2f}"
        if cell.name not in cells:
            rows.append([label, *[NOT_MEASURED] * 4, floor, NOT_MEASURED])
            continue
        r = cells[cell.name]["result"]
        rows.append(
            [
                label,
                *(_fastest(r["per_s"], library) for library in ("ours", "rsl_rl", "skrl")),
                f"{r['ratio']:.2f}",
                floor,
                f"{100 * r['share_of_peak'][r['best']]:.0f} %",
            ]
        )
    head = ["PPO's loop without physics", "ctrl-rl, env steps/s", "rsl_rl", "skrl"]
    head += ["ratio to the better", "floor", "share of peak"]
    return markdown(head, rows) + measured_on(cells)


def _fastest(rates: dict[str, dict], library: str) -> str:
    """Rate and name of a library's fastest design."""
    name = max((n for n in rates if n.startswith(library)), key=lambda n: rates[n]["per_s"])
    how = name.partition(", ")[2]
    return f"{rates[name]['per_s']:,.0f} ({how})"


def sac_updates(results: Path) -> str:
    """Updates per second of SAC, and env steps per second of the loop around them."""
    cells = load("sac_speed", results)
    updates, around = (cells.get(name, {}).get("result") for name in ("updates", "loop"))
    names = [
        f"{design}, {n} thread{'s' * (n > 1)}"
        for design in sac_speed.DESIGNS
        for n in sac_speed.CELLS[0].config["threads"]
    ]
    rows = [
        [
            _design(name),
            f"{updates['per_s'][name]['per_s']:,.0f}" if updates else NOT_MEASURED,
            f"{100 * updates['share_of_peak'][name]:.0f} %" if updates else NOT_MEASURED,
            f"{around['per_s'][name]['per_s']:,.0f}" if around else NOT_MEASURED,
        ]
        for name in names
    ]
    head = [f"SAC on {sac_speed.TASK}", "updates/s", "share of peak"]
    text = markdown([*head, "env steps/s, one update each"], rows)
    floor = sac_speed.CELLS[0].config["floor"]
    named = ((f"updates (floor {floor:.2f})", updates), ("whole loop", around))
    if ratios := [f"{what} {r['ratio']:.2f}" for what, r in named if r]:
        text += f"\n\nBest of ctrl-rl over best of stable-baselines3: {', '.join(ratios)}."
    return text + measured_on(cells)


def offline_updates(results: Path) -> str:
    """Updates per second of offline learners, the best of each library."""
    cells = load("offline_speed", results)
    rows = []
    for cell in offline_speed.CELLS:
        config, label = cell.config, offline_speed.LABELS[cell.name]
        floors = ", ".join(f"{x:.1f}" for x in config["floors"].values())
        if cell.name not in cells:
            rows.append([label, *[NOT_MEASURED] * 4, floors, NOT_MEASURED])
            continue
        r = cells[cell.name]["result"]
        others = [
            _fastest(r["per_s"], name) if name in config["floors"] else "–"
            for name in ("eager", "d3rlpy")
        ]
        ratios = ", ".join(f"{x:.2f}" for x in r["ratios"].values())
        share = f"{100 * r['share_of_peak'][r['best']]:.0f} %"
        rows.append([label, _fastest(r["per_s"], "ours"), *others, ratios, floors, share])
    head = ["Updates of all seeds per second", "ctrl-rl", "plain eager torch", "d3rlpy"]
    head += ["ratios", "floors", "share of peak"]
    return markdown(head, rows) + measured_on(cells)


def returns(algo: str, results: Path) -> str:
    """Return of a learner on gymnasium's bodies, every seed, and the verdicts.

    TD3 stands beside the reference's SAC, which was measured on HalfCheetah.
    """
    judged = "sac" if algo == "td3" else algo
    studies = [(s.task, s.total_steps) for s in learners.STUDIES if s.algo == algo]
    if algo == "ppo":
        s = ppo_halfcheetah.SETTINGS
        studies.insert(0, (ppo_halfcheetah.TASK, s["total_steps"]))
    planned = {(s.algo, s.task) for s in learners.STUDIES if "sb3" in s.peers}
    planned.add(("ppo", ppo_halfcheetah.TASK))
    rows, verdicts, used = [], [], {}
    for task, steps in studies:
        sides = [(peers.OURS, algo, f"ctrl-rl, {algo.upper()}")]
        if (judged, task) in planned:
            sides.append(("sb3", judged, f"stable-baselines3, {judged.upper()}"))
        means = []
        for peer, learner, label in sides:
            cells = learners.measured(learner, task, peer, results)
            means.append(np.sort(learners.seed_means(cells)))
            shown = ", ".join(f"{x:,.0f}" for x in means[-1]) or NOT_MEASURED
            rows.append([f"{task}, {label}", f"{steps:,}", str(len(cells)), shown])
            used |= cells
        if len(means) == 2 and min(map(len, means)) >= 5:
            verdicts.append(f"{task}: {_verdict(*means)}")
    text = markdown(["Return after training", "env steps", "seeds", "each seed"], rows)
    if verdicts:
        text += "\n\n" + "\n".join(f"- {line}" for line in verdicts)
    text += "\n\nFewer than five seeds on a side are shown, not judged."
    return text + measured_on(used)


def _verdict(ours: np.ndarray, reference: np.ndarray) -> str:
    v = verdict(ours, reference)
    return (
        f"interquartile mean {v['iqm']:,.0f} against {v['iqm_reference']:,.0f}: ratio "
        f"{v['ratio']:.2f}, 95 % interval {v['ci95'][0]:.2f} to {v['ci95'][1]:.2f}."
    )


def aro_ddpg(results: Path) -> str:
    """Average reward of both learners on both tasks, every seed, and the verdicts."""
    cells = load("aro_ddpg", results)
    rows, verdicts = [], []
    for task in aro_ddpg_cells.TASKS:
        found = {}
        for learner, label in (("aro_ddpg", "ARO-DDPG"), ("ddpg", "DDPG")):
            seeds = [c for n, c in cells.items() if n.startswith(f"{learner}-{task}-")]
            found[learner] = np.array([c["result"]["average_reward"] for c in seeds])
            shown = ", ".join(f"{x:.2f}" for x in sorted(found[learner])) or NOT_MEASURED
            rows.append([task, label, str(len(seeds)), shown])
        if min(map(len, found.values())) >= 5:
            v = aro_ddpg_cells.verdict(found["aro_ddpg"], found["ddpg"])
            verdicts.append(
                f"{task}: interquartile mean {v['iqm']:.2f} against {v['iqm_baseline']:.2f}, "
                f"difference {v['difference']:+.2f}, 95 % interval {v['ci95'][0]:+.2f} to "
                f"{v['ci95'][1]:+.2f}."
            )
        else:
            verdicts.append(f"{task}: fewer than five seeds on a side are shown, not judged.")
    text = markdown(["task", "learner", "seeds", "reward per step, each seed"], rows)
    return text + "\n\n" + " ".join(verdicts) + measured_on(cells)


def meta(results: Path) -> str:
    """Return of both planners on held-out tasks, without each guide, every seed, and verdicts."""
    cells = load("metadiffuser", results)
    rows, verdicts = [], []
    for family in metadiffuser.FAMILIES:
        found = {}
        for variant, label in metadiffuser.LABELS.items():
            seeds = [c["result"] for n, c in cells.items() if n.startswith(f"{family}-{variant}-s")]
            found[variant] = np.array([r["mean"] for r in seeds])
            shown = ", ".join(f"{x:.1f}" for x in found[variant]) or NOT_MEASURED
            mean = f"{found[variant].mean():.1f}" if seeds else ""
            rows.append([family, label, str(len(seeds)), mean, shown])
        played = [c["result"] for n, c in cells.items() if n.startswith(f"{family}-full-s")]
        if played:
            uniform = f"{np.mean([np.mean(r['uniform']) for r in played]):.1f}"
            rows.append([family, "uniform actions", "", uniform, ""])
            if family == "Point-Robot-v0":
                rows.append([family, "best possible", "", f"{metadiffuser.best_return():.1f}", ""])
        if data := cells.get(f"{family}-data"):
            stages = data["result"]["mean_return_by_stage"]
            shown = f"{stages[0]:.1f} to {stages[-1]:.1f}"
            rows.append([family, "data, on training tasks", "", shown, ""])
        if min(map(len, found.values())) < 5:
            verdicts.append(f"{family}: fewer than five seeds are shown, not judged.")
            continue
        for other in list(found)[1:]:
            v = metadiffuser.verdict(found["full"], found[other])
            label, (low, high) = metadiffuser.LABELS[other], v["ci95"]
            verdicts.append(
                f"{family}, MetaDiffuser against {label}: {v['difference']:+.1f}, 95 % interval "
                f"{low:+.1f} to {high:+.1f}."
            )
    text = markdown(["family", "planner", "seeds", "mean", "each seed"], rows)
    return text + "\n\n" + "\n".join(f"- {v}" for v in verdicts) + measured_on(cells)


def latency(results: Path) -> str:
    """Time of one action."""
    cells = load("latency", results)
    if not cells:
        return f"Inference latency: {NOT_MEASURED}."
    result = cells["go1"]["result"]
    rows = [
        ["onnxruntime, as exported", f"{result['us']['onnxruntime']:.1f} µs"],
        ["the same policy in eager torch", f"{result['us']['torch']:.1f} µs"],
        ["ratio", f"{result['ratio']:.2f}"],
    ]
    head = ["One action of the Go1 policy, batch 1, one thread", "median"]
    return markdown(head, rows) + measured_on(cells)


def env_speed(results: Path) -> str:
    """Simulation with tensors out."""
    cells = load("env_speed", results)
    rows = []
    for cell in cells.values():
        if "env_steps_per_s" not in cell["result"]:
            continue
        relative = cell["result"]["ours_relative_to"]
        rate = cell["result"]["env_steps_per_s"]["ours"]["per_s"]
        label = f"{cell['config']['task']}, {cell['config']['num_envs']} environments"
        ratios = [
            relative.get(peer, {}).get("per_s") for peer in ("envpool", "gymnasium", "physics")
        ]
        rows.append([label, f"{rate:,.0f}", *("–" if r is None else f"{r:.2f}" for r in ratios)])
    if not rows:
        return f"Simulation: {NOT_MEASURED}."
    head = ["", "env steps/s", "times envpool", "times SyncVectorEnv", "times bare physics"]
    text = markdown(head, rows)
    memory = cells.get("Go1-Velocity-Flat-v0-memory")
    if memory:
        text += (
            f"\n\n{memory['config']['num_envs']:,} Go1 environments add "
            f"{memory['result']['added_mb']:.0f} MB."
        )
    return text + measured_on(cells)


def install(results: Path) -> str:
    """Size on disk and time of a start."""
    cells = load("install", results)
    if not cells:
        return f"Install: {NOT_MEASURED}."
    labels = {"core": "training: `pip install`", "robot": "the robot's computer"}
    rows = []
    for name, cell in cells.items():
        r = cell["result"]
        largest = ", ".join(f"{n} {mb:,}" for n, mb in list(r["largest_mb"].items())[:3])
        rows.append(
            [labels[name], str(r["packages"]), f"{r['size_mb']:,} MB", largest,
             f"`{r['start']}`: {r['start_s']:.2f} s"]
        )  # fmt: skip
    head = ["", "packages", "size", "largest [MB]", "start"]
    return markdown(head, rows) + measured_on(cells)


def go1_walk(results: Path) -> str:
    """Wall clock of training and what `verify` found in three kinds of physics, every seed."""
    cells = load("go1_walk", results)
    if not cells:
        return f"Go1's time to walk: {NOT_MEASURED}."
    rows = []
    for name, cell in cells.items():
        result = cell["result"]
        figure = {k: v["mean"] for k, v in result["metrics"].items()}
        checks = {k: v["value"] for k, v in result["checks"].items()}
        for physics in ("training", "fine", "randomised"):
            first = physics == "training"
            drift = checks.get(f"{physics}/drift")
            rows.append(
                [
                    name if first else "",
                    f"{result['train_wall_s']:.0f} s" if first else "",
                    f"{result['env_steps'] / 1e6:.1f} M" if first else "",
                    physics,
                    f"{100 * figure[f'{physics}/falls']:.1f} %",
                    *(
                        f"{figure[f'{physics}/rms_{axis}']:.3f}"
                        for axis in ("lin_vel_x", "lin_vel_y", "ang_vel_z")
                    ),
                    f"{100 * drift:.1f} cm" if isinstance(drift, float) else "",
                    ("passed" if result["verify_passed"] else "not passed") if first else "",
                ]
            )
    head = ["Go1", "training", "env steps", "physics", "falls"]
    head += ["x [m/s]", "y [m/s]", "yaw [rad/s]", "drift", "verify"]
    seeds = [c["result"]["train_wall_s"] for n, c in cells.items() if n.startswith("seed")]
    median = ""
    if seeds:
        median = (
            f"\n\nMedian of {len(seeds)} seeds {np.median(seeds):.0f} s, worst {max(seeds):.0f} s."
        )
    return markdown(head, rows) + median + measured_on(cells)


def cartpole(results: Path) -> str:
    """Wall clock of training, and of 100 episodes how many hold the pole, every seed."""
    cells = load("cartpole", results)
    if not cells:
        return f"CartPole-SwingUp-v0: {NOT_MEASURED}."
    rows = []
    for name, cell in cells.items():
        r = cell["result"]
        rows.append(
            [
                name,
                f"{r['train_wall_s']:.0f} s",
                f"{r['env_steps'] / 1e6:.1f} M",
                f"{r['upright_second_half']:.4f}",
                "yes" if r["upright_second_half"] == 1.0 else "no",
                f"{100 * r['terminated_rate']:.0f} %",
            ]
        )
    walls = [c["result"]["train_wall_s"] for c in cells.values()]
    head = ["CartPole-SwingUp-v0", "training", "env steps", "upright in the last 5 s"]
    head += ["all 100 episodes held", "left the track"]
    text = markdown(head, rows)
    text += f"\n\nMedian of {len(walls)} seeds {np.median(walls):.0f} s, worst {max(walls):.0f} s."
    return text + measured_on(cells)


def hindsight(results: Path) -> str:
    """SAC on the sparse reach task with and without goals from the future, every seed."""
    cells = load("hindsight", results)
    if not cells:
        return f"Reach-v0: {NOT_MEASURED}."
    rows = []
    for name, title in (("hindsight", "SAC with hindsight"), ("plain", "SAC")):
        found = [c["result"] for key, c in cells.items() if key.startswith(f"{name}-")]
        if not found:
            rows.append([title, "0", NOT_MEASURED, "", "", ""])
            continue
        share = lambda k, found=found: [100 * r[k] for r in found]  # noqa: E731
        rows.append(
            [
                title,
                str(len(found)),
                ", ".join(f"{x:.1f} %" for x in share("success")),
                f"{np.mean(share('there')):.0f} %",
                f"{100 * np.mean([r['distance'] for r in found]):.1f} cm",
                f"{np.median([r['train_wall_s'] for r in found]):.0f} s",
            ]
        )
    steps = max(c["result"]["env_steps"] for c in cells.values())
    head = [f"Reach-v0, {steps / 1e3:.0f} k env steps", "seeds", "episodes that end at the goal"]
    text = markdown(head + ["steps at the goal", "mean distance", "training"], rows)
    return text + measured_on(cells)


def fast_returns(results: Path) -> str:
    """Time of both learners until HalfCheetah returns the goal, every seed, and the verdict."""
    cells = load("fast_halfcheetah", results)
    rows, times = [], {}
    names = {peers.OURS: "ctrl-rl, FastSAC", "sb3": "stable-baselines3, SAC"}
    for peer, label in names.items():
        found = [c["result"] for n, c in cells.items() if n.startswith(f"{peer}-s")]
        times[peer] = [r["goal_s"] for r in found]
        shown = ", ".join("never" if t is None else f"{t:,.0f}" for t in times[peer])
        steps = [
            next(step for _, step, mean in r["curve"] if mean >= fast_halfcheetah.GOAL)
            for r in found
            if r["goal_s"] is not None
        ]
        median = f"{np.median(steps):,.0f}" if steps else "–"
        rows.append([label, str(len(found)), shown or NOT_MEASURED, median])
    head = [f"HalfCheetah-v5 to a return of {fast_halfcheetah.GOAL:,.0f}", "seeds"]
    text = markdown([*head, "seconds, each seed", "env steps, median"], rows)
    if min(map(len, times.values())) >= 5:
        v = fast_halfcheetah.verdict(times[peers.OURS], times["sb3"])
        if v["ratio"] is not None:
            text += (
                f"\n\nMedians {v['median_s']:,.0f} s against {v['reference_s']:,.0f} s: "
                f"{v['ratio']:.2f} of the time."
            )
    else:
        text += "\n\nFewer than five seeds on a side are shown, not judged."
    return text + measured_on(cells)


def go1_race(results: Path) -> str:
    """The last evaluation of Go1's PPO and FastSAC, every seed."""
    cells = load("go1_learners", results)
    rows = []
    for algo, label in (("ppo", "PPO"), ("fast_sac", "FastSAC")):
        found = [c["result"] for n, c in cells.items() if n.startswith(f"{algo}-s")]
        if not found:
            rows.append([label, "0", NOT_MEASURED, "", "", "", ""])
            continue
        last = [r["curve"][-1] for r in found]
        each = lambda key, form, last=last: ", ".join(form.format(x[key]) for x in last)  # noqa: E731
        rows.append(
            [
                label,
                str(len(found)),
                f"{last[0]['env_steps'] / 1e6:.1f} M",
                ", ".join(f"{r['whole_s']:.0f}" for r in found),
                each("episode_return", "{:.1f}"),
                each("error_lin_vel_x", "{:.3f}"),
                each("terminated_rate", "{:.1%}"),
            ]
        )
    head = ["Go1, each seed", "seeds", "env steps", "training [s]", "return of an episode"]
    return markdown([*head, "forward error [m/s]", "episodes with a fall"], rows) + measured_on(
        cells
    )


def blind_pendulum(results: Path) -> str:
    """Return of the learners with and without memory where the speed is hidden, every seed."""
    cells = load("memory", results)
    names = {
        "recurrent_ppo": "ctrl-rl, recurrent PPO",
        "ppo": "ctrl-rl, PPO (no memory)",
        "sb3-contrib": "sb3-contrib, RecurrentPPO",
    }
    rows = []
    for learner, label in names.items():
        found = [c["result"] for n, c in cells.items() if n.startswith(f"{learner}-s")]
        shown = ", ".join(f"{r['return']:,.0f}" for r in found) or NOT_MEASURED
        wall = f"{np.median([r['train_wall_s'] for r in found]):.0f} s" if found else ""
        rows.append([label, str(len(found)), shown, wall])
    steps = memory.SETTINGS["total_steps"]
    head = [f"Pendulum without its speed, {steps / 1e3:.0f} k env steps", "seeds"]
    text = markdown([*head, "return of an episode, each seed", "training, median"], rows)
    return text + measured_on(cells)


def evaluators(results: Path) -> str:
    """Rank correlation of each evaluator's estimates with the truth, each seed."""
    cells = load("ope", results)
    found: dict[tuple[str, str], list[dict]] = {}
    for name, cell in cells.items():
        for evaluator, judged in cell["result"].items():
            found.setdefault((name.partition("-")[0], evaluator), []).append(judged)
    rows = []
    for (study, evaluator), judged in found.items():
        off = [np.subtract(j["estimates"], j["truth"]) / np.ptp(j["truth"]) for j in judged]
        seeds = ", ".join(f"{j['spearman']:.2f}" for j in judged)
        error = f"{np.sqrt(np.mean(np.square(off))):.2g}"
        rows.append([study, evaluator, seeds, error])
    rows = rows or [["every study", "", NOT_MEASURED, ""]]
    head = ["five policies in", "evaluator", "Spearman's correlation, each seed"]
    return markdown([*head, "error, in ranges of the truth"], rows) + measured_on(cells)


def offline_scores(names: Sequence[str], results: Path) -> str:
    """Last score of offline learners on data of our own, every seed, and the verdicts on BC.

    Args:
        names: of the learners, as those of cells of `benchmarks.offline_quality` end.
        results: parent of the folders.
    """
    cells, rows, used = load("offline_quality", results), [], {}
    lasts: dict[tuple[str, str], list[float]] = {}
    for cell in offline_quality.CELLS:
        dataset = cell.config["dataset"]
        name = cell.name.removeprefix(f"{dataset}-")
        if name not in names:
            continue
        updates = f"{cell.config['settings']['total-steps']:,}"
        label = [dataset, cell.config["algo"], updates]
        if cell.name not in cells:
            rows.append([*label, NOT_MEASURED, ""])
            continue
        used[cell.name] = cells[cell.name]
        found = lasts[dataset, name] = cells[cell.name]["result"]["last"]
        shown = ", ".join(f"{x:.1f}" for x in found)
        rows.append([*label, f"{np.mean(found):.1f} ± {np.std(found):.1f}", shown])
    head = ["data of our own", "learner", "updates", "last score", "each seed"]
    lines = []
    for (dataset, name), scores in lasts.items():
        if name == "bc" or (dataset, "bc") not in lasts or name not in offline_quality.JUDGED:
            continue
        iqm, iqm_bc, difference = offline_quality.better(scores, lasts[dataset, "bc"])
        low, high = difference.ci95 or (-np.inf, np.inf)
        said = "better" if low > 0 else "worse" if high < 0 else "undecided"
        lines.append(
            f"- {name} on {dataset}: interquartile mean {iqm:.1f}, BC {iqm_bc:.1f}, difference "
            f"{difference.value:+.1f}, 95 % interval {low:+.1f} to {high:+.1f}: {said}"
        )
    verdicts = "\n\n" + "\n".join(lines) if lines else ""
    return markdown(head, rows) + verdicts + measured_on(used)


def adamo(results: Path) -> str:
    """The largest |Q| of each seed after training by Adam, AdamO and AdamO without its budget."""
    cells = load("adamo", results)
    titles = {
        "toy": "128 transitions",
        "hopper": "TD3 on hopper, 21,560 transitions",
        "door": "TD3 on door, 6,704 transitions",
    }
    optimizers = {
        "adam": "Adam",
        "default": "AdamO",
        "none": "AdamO, no budget",
        "strict": "AdamO, strict budget",
        "cloning": "Adam, alpha 2.5",
    }
    rows = []
    for cell in adamo_cells.CELLS:
        problem, _, name = cell.name.partition("-")
        label = [titles[problem], optimizers[name]]
        if cell.name not in cells:
            rows.append([*label, NOT_MEASURED, "", "", ""])
            continue
        r = cells[cell.name]["result"]
        shown = ["no number" if q is None else f"{q:.3g}" for q in r["q_max"]]
        bound = r.get("bound", adamo_cells.TOY_BOUND)
        inside = sum(q is not None and q <= bound for q in r["q_max"])
        warned = [x for x in r.get("flagged", []) if x is not None]
        first = f"{len(warned)} of {len(shown)}" if "flagged" in r else "–"
        first += f", from {min(warned):,}" if warned else ""
        rows.append([*label, ", ".join(shown), f"{bound:,.0f}", f"{inside} of {len(shown)}", first])
    head = ["critics", "optimizer", "largest \\|Q\\| at the end, each seed", "largest possible"]
    return markdown([*head, "seeds within", "warned about"], rows) + measured_on(cells)


def por_claims(results: Path) -> str:
    """What more data and a kept execute policy are worth to POR, every seed."""
    cells = load("por_claims", results)
    if not cells:
        return f"POR's further claims: {NOT_MEASURED}."
    names = {
        "more-data-por_good": "10 good episodes: POR",
        "more-data-bc_good": "10 good episodes: BC",
        "more-data-por_all": "10 good and 300 random episodes: POR",
        "more-data-bc_all": "10 good and 300 random episodes: BC",
        "more-data-guide_good": "value and guide from the 10, execute policy from all",
        "new-task-old_policy": "another goal: the old policy",
        "new-task-from_nothing": "another goal: POR from 30 new episodes",
        "new-task-new_guide": "another goal: value and guide from them, execute policy kept",
    }
    rows = []
    for name, title in names.items():
        if name not in cells:
            rows.append([title, NOT_MEASURED, "", ""])
            continue
        found = cells[name]["result"]
        seeds = ", ".join(f"{x:.1f}" for x in found["lost"])
        rows.append([title, f"{found['mean']:.1f}", seeds, f"{found['known']:.1f}"])
    head = ["Sum of distances", "mean", "each seed", "best known"]
    return markdown(head, rows) + measured_on(cells)


TABLES: dict[str, Callable[[Path], str]] = {
    "go1_walk": go1_walk,
    "cartpole": cartpole,
    "hindsight": hindsight,
    "ope": evaluators,
    "memory": blind_pendulum,
    "fast_halfcheetah": fast_returns,
    "go1_learners": go1_race,
    "adamo": adamo,
    "por_claims": por_claims,
    "aro_ddpg": aro_ddpg,
    "metadiffuser": meta,
    "gpu": gpu,
    "ppo_speed": ppo_speed,
    "ppo_halfcheetah": halfcheetah,
    "ppo_loop": ppo_loop,
    "sac_speed": sac_updates,
    "offline_speed": offline_updates,
    "offline_quality": partial(offline_scores, (*offline_quality.JUDGED, *offline_quality.SHOWN)),
    "offline_bc": partial(offline_scores, ("bc", "bc-best-tenth")),
    "offline_adamo": partial(offline_scores, ("td3_bc", "td3_bc-adamo")),
    **{
        f"offline_{name}": partial(offline_scores, ("bc", name))
        for name in (*("td3_bc", "iql", "por", "cql", "awac"), *("rebrac", "edac"))
    },
    "offline_decision_transformer": partial(
        offline_scores, ("bc", "bc-best-tenth", "decision_transformer")
    ),
    "ppo_returns": partial(returns, "ppo"),
    "sac_returns": partial(returns, "sac"),
    "td3_returns": partial(returns, "td3"),
    "latency": latency,
    "env_speed": env_speed,
    "install": install,
}
"""Name of a table -> its builder."""


if __name__ == "__main__":
    sys.exit(main())

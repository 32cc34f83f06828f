"""Prove an exported policy in plain single-robot MuJoCo, through the robot's own runtime."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from sim2real.thresholds import Procedure, Thresholds


@dataclass(frozen=True, kw_only=True)
class Verify:
    """What to verify and what it must reach; exit status 1 if it does not."""

    policy: Annotated[Path, tyro.conf.Positional]
    """`policy.onnx`, or a run folder that holds one."""
    limits: Annotated[Thresholds, tyro.conf.arg(name="")] = field(default_factory=Thresholds)
    procedure: Annotated[Procedure, tyro.conf.arg(name="")] = field(default_factory=Procedure)


def main(args: Verify) -> dict:
    """Run every check and print each figure with its limit."""
    import torch

    torch.set_num_threads(1)
    from ctrl_rl.report import refresh
    from sim2real.verify import verify

    report = verify(args.policy, args.limits, args.procedure, say=print)
    print(report)
    found = {
        "task": report.task,
        "config": {
            "policy": str(args.policy),
            **dataclasses.asdict(args.limits),
            **dataclasses.asdict(args.procedure),
        },
        "metrics": {
            name: {"mean": m.mean, "ci95": m.ci95 and list(m.ci95), "n": m.n, "unit": m.unit}
            for name, m in report.metrics.items()
        },
        "checks": {
            c.name: {"value": c.value, "limit": c.limit, "unit": c.unit, "passed": c.passed}
            for c in report.checks
        },
        "notes": report.notes,
        "wall_s": report.wall_s,
        "passed": report.passed,
    }
    folder = args.policy if args.policy.is_dir() else args.policy.parent
    if page := refresh(folder, found):
        print(f"report: {page}")
    return found

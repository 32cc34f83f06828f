"""Write a run's policy as one file for the robot, `policy.onnx`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True, kw_only=True)
class Export:
    """What to export and where to."""

    run: Annotated[Path, tyro.conf.Positional]
    """A run folder, or a checkpoint `.pt`."""
    checkpoint: str | None = None
    """Of a run folder: "last", "best" or a step number; None for best, or last without one."""
    out: Path | None = None
    """The file to write; None for policy.onnx in the run folder. Its card goes beside it as
    .json."""


def main(args: Export) -> dict:
    """Export, having proven that the file answers as the policy does."""
    import torch

    torch.set_num_threads(1)
    from ctrl_rl.report import refresh
    from sim2real.export import export_run

    out, card = export_run(args.run, args.checkpoint, args.out)
    size = out.stat().st_size / 1e3
    print(
        f"{out}: {card.spec.task}, {card.train_steps:,} training steps, {size:.0f} kB; "
        f"card {out.with_suffix('.json').name}"
    )
    if page := refresh(out.parent):
        print(f"report: {page}")
    return {"task": card.spec.task, "file": str(out), "train_steps": card.train_steps}

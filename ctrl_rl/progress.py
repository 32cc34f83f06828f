"""How far training is: a bar on a terminal, otherwise a line every few seconds."""

import math
import time


class Progress:
    """A progress bar on a terminal, otherwise a plain line every few seconds."""

    PLAIN_EVERY = 5.0  # [s]
    SHOWN = (  # key, label, format
        ("eval/episode_return", "eval return", ".2f"),
        ("rollout/episode_return", "return", ".2f"),
        ("rollout/episode_length", "length", ".0f"),
        ("policy/kl", "kl", ".4f"),
    )

    def __init__(self) -> None:
        from rich.console import Console

        self.console = Console()
        self.bar = None

    def start(self, total: int, step: int) -> None:
        """Begin to count at `step`."""
        self.total, self.first, self.began = total, step, time.monotonic()
        self.shown_at, self.last_row, self.seen = -math.inf, None, {}
        if self.console.is_terminal:
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )

            self.bar = Progress(
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(compact=True),
                TextColumn("{task.fields[figures]}"),
                console=self.console,
                auto_refresh=False,
            )
            self.task = self.bar.add_task("train", total=total, completed=step, rate="", figures="")
            self.bar.start()

    def show(self, step: int, row: dict[str, float]) -> None:
        """The state of training, at most twice a second (bar) or every few seconds (lines)."""
        self.seen.update(row)
        now = time.monotonic()
        pause = 0.5 if self.bar else self.PLAIN_EVERY
        last = step >= self.total and row is not self.last_row
        if now - self.shown_at < pause and not last:
            return
        self.shown_at, self.last_row = now, row
        rate = (step - self.first) / max(now - self.began, 1e-9)
        figures = "  ".join(
            f"{label} {self.seen[key]:{form}}"
            for key, label, form in self.SHOWN
            if key in self.seen
        )
        if self.bar:
            self.bar.update(self.task, completed=step, rate=f"{rate:,.0f}/s", figures=figures)
            self.bar.refresh()
        else:
            left = (self.total - step) / max(rate, 1e-9)
            self.say(
                f"{step:>12,} / {self.total:,}  {rate:,.0f} steps/s  "
                f"left {max(left, 0) // 60:.0f}:{max(left, 0) % 60:02.0f}  {figures}"
            )

    def say(self, line: str) -> None:
        """One line, above the bar."""
        if self.bar:
            self.console.print(line, highlight=False, markup=False)
        else:
            print(line, flush=True)

    def stop(self) -> None:
        """Leave the terminal as it was."""
        if self.bar:
            self.bar.stop()
            self.bar = None

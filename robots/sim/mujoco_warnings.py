"""MuJoCo's warnings: counted, said once per kind, and no MUJOCO_LOG.TXT in the user's folder."""

import collections
import logging
import re

import mujoco

OTHERS = ("settotalmass",)
"""Words of warnings about gymnasium's model files, which nobody but gymnasium can heed."""

counts: collections.Counter[str] = collections.Counter()
"""Warnings of this process by kind, that is their text without the numbers."""


def install() -> None:
    """Send MuJoCo's warnings here instead of to stderr and a log file."""
    mujoco.set_mju_user_warning(_count)


def _count(message: str) -> None:
    kind = re.sub(r"\d[\d.e+-]*", "#", message)
    counts[kind] += 1
    if counts[kind] == 1 and not any(word in message for word in OTHERS):
        logging.getLogger(__name__).warning("MuJoCo: %s (said once)", message)

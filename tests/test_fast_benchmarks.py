"""The verdict and the picture of FastSAC's benchmarks, from small results."""

import json

import pytest

from benchmarks.fast_halfcheetah import verdict
from benchmarks.go1_learners import draw


def test_verdict_is_by_medians_and_a_seed_that_never_got_there_is_slow():
    found = verdict([100.0, 120.0, None, 90.0, 110.0], [300.0, 400.0, 360.0, None, 330.0])
    assert found["median_s"] == 110.0 and found["reference_s"] == 360.0
    assert found["ratio"] == pytest.approx(110 / 360) and found["passed"]
    assert not verdict([121.0], [360.0])["passed"]
    never = verdict([None, None, 10.0], [300.0] * 3)
    assert never == {"median_s": None, "reference_s": 300.0, "ratio": None, "passed": False}
    assert verdict([100.0], [None])["passed"]


def test_picture_of_both_learners(tmp_path):
    for algo, pace in (("ppo", 2.0), ("fast_sac", 1.0)):
        for seed in range(2):
            curve = [
                {"env_steps": k * 100, "seconds": k * pace, "episode_return": k + seed,
                 "error_lin_vel_x": 1 / (k + 1), "terminated_rate": 0.0}
                for k in range(5)
            ]  # fmt: skip
            path = tmp_path / "go1_learners" / f"{algo}-s{seed}.json"
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps({"config": {"algo": algo}, "result": {"curve": curve}}))
    path = draw(tmp_path / "picture.png", tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no cell"):
        draw(tmp_path / "none.png", tmp_path / "empty")

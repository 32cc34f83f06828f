"""Result files: whole, of one version, each cell once."""

import dataclasses
import json
from pathlib import Path

import pytest
from offline_results import result, write_seeds

from offline.results import load, path_of, read, write


def test_a_result_comes_back_as_it_was():
    kept = result(variant={"optimizer": "adamo"}, config={"hidden": [256, 256]}, seed=3)
    path = write(kept, Path("x"))
    assert path == Path("x/results/hopper-medium-v2/td3_bc_optimizer=adamo/s3.json")
    assert path == path_of(Path("x"), kept.dataset, kept.label, 3)
    assert read(path) == kept
    assert json.loads(path.read_text())["schema"] == 1
    assert (kept.label, kept.score("last"), kept.score("best")) == (
        "td3_bc optimizer=adamo",
        60.0,
        61.0,
    )


def test_all_results_are_found_by_data_set_and_algorithm_in_order_of_seeds():
    write_seeds(Path("x"), [5.0, 6.0], first=9)
    write_seeds(Path("x"), [4.0], first=10, algo="iql")
    write_seeds(Path("x"), [7.0], first=11)
    write_seeds(Path("x"), [8.0], variant={"alpha": "1"})
    found = load(Path("x"))
    assert {key: [r.seed for r in results] for key, results in found.items()} == {
        ("hopper-medium-v2", "td3_bc"): [9, 10, 11],
        ("hopper-medium-v2", "td3_bc alpha=1"): [0],
        ("hopper-medium-v2", "iql"): [10],
    }
    # Written again, a cell is still one cell.
    write_seeds(Path("x"), [9.0], first=11)
    assert [r.last for r in load(Path("x"))["hopper-medium-v2", "td3_bc"]] == [5.0, 6.0, 9.0]


DAMAGED = {
    "[]": "is not the result of a benchmark",
    "{": "is not the result of a benchmark",
    '{"schema": 2}': "has schema 2, this version reads 1",
    '{"schema": 1}': "it holds no dataset",
    "last=61.0": "last is 61.0, the curve's is 60.0",
    "best=99.0": "best is 99.0, the curve's is 61.0",
    "seed='0'": r"it holds no seed \(int\)",
    "comparable=1": r"it holds no comparable \(bool\)",
    "steps=999": "the curve ends at update 1,000,000, steps says 999",
    "curve=[]": "there is no evaluation",
    "curve=[[1, 2]]": r"evaluation 0 is not \[updates, return, score\]",
    "curve=[[5, 2, 1.0], [5, 2, 60.0]]": "evaluation 1 is at update 5, after 5",
    "curve=[[1000000, 60.0, None]]": "evaluation 0 has the score None",
    "curve=[[1000000, 60.0, float('inf')]]": "evaluation 0 has the score inf",
    "extra=1": "holds extra, which this version does not know",
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_named_with_its_key(damage):
    path = write(result(), Path("x"))
    if damage[0] in "[{":
        path.write_text(damage)
    else:
        name, _, value = damage.partition("=")
        path.write_text(json.dumps(json.loads(path.read_text()) | {name: eval(value)}))
    with pytest.raises(ValueError, match=DAMAGED[damage]) as error:
        load(Path("x"))
    assert str(path) in str(error.value)


def test_results_that_are_no_seeds_of_one_experiment_are_not_averaged():
    write_seeds(Path("x"), [1.0])
    write_seeds(Path("x"), [1.0], first=1, steps=500)
    with pytest.raises(ValueError, match="s1.json has steps 500, s0.json beside it 1000000"):
        load(Path("x"))
    write_seeds(Path("y"), [1.0])
    write_seeds(Path("y"), [1.0], first=1, env="Hopper-v5")
    with pytest.raises(ValueError, match="s1.json has env 'Hopper-v5'"):
        load(Path("y"))
    write_seeds(Path("z"), [1.0])
    write_seeds(Path("z"), [1.0], first=1, data={"origin": "D4RL", "sha256": "1" * 64})
    with pytest.raises(ValueError, match="s1.json has data checksum '1111"):
        load(Path("z"))


def test_nothing_counts_twice():
    path = write(result(), Path("x"))
    copy = path.with_name("s1.json")
    copy.write_text(path.read_text())
    with pytest.raises(ValueError, match="s1.json and .*s0.json are the same cell"):
        load(Path("x"))


def test_a_folder_without_results_is_said_to_be_one():
    with pytest.raises(ValueError, match="nowhere holds no results of ctrl-rl offline bench"):
        load(Path("nowhere"))


def test_a_result_that_is_none_cannot_be_made():
    with pytest.raises(ValueError, match="last is 5.0, the curve's is 60.0"):
        dataclasses.replace(result(), last=5.0)

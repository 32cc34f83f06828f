"""Published figures: the suite averages that their sources print, and none that is unconfirmed."""

import dataclasses
import typing
from importlib import import_module

import numpy as np
import pytest

from ctrl_rl.registry import NotFound
from offline import published, registry
from offline.commands.train import OfflineFlags
from offline.datasets import d4rl_table
from offline.published import find, source_settings, stem_of, table, tables

ALGOS = "BC,10% BC,TD3+BC,AWAC,CQL,IQL,ReBRAC,SAC-N,EDAC,DT".split(",")

PRINTED = {  # the "average" lines of the CORL README at eeeeef2, in the order of ALGOS
    ("corl-gym", "last"): "50.40 69.29 76.45 79.39 78.28 81.63 89.74 83.52 92.92 73.84",
    ("corl-maze2d", "last"): "1.13 12.58 61.99 121.92 33.65 46.23 96.77 141.32 82.64 28.48",
    ("corl-antmaze", "last"): "17.21 19.71 19.33 18.58 50.71 57.17 78.42 0.00 0.00 18.12",
    ("corl-adroit", "last"): "48.18 42.69 10.40 55.71 1.53 53.43 59.39 12.43 18.78 49.21",
    ("corl-gym", "best"): "70.15 80.65 84.83 87.80 84.68 86.28 93.00 95.60 96.36 77.49",
    ("corl-maze2d", "best"): "18.67 30.65 149.30 172.33 126.07 111.95 169.98 151.48 162.27 60.74",
    ("corl-antmaze", "best"): "23.96 30.58 30.08 31.42 61.83 72.00 86.71 0.00 7.08 21.04",
    ("corl-adroit", "best"): "58.92 54.58 20.51 67.69 13.65 62.62 69.71 27.49 33.88 52.60",
}

ROUNDING = 0.0101
"""Figures and averages are printed to 0.01, and averages were taken before rounding."""

TO_ONLINE = {  # the same of its offline-to-online table: AWAC, CQL, IQL, SPOT, Cal-QL, ReBRAC
    "corl-pretrain-antmaze": "18.12 48.38 56.29 52.88 53.04 80.00",
    "corl-finetune-antmaze": "16.46 95.58 78.50 92.38 97.33 78.88",
    "corl-pretrain-adroit": "22.84 -0.72 21.69 2.43 -0.76 20.33",
    "corl-finetune-adroit": "21.76 0.22 44.99 11.81 -0.79 93.04",
}


def averages(name: str, report: str, algos: list[str]) -> list[float]:
    return [
        np.mean([c.mean for c in table(name) if (c.algo, c.report) == (algo, report)])
        for algo in algos
    ]


@pytest.mark.parametrize(("name", "report"), PRINTED)
def test_the_printed_suite_averages_follow_from_the_figures(name, report):
    printed = [float(number) for number in PRINTED[name, report].split()]
    np.testing.assert_allclose(averages(name, report, ALGOS), printed, atol=ROUNDING)
    per_algo = {"corl-gym": 9, "corl-maze2d": 3, "corl-antmaze": 6, "corl-adroit": 12}[name]
    assert len([c for c in table(name) if c.report == report]) == 10 * per_algo


@pytest.mark.parametrize("name", TO_ONLINE)
def test_averages_before_and_after_online_training(name):
    algos = "AWAC,CQL,IQL,SPOT,Cal-QL,ReBRAC".split(",")
    printed = [float(number) for number in TO_ONLINE[name].split()]
    np.testing.assert_allclose(averages(name, "last", algos), printed, atol=ROUNDING)


def test_every_figure_has_its_source_and_what_it_was_made_with():
    for name, cells in tables().items():
        for cell in cells:
            assert "arXiv:" in cell.source and np.isfinite(cell.mean)
            assert cell.std is None or cell.std >= 0
            if name.startswith("corl"):
                assert cell.seeds == 4 and cell.std is not None
    steps = {c.algo: c.steps for c in table("corl-gym")}
    assert steps.pop("DT") == 100_000 and steps.pop("EDAC") == steps.pop("SAC-N") == 3_000_000
    assert set(steps.values()) == {1_000_000}


def test_only_confirmed_results_of_por_are_there():
    found = {c.dataset: c.mean for c in table("por")}
    assert found == {
        "halfcheetah-medium-v2": 48.8,
        "hopper-medium-v2": 98.2,
        "walker2d-medium-v2": 81.1,
        "hopper-medium-replay-v2": 98.9,
        "walker2d-medium-replay-v2": 76.6,
        "walker2d-medium-expert-v2": 109.1,
    }
    assert {(c.std, c.seeds, c.report) for c in table("por")} == {(None, None, None)}
    (hopper,) = [c for c in table("por") if c.dataset == "hopper-medium-v2"]
    assert "78.6" in hopper.note


def test_figures_are_found_by_our_names():
    (corl, repo) = find("hopper-medium-v2", "td3_bc", "last")
    assert (corl.table, corl.mean, corl.std) == ("corl-gym", 60.37, 3.49)
    assert (repo.table, repo.mean, repo.report) == ("diffuser-gym", 59.3, None)
    assert find("hopper-medium-v2", "td3_bc", "best")[0].mean == 70.44
    # A set of one's own stands beside the one it is named after, never beside another.
    assert find("hopper-medium", "td3_bc", "last") == [corl, repo]
    assert find("hopper-medium-replay", "td3_bc", "last")[0].mean == 64.42
    assert find("hopper", "td3_bc", "last") == []
    assert find("hopper-medium-v2", "bc top_fraction=0.1", "last")[0].mean == 55.48
    # Other settings are another algorithm, and online training another protocol.
    assert find("hopper-medium-v2", "td3_bc optimizer=adamo", "last") == []
    tables_of = {c.table for c in find("antmaze-umaze-v2", "iql", "last")}
    assert tables_of == {"corl-antmaze", "corl-pretrain-antmaze"}
    assert stem_of("antmaze-umaze-diverse-v2") == "antmaze-umaze-diverse"
    printed = {c.algo for cells in tables().values() for c in cells}
    assert set(published.NAMES.values()) <= printed
    assert {name.split()[0] for name in published.NAMES} <= set(registry.ALGOS)


NOT_OURS = {
    "critic_learning_rate",  # of ReBRAC, whose networks have one step size here
    *("cql_clip_diff_min", "cql_max_target_backup", "layers of the critics"),
    *("clip_grad", "dropout", "weight_decay"),  # of the Decision Transformer
}


def test_every_cell_of_corl_has_settings_and_no_other_table_has():
    """O-22 and others: what the source ran, which need not be our presets."""
    for name, cells in tables().items():
        known = name in ("corl-gym", "corl-maze2d", "corl-antmaze", "corl-adroit")
        for cell in cells:
            assert (source_settings(cell) is not None) == known, (name, cell.algo)
    ours = {printed: name.split()[0] for name, printed in published.NAMES.items()}
    for printed, groups in published._settings()["settings"].items():
        train = import_module(f"offline.{ours[printed]}").train
        kinds = OfflineFlags, typing.get_type_hints(train)["config"]
        fields = {field.name for kind in kinds for field in dataclasses.fields(kind)}
        assert {name for group in groups.values() for name in group} - fields <= NOT_OURS
        ids = {cell.dataset for cells in tables().values() for cell in cells}
        groups_known = {"all"} | ids | {name.partition("-")[0] for name in ids}
        groups_known |= {entry.family for entry in d4rl_table().values()}
        assert set(groups) <= groups_known


@pytest.mark.parametrize(
    ("algo", "dataset", "expected"),
    [  # read in CORL's configurations by hand
        ("IQL", "hopper-medium-replay-v2", {"normalize_obs": True, "reward": "locomotion",
                                            "deterministic": True, "polyak": 0.001}),
        ("IQL", "pen-human-v1", {"normalize_obs": True, "expectile": 0.8, "dropout": 0.1}),
        ("AWAC", "pen-human-v1", {"normalize_obs": True, "inverse_temperature": 10.0}),
        ("EDAC", "pen-human-v1", {"critics": 20, "diversity": 1000.0}),
        ("ReBRAC", "pen-human-v1", {"learning_rate": 3e-4, "batch_size": 256,
                                    "actor_penalty": 0.1, "critic_penalty": 0.5}),
        ("SAC-N", "hopper-medium-v2", {"critics": 500, "diversity": 0.0}),
        ("TD3+BC", "door-cloned-v1", {"normalize_obs": True}),
    ],
)  # fmt: skip
def test_settings_of_a_source(algo, dataset, expected):
    cells = [c for cells in tables().values() for c in cells]
    found = [source_settings(c) for c in cells if (c.algo, c.dataset) == (algo, dataset)]
    assert expected in found


def test_an_unknown_table_is_named_with_the_nearest():
    with pytest.raises(NotFound, match="unknown table 'corl-gim'; did you mean 'corl-gym'"):
        table("corl-gim")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("t,d,a,last,high,,,,s,", "x.csv, line 2: could not convert string to float: 'high'"),
        ("t,d,a,last,1,,four,,s,", "line 2: invalid literal"),
        ("t,d,a,final,1,,4,,s,", "report is last, best or empty, not 'final'"),
        ("t,d,a,last,1,,4,,s,\nt,d,a,last,2,,4,,s,", "line 3: t d a last stands there twice"),
    ],
)
def test_a_broken_file_is_refused_with_its_line(row, message):
    header = ",".join(published.COLUMNS)
    with pytest.raises(ValueError, match=message):
        published._read("x.csv", f"{header}\n{row}\n")
    with pytest.raises(ValueError, match="must have the columns table, dataset"):
        published._read("x.csv", f"dataset,{header}\n")

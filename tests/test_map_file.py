"""Map files: what is written comes back, and what is wrong in one is named.

Time budget: 5 s.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from autoprec.action import Action
from autoprec.controller import MapController
from autoprec.formats import FORMATS
from autoprec.map_file import load_map, save_map

positive = st.floats(0.0, exclude_min=True)


@given(
    precision=st.dictionaries(st.text(), st.sampled_from(list(FORMATS)), max_size=4),
    loss_scale=st.none() | positive.filter(math.isfinite),
    clip=st.none() | positive,
)
def test_map_round_trip(
    precision: dict[str, str],
    loss_scale: float | None,
    clip: float | None,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("map") / "map.yaml"
    save_map(path, precision, loss_scale, clip)
    assert load_map(path) == Action(precision=precision, loss_scale=loss_scale, clip=clip)


def test_map_is_yaml_that_people_can_read(tmp_path: Path) -> None:
    path = tmp_path / "made" / "map.yaml"
    save_map(path, {"net.2": "bf16", "0": "fp32"}, loss_scale=2048.0, clip=math.inf)
    text = path.read_text(encoding="utf-8")
    assert text == "version: 1\nprecision:\n  net.2: bf16\n  '0': fp32\nloss_scale: 2048.0\nclip: .inf\n"


def test_map_written_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "map.yaml"
    path.write_text("version: 1\nprecision: {'*': bf16}\nloss_scale: 1024\n", encoding="utf-8")
    assert load_map(path) == Action(precision={"*": "bf16"}, loss_scale=1024.0)


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({"version": 1}, "precision"),
        ({"precision": {}}, "version"),
        ({"version": 2, "precision": {}}, "version"),
        ({"version": 1, "precision": ["bf16"]}, "precision"),
        ({"version": 1, "precision": {"net.0": "bf61"}}, "precision"),
        ({"version": 1, "precision": {"net.0": 16}}, "precision.net.0"),
        ({"version": 1, "precision": {0: "bf16"}}, "precision.0.[key]"),
        ({"version": 1, "precision": {}, "loss_scale": 0}, "loss_scale"),
        ({"version": 1, "precision": {}, "loss_scale": math.inf}, "loss_scale"),
        ({"version": 1, "precision": {}, "loss_scale": True}, "loss_scale"),
        ({"version": 1, "precision": {}, "clip": -1.0}, "clip"),
        ({"version": 1, "precision": {}, "clip": math.nan}, "clip"),
        ({"version": 1, "precision": {}, "batch": 8}, "batch"),
        ("bf16", "document"),
        (None, "document"),
    ],
)
def test_bad_map_names_file_and_field(document: object, field: str, tmp_path: Path) -> None:
    path = tmp_path / "map.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(f"Passed the map {str(path)!r}. A map has the fields")) as info:
        MapController(path)
    assert f" Field {field!r}: " in str(info.value)


def test_map_that_is_not_yaml(tmp_path: Path) -> None:
    path = tmp_path / "map.yaml"
    path.write_text("version: [1", encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(f"Passed the map {str(path)!r}. The file is not YAML:")):
        load_map(path)


def test_bad_map_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "map.yaml"
    with pytest.raises(ValueError, match=r"Passed `save_map\(.*Field 'clip':"):
        save_map(path, {}, clip=0.0)
    assert not path.exists()

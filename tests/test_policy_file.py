"""The files of a policy: what is written is read back exactly, and nothing else is taken for a policy (case E-04).

Time budget: 20 s (two processes).
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from pydantic import ValidationError

from autoprec.encoding import FEATURES, VERSION
from autoprec.policies.network import PolicyNetwork
from autoprec.policies.policy_file import (
    CARD_FILE,
    FILE_VERSION,
    MAX_CARD_BYTES,
    MAX_WEIGHTS_BYTES,
    WEIGHTS_FILE,
    PolicyCard,
    card_for,
    load_policy,
    save_policy,
)
from tests.policy_networks import restless_network, rows, saved

ROOT = Path(__file__).resolve().parents[1]
IN_A_NEW_PROCESS = """
import sys
import numpy as np
import torch
from autoprec.policies.policy_file import load_policy
network, card = load_policy(sys.argv[1])
observation = np.load(sys.argv[2])
np.savez(sys.argv[3], moves=network.moves(observation), logits=network(torch.from_numpy(observation)).detach().numpy())
"""


def card_of(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / CARD_FILE).read_text())
    return document


def edit_card(folder: Path, **fields: Any) -> None:
    (folder / CARD_FILE).write_text(json.dumps({**card_of(folder), **fields}))


def write_weights(folder: Path, state: dict[str, torch.Tensor]) -> None:
    """Puts other weights there, with a card that says they belong to it."""
    content = safetensors.torch.save(state)
    (folder / WEIGHTS_FILE).write_bytes(content)
    edit_card(folder, weights_sha256=hashlib.sha256(content).hexdigest())


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    network = restless_network(seed=4, hidden=(12, 7))
    network.set_normalisation(torch.from_numpy(rows(40)))
    network.set_training_range(torch.full((len(FEATURES),), -1.0), torch.full((len(FEATURES),), 1.5))
    card = card_for(network, {"name": "seed 4", "table": {"threshold": 0.2}, "training": {"steps": 3, "banks": ["a"]}})
    save_policy(tmp_path / "new" / "folder", network, card)
    found, found_card = load_policy(str(tmp_path / "new" / "folder"))
    assert found_card.model_copy(update={"weights_sha256": None}) == card
    assert found.card == found_card
    assert not found.training
    state = network.state_dict()
    assert list(found.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in found.state_dict().items())


def test_same_policy_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        saved(tmp_path / name)
    for file in (CARD_FILE, WEIGHTS_FILE):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert sorted(os.listdir(tmp_path / "a")) == [CARD_FILE, WEIGHTS_FILE]


@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_e04_a_new_process_decides_alike(tmp_path: Path, precision: str) -> None:
    network, observation = restless_network(), rows(50)
    network.set_normalisation(torch.from_numpy(rows(256, seed=1)))
    folder = saved(tmp_path / "policy", network)
    np.save(tmp_path / "rows.npy", observation)
    code = f"import torch; torch.set_float32_matmul_precision({precision!r})\n{IN_A_NEW_PROCESS}"
    arguments = [str(folder), str(tmp_path / "rows.npy"), str(tmp_path / "out.npz")]
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = np.load(tmp_path / "out.npz")
    assert (found["moves"] == network.moves(observation)).all()
    assert set(found["moves"].tolist()) == {-1, 0, 1}
    if precision == "highest":
        assert (found["logits"] == network(torch.from_numpy(observation)).detach().numpy()).all()


@pytest.mark.parametrize("where", ["inference-mode", "float64", "meta"])
def test_e07_loads_anywhere_alike(tmp_path: Path, where: str) -> None:
    folder, expected = saved(tmp_path), restless_network().moves(rows(50))
    torch.set_default_dtype(torch.float64 if where == "float64" else torch.float32)
    try:
        with torch.inference_mode(where == "inference-mode"), torch.device("meta" if where == "meta" else "cpu"):
            network, _ = load_policy(folder)
    finally:
        torch.set_default_dtype(torch.float32)
    assert (copy.deepcopy(network).moves(rows(50)) == expected).all()
    assert not any(value.is_inference() or value.is_meta for value in network.state_dict().values())
    network(torch.from_numpy(rows(3))).sum().backward()  # it may be trained further


# ---- the card ----


def test_a_card_is_frozen_and_says_nothing_unknown() -> None:
    card = PolicyCard()
    assert (card.file_version, card.encoding_version, card.features) == (FILE_VERSION, VERSION, FEATURES)
    with pytest.raises(ValidationError):
        card.name = "other"
    with pytest.raises(ValidationError):
        PolicyCard(colour="red")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"encoding_version": VERSION - 1}, f"observations of version {VERSION - 1}, this autoprec understands"),
        ({"encoding_version": VERSION + 1}, "Install a newer autoprec."),
        ({"file_version": 2}, "Its files have version 2, this autoprec understands version 1."),
        ({"file_version": "1"}, "Field 'file_version'"),
        ({"encoding_version": True}, "Field 'encoding_version'"),
        ({"encoding_version": 3.5}, "Field 'encoding_version'"),
        ({"extra": 1}, "Field 'extra': Extra inputs are not permitted"),
        ({"features": FEATURES[1:]}, f"without ['{FEATURES[0]}']"),
        ({"features": (*FEATURES, "mood")}, "with unknown ['mood']"),
        ({"features": FEATURES[::-1]}, "in another order"),
        ({"features": []}, "Field 'features'"),
        ({"features": "abc"}, "Field 'features'"),
        ({"hidden": [0]}, "Field 'hidden.0'"),
        ({"hidden": [10**9]}, "Field 'hidden.0'"),
        ({"hidden": [4] * 9}, "Field 'hidden'"),
        ({"hidden": [4, 4]}, "The tensor 'body.0.weight' has shape"),
        ({"hidden": [16]}, "that no policy has: ['body.2.bias', 'body.2.weight']"),
        ({"mode": "absolute"}, "Field 'mode'"),
        ({"name": ""}, "Field 'name'"),
        ({"name": "\ud800"}, "is not"),
        ({"table": {"threshold": math.nan}}, "NaN is no JSON number"),
        ({"weights_sha256": None}, "is not the file that"),
        ({"weights_sha256": "0" * 64}, "is not the file that"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_cards_that_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    edit_card(saved(tmp_path), **fields)
    with pytest.raises(ValueError, match=re.escape(f"Passed the policy {str(tmp_path)!r}. ")) as caught:
        load_policy(tmp_path)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("field", list(PolicyCard.model_fields))
def test_a_card_must_say_everything(tmp_path: Path, field: str) -> None:
    saved(tmp_path)
    document = card_of(tmp_path)
    del document[field]
    (tmp_path / CARD_FILE).write_text(json.dumps(document))
    with pytest.raises(ValueError, match=f"lacks the fields \\['{field}'\\]"):
        load_policy(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b"1" * 10_000, b'{"a": Infinity}'], ids=range(8)
)
def test_cards_that_are_none(tmp_path: Path, content: bytes) -> None:
    (saved(tmp_path) / CARD_FILE).write_bytes(content)
    with pytest.raises(ValueError, match="Passed the policy"):
        load_policy(tmp_path)


# ---- the weights ----


Change = Callable[[dict[str, torch.Tensor]], object]


def without(name: str) -> Change:
    return lambda state: state.pop(name)


def filled(name: str, value: float) -> Change:
    return lambda state: state[name].view(-1)[-1:].fill_(value)


def replaced(name: str, value: torch.Tensor) -> Change:
    return lambda state: state.update({name: value})


COLUMNS = len(FEATURES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("mean"), "missing: ['mean']"),
        (without("std"), "missing: ['std']"),
        (without("low"), "missing: ['low']"),
        (without("head.bias"), "missing: ['head.bias']"),
        (replaced("more", torch.zeros(2)), "that no policy has: ['more']"),
        (replaced("std", torch.zeros(COLUMNS - 1)), f"'std' has shape [{COLUMNS - 1}]"),
        (replaced("mean", torch.zeros(COLUMNS, dtype=torch.float64)), "'mean' is of dtype F64"),
        (replaced("mean", torch.zeros(COLUMNS, dtype=torch.float8_e4m3fn)), "'mean' is of dtype F8_E4M3"),
        (filled("head.weight", math.nan), "'head.weight' holds a number that is not finite"),
        (filled("high", math.inf), "'high' holds a number that is not finite"),
        (filled("low", 11.0), "Its training range is empty"),
        (filled("std", -1.0), "a spread is negative"),
    ],
    ids=range(12),
)
def test_weights_that_are_refused(tmp_path: Path, change: Change, message: str) -> None:
    network = restless_network()
    state = network.state_dict()
    saved(tmp_path, network)
    change(state)
    write_weights(tmp_path, state)
    with pytest.raises(ValueError, match=re.escape(message)):
        load_policy(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff" * 64, b"\x10" + b"\0" * 7 + b"{" * 16], ids=range(4))
def test_weights_that_are_none(tmp_path: Path, content: bytes) -> None:
    (saved(tmp_path) / WEIGHTS_FILE).write_bytes(content)
    edit_card(tmp_path, weights_sha256=hashlib.sha256(content).hexdigest())
    with pytest.raises(ValueError, match="is not a file of safetensors"):
        load_policy(tmp_path)


def test_no_pickle_is_read(tmp_path: Path) -> None:
    torch.save(restless_network().state_dict(), saved(tmp_path) / WEIGHTS_FILE)
    with pytest.raises(ValueError, match="is not the file that"):
        load_policy(tmp_path)


def test_weights_of_another_policy_are_noticed(tmp_path: Path) -> None:
    other = saved(tmp_path / "other", restless_network(seed=1))
    folder = saved(tmp_path / "policy")
    (folder / WEIGHTS_FILE).write_bytes((other / WEIGHTS_FILE).read_bytes())
    with pytest.raises(ValueError, match="is not the file that `policy.json` was written for"):
        load_policy(folder)


# ---- files that are no files ----


def test_no_folder_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="There is no such folder"):
        load_policy(tmp_path / "none")
    for file in (CARD_FILE, WEIGHTS_FILE):
        folder = saved(tmp_path / file)
        (folder / file).unlink()
        with pytest.raises(FileNotFoundError, match=f"It has no file `{file}`"):
            load_policy(folder)


@pytest.mark.parametrize("file", [CARD_FILE, WEIGHTS_FILE])
@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "folder"])
def test_only_plain_files_are_opened(tmp_path: Path, file: str, kind: str) -> None:
    path = saved(tmp_path / "policy") / file
    path.rename(tmp_path / file)
    if kind == "pipe":
        os.mkfifo(path)  # whoever opened it would wait for ever
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / (file if kind == "link" else "nothing"))
    with pytest.raises(ValueError, match=f"`{file}` must be a plain file"):
        load_policy(tmp_path / "policy")


@pytest.mark.parametrize(("file", "most"), [(CARD_FILE, MAX_CARD_BYTES), (WEIGHTS_FILE, MAX_WEIGHTS_BYTES)])
def test_large_files_are_not_read(tmp_path: Path, file: str, most: int) -> None:
    path = saved(tmp_path) / file
    os.truncate(path, 2**42)  # a hole: reading it would take more memory than there is
    with pytest.raises(ValueError, match=f"`{file}` has {2**42} bytes. It may have {most}."):
        load_policy(tmp_path)


def test_a_failed_write_leaves_the_old_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = load_policy(saved(tmp_path))[0].moves(rows(20))

    def full(handle: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space left"):
        saved(tmp_path, restless_network(seed=9))
    assert sorted(os.listdir(tmp_path)) == [CARD_FILE, WEIGHTS_FILE]
    assert (load_policy(tmp_path)[0].moves(rows(20)) == expected).all()


def test_saving_refuses_what_loading_would(tmp_path: Path) -> None:
    network = restless_network()
    with pytest.raises(ValueError, match="They must agree"):
        save_policy(tmp_path, network, PolicyCard(hidden=(5,)))
    with pytest.raises(ValueError, match="the card says 1 and"):
        save_policy(tmp_path, network, PolicyCard(hidden=network.hidden, features=("a",)))
    large = PolicyNetwork(hidden=(2100, 2100))
    with pytest.raises(ValueError, match="Weights may take"):
        save_policy(tmp_path, large, PolicyCard(hidden=large.hidden))
    with torch.no_grad():
        network.head.bias[0] = math.inf
    with pytest.raises(ValueError, match="'head.bias' holds a number that is not finite"):
        save_policy(tmp_path, network, PolicyCard(hidden=network.hidden))
    assert not os.listdir(tmp_path)


# ---- huggingface_hub's names ----


def test_pretrained_names_work_on_folders(tmp_path: Path) -> None:
    network = restless_network()
    network.save_pretrained(tmp_path, config={"name": "mine"})
    found = PolicyNetwork.from_pretrained(tmp_path, local_files_only=True)
    assert found.card is not None
    assert found.card.name == "mine"
    found.save_pretrained(tmp_path / "again")
    assert load_policy(tmp_path / "again")[1] == found.card
    assert (found.moves(rows(30)) == network.moves(rows(30))).all()
    with pytest.raises(TypeError, match=r"the options \['push_to_hub'\]"):
        network.save_pretrained(tmp_path, push_to_hub=True)
    with pytest.raises(TypeError, match=r"the options \['revision'\]"):
        PolicyNetwork.from_pretrained(tmp_path, revision="main")
    with pytest.raises(FileNotFoundError, match="There is no such folder"):
        PolicyNetwork.from_pretrained("someone/policy")


def test_the_hub_mixin_reads_and_writes_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("huggingface_hub")
    pytest.importorskip("jinja2")  # of its model cards
    from autoprec.policies import hub

    folder = saved(tmp_path / "policy")
    network = hub.HubPolicyNetwork.from_pretrained(folder)
    assert (network.moves(rows(30)) == restless_network().moves(rows(30))).all()
    network.save_pretrained(tmp_path / "pushed")
    assert {CARD_FILE, WEIGHTS_FILE, "README.md"} <= set(os.listdir(tmp_path / "pushed"))
    assert (tmp_path / "pushed" / WEIGHTS_FILE).read_bytes() == (folder / WEIGHTS_FILE).read_bytes()
    assert load_policy(tmp_path / "pushed")[1] == load_policy(folder)[1]

    cache = tmp_path / "cache"
    cache.mkdir()
    asked: list[tuple[str, str, str]] = []

    def download(repo: str, name: str, **options: Any) -> str:
        asked.append((repo, name, options["revision"]))
        link = cache / name
        link.symlink_to(folder / name)  # as the hub's cache has it
        return str(link)

    monkeypatch.setattr(hub, "hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.hub_mixin.hf_hub_download", lambda **options: str(cache / "none.json"))
    (cache / "none.json").write_text("{}")
    fetched = hub.HubPolicyNetwork.from_pretrained("someone/policy", revision="v1")
    assert asked == [("someone/policy", CARD_FILE, "v1"), ("someone/policy", WEIGHTS_FILE, "v1")]
    assert (fetched.moves(rows(30)) == network.moves(rows(30))).all()

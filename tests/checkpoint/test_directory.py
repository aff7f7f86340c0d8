"""Checkpoints of one process: what is saved comes back bit for bit, and damage never goes unnoticed."""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drivetrain.checkpoint import consolidate, load, manifest, replace, save, tensors, weights_digest
from drivetrain.errors import CheckpointError

from .ranks import run_ranks


def bits(value: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    flat = value.detach().resolve_conj().contiguous().reshape(-1)
    return value.dtype, tuple(value.shape), flat.view(torch.uint8).numpy().tobytes()


BUFFER = torch.arange(1000, dtype=torch.float32)
TENSORS = {
    "zero-dim": torch.tensor(3.25, dtype=torch.float64),
    "empty": torch.empty(0),
    "empty2": torch.empty(3, 0, dtype=torch.int64),
    "bf16": torch.randn(5).bfloat16(),
    "fp16": torch.randn(5).half(),
    "fp64": torch.tensor([float("nan"), -0.0, 5e-324], dtype=torch.float64),
    "bool": torch.tensor([True, False]),
    "int64": torch.tensor([2**62, -1]),
    "uint8": torch.arange(256, dtype=torch.uint8),
    "complex": torch.randn(2, 2, dtype=torch.complex64),
    "conjugate": torch.randn(2, 2, dtype=torch.complex64).conj(),
    "transposed": torch.randn(3, 4).t(),
    "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "strided": BUFFER[::7],
    "view": BUFFER[10:20],
    "same storage": BUFFER[5:15],
    "expanded": torch.ones(1).expand(4),
    "parameter": torch.nn.Parameter(torch.randn(2)),
    "float8": torch.randn(4).to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensor_survives_bit_for_bit(name: str, tmp_path: Path) -> None:
    save(tmp_path / "c", {"state_dict": {name: TENSORS[name]}}, {"residual": TENSORS[name]})
    back = load(tmp_path / "c")
    assert bits(back.shared["state_dict"][name]) == bits(TENSORS[name])
    assert back.own is not None and bits(back.own["residual"]) == bits(TENSORS[name])


def test_nested_state_and_meta_come_back(tmp_path: Path) -> None:
    sparse = torch.eye(3).to_sparse()
    shared = {
        "state_dict": {"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}, "a%2Fb": torch.full((1,), 2.0)},
        "optimizer_states": [{"state": {0: {"step": torch.tensor(4.0)}, "0": torch.tensor(5.0)}, "betas": (0.9, 0.99)}],
        "loops": {"where": Path("x"), "seen": {1, 2}, "curve": np.arange(3.0)},
        "sparse": sparse,
    }
    path = save(
        tmp_path / "runs" / "c.ckpt", shared, {"i": 3}, meta={"epoch": 2, "global_step": 9, "strategy": "ddp", "x": [1]}
    )
    back = load(path)
    assert {key: value.item() for key, value in back.shared["state_dict"].items() if key != "a"} == {
        "a/b": 1,
        "a%2Fb": 2,
    }
    assert back.shared["state_dict"]["a"]["b"].item() == 0
    optimizer = back.shared["optimizer_states"][0]
    assert (optimizer["state"][0]["step"].item(), optimizer["state"]["0"].item(), optimizer["betas"]) == (
        4,
        5,
        (0.9, 0.99),
    )
    assert back.shared["loops"]["where"] == Path("x") and back.shared["loops"]["seen"] == {1, 2}
    assert back.shared["loops"]["curve"].tolist() == [0, 1, 2]
    assert torch.equal(back.shared["sparse"].to_dense(), sparse.to_dense())
    assert back.own == {"i": 3}
    expected = {"epoch": 2, "global_step": 9, "strategy": "ddp", "x": [1], "kind": "training", "world_size": 1}
    assert {key: back.meta[key] for key in expected} == expected
    assert sorted(child.name for child in path.parent.iterdir()) == ["c.ckpt"]


def test_no_absolute_path_is_kept(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"w": torch.ones(2)}, {})
    assert not [file for file in path.rglob("*") if file.is_file() and str(tmp_path).encode() in file.read_bytes()]


def test_training_goes_on_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor")
    )  # an optimizer's first step makes a folder

    def fresh() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        return module, torch.optim.Adam(module.parameters(), lr=0.01)

    def step(module: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        module(batch).square().mean().backward()
        optimizer.step()

    module, optimizer = fresh()
    step(module, optimizer, 1)
    save(tmp_path / "c", {"state_dict": module.state_dict(), "optimizer_states": [optimizer.state_dict()]}, {})
    step(module, optimizer, 2)
    again, again_optimizer = fresh()
    state = load(tmp_path / "c").shared
    again.load_state_dict(state["state_dict"])
    again_optimizer.load_state_dict(state["optimizer_states"][0])
    step(again, again_optimizer, 2)
    assert weights_digest(again.state_dict()) == weights_digest(module.state_dict())
    assert weights_digest(consolidate(tmp_path / "c")) != weights_digest(module.state_dict())


def test_weights_only_and_keys(tmp_path: Path) -> None:
    save(
        tmp_path / "c", {"state_dict": {"w": torch.ones(2)}, "other": {"x": torch.ones(3)}}, {"i": 1}, weights_only=True
    )
    back = load(tmp_path / "c", keys=["state_dict"])
    assert (back.own, back.meta["kind"], list(back.shared)) == (None, "weights", ["state_dict"])
    with pytest.raises(CheckpointError, match="holds no 'nothing'; it holds 'state_dict', 'other'"):
        load(tmp_path / "c", keys=["nothing"])
    save(tmp_path / "d", {"other": 1}, {})
    with pytest.raises(CheckpointError, match="holds no 'state_dict'"):
        consolidate(tmp_path / "d")


def test_template_is_filled_in_place(tmp_path: Path) -> None:
    save(tmp_path / "c", {"state_dict": {"w": torch.arange(4.0), "b": torch.ones(1)}}, {})
    module = {"w": torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))}
    back = load(tmp_path / "c", template={"state_dict": module})
    assert module["w"].tolist() == [0, 1, 2, 3]
    assert back.shared["state_dict"]["w"].data_ptr() == module["w"].data_ptr()
    assert back.shared["state_dict"]["b"].tolist() == [1]
    with pytest.raises(CheckpointError, match=r"'state_dict/w' has shape \[4\].*\[5\] in the module"):
        load(tmp_path / "c", template={"state_dict": {"w": torch.zeros(5)}})
    with pytest.raises(CheckpointError, match="no tensor 'state_dict/ww'; did you mean 'state_dict/w'"):
        load(tmp_path / "c", template={"state_dict": {"ww": torch.zeros(4)}})


def test_own_part_needs_the_same_world_size(tmp_path: Path) -> None:
    save(tmp_path / "c", {"x": 1}, {"i": 1})
    assert load(tmp_path / "c", rank=0, world_size=2).own is None
    assert load(tmp_path / "c").own == {"i": 1}


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


FILES = ["manifest.json", "state.pt", "rank_0.pt", "weights/.metadata", "weights/__0_0.distcp"]
DAMAGE = {
    "flipped": flip,
    "truncated": lambda file: os.truncate(file, file.stat().st_size - 1),
    "missing": lambda file: file.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_damage_is_named(name: str, damage: str, tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"w": torch.randn(100), "x": "text"}, {"i": torch.ones(5)})
    assert sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()) == sorted(FILES)
    DAMAGE[damage](path / name)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")) as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_a_truncated_file_is_found_without_checksums(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"w": torch.randn(100)}, {})
    DAMAGE["truncated"](path / "weights/__0_0.distcp")
    with pytest.raises(CheckpointError, match="bytes instead of"):
        load(path, verify=False)


def test_unreadable_tensors_are_one_sentence_without_checksums(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"w": torch.randn(100)}, {})
    with open(path / "weights/__0_0.distcp", "r+b") as stream:
        stream.write(bytes(64))
    with pytest.raises(CheckpointError, match=r"the tensors of the checkpoint .* cannot be read"):
        load(path, verify=False)


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["EVIL_FOLDER"],)


def reseal(path: Path, name: str) -> None:
    """Make the manifest vouch for what ``name`` holds now, as an attacker would."""
    content = manifest.read(path)
    content["files"][name] = manifest.seal(path / name)
    manifest.write(path, content)


@pytest.mark.parametrize("name", ["weights/.metadata", "state.pt", "rank_0.pt"])
def test_nothing_is_unpickled_freely(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "c", {"w": torch.ones(2)}, {"i": 1})
    monkeypatch.setenv("EVIL_FOLDER", str(tmp_path / "owned"))
    if name == "weights/.metadata":
        (path / name).write_bytes(pickle.dumps(Evil()))
    else:
        torch.save(Evil(), path / name)
    reseal(path, name)
    with pytest.raises(CheckpointError, match="mkdir"):
        load(path)
    assert not (tmp_path / "owned").exists()


def test_an_index_that_is_none_or_leads_outside_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"w": torch.ones(2)}, {})
    index = path / "weights/.metadata"
    good = index.read_bytes()
    index.write_bytes(pickle.dumps([1, 2]))
    reseal(path, "weights/.metadata")
    with pytest.raises(CheckpointError, match="holds a list"):
        load(path)
    metadata = pickle.loads(good)
    for info in metadata.storage_data.values():
        info.relative_path = "../../elsewhere"
    index.write_bytes(pickle.dumps(metadata))
    reseal(path, "weights/.metadata")
    with pytest.raises(CheckpointError, match=r"refers to '\.\./\.\./elsewhere'"):
        load(path)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"x": 1}, {})
    content = manifest.read(path)
    manifest.write(path, {**content, "format": manifest.FORMAT + 1})
    with pytest.raises(CheckpointError, match="load it with the version that wrote it"):
        load(path)


def test_what_cannot_be_kept_leaves_nothing(tmp_path: Path) -> None:
    for shared, own, meta in (({"a": {"f": print}}, {}, {}), ({}, {"f": print}, {}), ({}, {}, {"f": print})):
        with pytest.raises(CheckpointError, match="was not saved"):
            save(tmp_path / "c", shared, own, meta=meta)
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_folder_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=r"was not saved: (Not a directory|File exists)"):
        save(tmp_path / "file" / "c", {"x": 1}, {})
    with pytest.raises(CheckpointError, match=r"was not saved: .*/proc/nowhere"):
        save("/proc/nowhere/c", {"x": 1}, {})


def test_a_folder_that_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(CheckpointError, match="is not a checkpoint; remove it"):
        save(tmp_path / "mine", {"x": 1}, {})
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "x"
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        load(tmp_path / "mine")
    with pytest.raises(CheckpointError, match="yours is not there"):
        load(tmp_path / "yours")


def test_a_full_disk_keeps_the_old_one(tmp_path: Path) -> None:
    def full(rank: int, world_size: int) -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with pytest.raises(CheckpointError) as caught:
            save(tmp_path / "c", {"w": torch.zeros(100_000), "version": 2}, {})
        return str(caught.value)

    save(tmp_path / "c", {"version": 1}, {})
    (message,) = run_ranks(full, 1)
    assert "was not saved: File too large; free space or save elsewhere" in message
    assert load(tmp_path / "c").shared == {"version": 1}
    assert [child.name for child in tmp_path.iterdir()] == ["c"]


def test_saving_again_replaces_and_leaves_nothing(tmp_path: Path) -> None:
    for version in range(3):
        save(tmp_path / "c", {"version": version}, {})
        assert load(tmp_path / "c").shared == {"version": version}
    assert [child.name for child in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize(("place", "name"), [(manifest, "verify"), (tensors, "read")])
def test_a_checkpoint_replaced_while_it_is_read_comes_whole(
    place: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job saves over the name between two steps of the reader, here: around its check, or its reading of tensors."""

    def write(version: int) -> None:
        value = torch.full((4,), float(version))
        save(tmp_path / "c", {"w": value, "version": version}, {"version": version}, meta={"global_step": version})

    real = getattr(place, name)
    written = [0]

    def overtaken(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        if written[-1] < 2:
            written.append(written[-1] + 1)
            write(written[-1])
        return result

    write(0)
    monkeypatch.setattr(place, name, overtaken)
    back = load(tmp_path / "c")
    assert written == [0, 1, 2]
    assert back.shared["w"].tolist() == [2.0] * 4
    assert (back.shared["version"], back.own, back.meta["global_step"]) == (2, {"version": 2}, 2)


def test_a_checkpoint_that_never_stays_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "c", {"x": 1}, {})
    real = manifest.verify

    def overtaken(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        save(tmp_path / "c", {"x": 1}, {})

    monkeypatch.setattr(manifest, "verify", overtaken)
    with pytest.raises(CheckpointError, match="was replaced 5 times while it was read"):
        load(tmp_path / "c")


def test_without_exchange_every_instant_has_one_of_the_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without RENAME_EXCHANGE: stop before each rename in turn, as a kill would."""
    monkeypatch.setattr(replace, "_renameat2", lambda: None)
    save(tmp_path / "c", {"version": 0}, {})
    save(tmp_path / "c", {"version": 1}, {})
    assert [child.name for child in tmp_path.iterdir()] == ["c"]
    real = os.rename
    for allowed in range(2):
        count = 0

        def rename(source: Path, target: Path, allowed: int = allowed) -> None:
            nonlocal count
            count += 1
            if count > allowed:
                os._exit(0)
            real(source, target)

        pid = os.fork()
        if pid == 0:
            os.rename = rename
            save(tmp_path / "c", {"version": 2}, {})
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert load(tmp_path / "c").shared == {"version": 1}
        assert [replace.visible_name(path) for path in replace.complete(tmp_path)] == ["c"]
    save(tmp_path / "other", {"version": 3}, {})
    assert sorted(child.name for child in tmp_path.iterdir()) == ["c", "other"]
    assert load(tmp_path / "c").shared == {"version": 1}


def test_a_living_writer_is_not_swept(tmp_path: Path) -> None:
    with replace.Staging(tmp_path / "slow") as staging:
        save(tmp_path / "c", {"x": 1}, {})
        assert staging.folder.is_dir()
    assert [child.name for child in tmp_path.iterdir()] == ["c"]


def test_names_of_tensors_are_readable(tmp_path: Path) -> None:
    found, _ = tensors.split(
        {"state_dict": {"net.weight": torch.ones(1)}, "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(1)}}}]}
    )
    assert list(found) == ["state_dict/net.weight", "optimizer_states/0/state/0/exp_avg"]


def test_manifest_is_plain_json(tmp_path: Path) -> None:
    before = time.time()
    path = save(tmp_path / "c", {"x": 1}, {}, meta={"global_step": 3})
    content = json.loads((path / "manifest.json").read_text())
    assert content["format"] == 1 and content["global_step"] == 3 and before <= content["time"] <= time.time()
    assert set(content["files"]) == {"state.pt", "rank_0.pt", "weights/.metadata"}

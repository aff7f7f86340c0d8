"""Finding checkpoints: last, best, auto, paths; and a last that is never wrong."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path

import pytest

from drivetrain.checkpoint import LAST, find, load, manifest, save, single
from drivetrain.errors import CheckpointError


def make(folder: Path, step: int, name: str | None = None) -> Path:
    return save(folder / (name or f"step={step}.ckpt"), {"step": step}, {}, meta={"global_step": step})


def damage(path: Path) -> None:
    state = path / "state.pt"
    data = bytearray(state.read_bytes())
    data[100] ^= 1
    state.write_bytes(data)


def test_newest_goes_by_step_then_time(tmp_path: Path) -> None:
    make(tmp_path, 10)
    make(tmp_path, 9)
    late = make(tmp_path, 10, "again.ckpt")
    assert find.newest(tmp_path) == late
    assert [path.name for path in find.ordered(tmp_path)] == ["again.ckpt", "step=10.ckpt", "step=9.ckpt"]
    assert find.newest(tmp_path / "absent") is None


def test_resolve_each_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find.resolve("auto", tmp_path) is None
    with pytest.raises(CheckpointError, match="no complete checkpoint in"):
        find.resolve("last", tmp_path)
    first, second = make(tmp_path, 1), make(tmp_path, 2)
    assert find.resolve("auto", tmp_path) == second
    assert find.resolve("last", tmp_path) == second, "without a link, the newest"
    find.point_last(tmp_path, first.name)
    assert find.resolve("last", tmp_path) == first
    assert find.resolve("best", tmp_path, best=first) == first
    with pytest.raises(CheckpointError, match="no best checkpoint"):
        find.resolve("best", tmp_path)
    assert find.resolve(str(first), tmp_path / "elsewhere") == first
    assert find.resolve("step=1.ckpt", tmp_path) == first
    assert find.resolve(LAST, tmp_path) == first
    monkeypatch.chdir(tmp_path)
    resolved = find.resolve("./step=2.ckpt", "nowhere")
    assert resolved is not None and resolved.resolve() == second


def test_a_missing_path_names_the_nearest(tmp_path: Path) -> None:
    make(tmp_path, 1, "epoch=0-step=63.ckpt")
    with pytest.raises(CheckpointError, match=r"did you mean 'epoch=0-step=63\.ckpt'"):
        find.resolve(tmp_path / "epoch=0-step=36.ckpt", tmp_path)


def test_damaged_newest_is_passed_over_with_one_warning(tmp_path: Path) -> None:
    first, second = make(tmp_path, 1), make(tmp_path, 2)
    find.point_last(tmp_path, second.name)
    damage(second)
    for word in ("auto", "last"):
        with pytest.warns(UserWarning, match=r"step=2\.ckpt is damaged.*state\.pt.*going back") as caught:
            assert find.resolve(word, tmp_path) == first
        assert len(caught) == 1
    with pytest.raises(CheckpointError, match="is damaged"):
        find.resolve(second, tmp_path)
    damage(first)
    with pytest.warns(UserWarning, match="going back"):
        assert find.resolve("auto", tmp_path) is None
    with pytest.warns(UserWarning, match="going back"), pytest.raises(CheckpointError, match="no complete"):
        find.resolve("last", tmp_path)


def test_an_unreadable_manifest_is_passed_over(tmp_path: Path) -> None:
    first, second = make(tmp_path, 1), make(tmp_path, 2)
    (second / manifest.NAME).write_text("{")
    with pytest.warns(UserWarning, match="passed over"):
        assert find.resolve("auto", tmp_path) == first


def test_what_an_aborted_write_left_is_ignored(tmp_path: Path) -> None:
    first = make(tmp_path, 1)
    shutil.copytree(first, tmp_path / ".step=9.ckpt.0123456789ab.saving")
    shutil.copytree(first, tmp_path / ".step=8.ckpt.0123456789ab.removing")
    (tmp_path / "unfinished.ckpt").mkdir()
    assert find.ordered(tmp_path) == [first]
    make(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step=1.ckpt", "step=2.ckpt", "unfinished.ckpt"]


def test_last_never_points_at_itself_or_at_nothing(tmp_path: Path) -> None:
    first = make(tmp_path, 1)
    find.point_last(tmp_path, first.name)
    for name in (LAST, "absent.ckpt", "../step=1.ckpt", str(first), ""):
        with pytest.raises(CheckpointError, match=r"last\.ckpt cannot point"):
            find.point_last(tmp_path, name)
    assert find.last(tmp_path) == first
    os.symlink(first.name, tmp_path / "alias.ckpt")
    with pytest.raises(CheckpointError, match="cannot point"):
        find.point_last(tmp_path, "alias.ckpt")
    assert [path.name for path in find.ordered(tmp_path)] == [first.name], "links are not counted twice"


@pytest.mark.parametrize("keep", [1, 2, 100])
def test_last_through_a_run_with_top_k(keep: int, tmp_path: Path) -> None:
    """Every save points last at itself, removes old ones, also the one that last points at: last always loads."""
    folder = tmp_path / "run"
    for step in range(1, 6):
        path = make(folder, step)
        assert find.last(folder) is None or load(folder / LAST).shared["step"] == step - 1
        find.point_last(folder, path.name)
        for old in find.ordered(folder)[keep:]:
            find.remove(old)
        assert load(folder / LAST).shared == {"step": step}
        assert os.readlink(folder / LAST) == path.name
    find.remove(find.ordered(folder)[0])
    assert find.last(folder) == (None if keep == 1 else folder / "step=4.ckpt")
    assert os.path.lexists(folder / LAST) == (keep > 1)


def test_last_stays_valid_when_the_folder_moves(tmp_path: Path) -> None:
    path = make(tmp_path / "run", 1)
    find.point_last(tmp_path / "run", path.name)
    (tmp_path / "run").rename(tmp_path / "moved")
    assert find.resolve("last", tmp_path / "moved") == tmp_path / "moved" / path.name
    assert load(tmp_path / "moved" / LAST).shared == {"step": 1}


def test_a_dangling_or_circular_last_is_survived(tmp_path: Path) -> None:
    first = make(tmp_path, 1)
    for target in (LAST, "gone.ckpt"):
        (tmp_path / LAST).unlink(missing_ok=True)
        os.symlink(target, tmp_path / LAST)
        assert find.last(tmp_path) is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert find.resolve("last", tmp_path) == first
        find.point_last(tmp_path, first.name)
        assert find.last(tmp_path) == first
    (tmp_path / LAST).unlink()
    os.symlink("alias.ckpt", tmp_path / LAST)
    os.symlink(LAST, tmp_path / "alias.ckpt")
    assert find.resolve("last", tmp_path) == first


def test_saving_under_the_name_of_the_link_makes_it_a_checkpoint(tmp_path: Path) -> None:
    first = make(tmp_path, 1)
    find.point_last(tmp_path, first.name)
    make(tmp_path, 2, LAST)
    assert load(first).shared == {"step": 1}
    assert load(tmp_path / LAST).shared == {"step": 2}
    assert find.resolve("last", tmp_path) == tmp_path / LAST
    with pytest.raises(CheckpointError, match="is a checkpoint itself"):
        find.point_last(tmp_path, first.name)


def test_where_links_are_not_allowed_a_file_holds_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    first, second = make(tmp_path, 1), make(tmp_path, 2)
    for path in (first, second):
        find.point_last(tmp_path, path.name)
        assert (tmp_path / LAST).is_file()
        assert find.resolve("last", tmp_path) == path
        assert load(tmp_path / LAST).shared == load(path).shared
    find.remove(second)
    assert find.last(tmp_path) == first


def test_remove_takes_checkpoints_only(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    for name in ("thesis", "absent"):
        with pytest.raises(CheckpointError, match="only checkpoints are removed"):
            find.remove(tmp_path / name)
    path = make(tmp_path, 1)
    find.remove(path)
    assert [child.name for child in tmp_path.iterdir()] == ["thesis"]


def test_half_removed_is_never_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path, 1)
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)  # killed just before deleting
    find.remove(path)
    monkeypatch.undo()
    assert find.ordered(tmp_path) == []
    make(tmp_path, 2)
    assert [child.name for child in tmp_path.iterdir()] == ["step=2.ckpt"]


def test_files_are_found_as_folders_are(tmp_path: Path) -> None:
    """Checkpoints in one file: by their age, before folders; ``last`` is a file, a version of it or a link."""
    make(tmp_path, 9)
    old, new = (single.write({"step": step}, tmp_path / f"step={step}.ckpt") for step in (1, 2))
    os.utime(old, (1, 1))
    assert find.resolve("auto", tmp_path) == find.resolve("last", tmp_path) == new
    assert find.resolve("step=1.ckpt", tmp_path) == old
    assert find.point_last(tmp_path, old.name).is_symlink()
    assert find.resolve("last", tmp_path) == old
    find.remove(old)
    assert not old.exists() and os.readlink(tmp_path / LAST) == new.name, "it never points at nothing"
    (tmp_path / LAST).unlink()
    whole = single.write({"step": 0}, tmp_path / LAST)
    os.utime(whole, (2, 2))
    assert find.resolve("last", tmp_path) == whole
    newer = single.write({"step": 0}, tmp_path / "last-v1.ckpt")
    assert find.resolve("last", tmp_path) == newer
    newer.write_bytes(newer.read_bytes()[:-30])
    with pytest.warns(UserWarning, match=r"last-v1.ckpt is damaged: .* going back to the checkpoint before it"):
        assert find.resolve("last", tmp_path) == whole
    with pytest.raises(CheckpointError, match="is a checkpoint itself"):
        find.point_last(tmp_path, new.name)
    with pytest.raises(CheckpointError, match=r"did you mean 'step=2\.ckpt'"):
        find.resolve("step=22.ckpt", tmp_path)
    (tmp_path / "text.ckpt").write_text("step=9.ckpt\n")
    assert find.resolve("text.ckpt", tmp_path) == tmp_path / "step=9.ckpt", "a small text is still a link"

"""What every command says of arguments that it does not know, and of files that it could not write."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from drivetrain.__main__ import main
from drivetrain.command_line import dispatch, require_writable
from drivetrain.errors import ConfigurationError


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["doctor", "--jsn"], "error: drivetrain doctor has no option '--jsn': did you mean '--json'?\n"),
        (
            ["support", "--jsno=1"],
            "error: python -m drivetrain support has no option '--jsno': did you mean ",
        ),
        (["bench", "gpt", "--steps", "0"], "error: argument --steps: 0 is less than 1: see "),
        (
            ["bench", "gpt", "--strategies", "pipeline", "--devices", "1"],
            "error: --strategies pipeline takes 2 processes or more, not --devices 1.\n",
        ),
        (
            ["bench", "gpt", "--strategies", "single", "--devices", "2"],
            "error: --strategies single takes one process, not ",
        ),
        (["bench", "gpt", "--devices", "1,x"], "error: argument --devices: 'x' is no whole number: see "),
        (["support", "--only", "ddp"], "error: --only chooses what --train trains: give both\n"),
        (["doctor", "now"], "error: drivetrain doctor has no use for 'now': see drivetrain doctor --help\n"),
        (["bench", "comm", "--plot", "a.txt"], "error: --plot a.txt is no image: name a file that ends in "),
        (
            ["bench", "comm", "--workrs", "2"],
            "error: python -m drivetrain.bench comm has no option '--workrs': did ",
        ),
    ],
)
def test_a_mistake_is_one_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and err.startswith(said)


def test_output_is_looked_at_before_the_work(tmp_path: Path) -> None:
    require_writable(tmp_path / "new" / "deep" / "a.json", "--output")
    require_writable(tmp_path / "a.PNG", "--plot", image=True)
    (tmp_path / "taken").write_text("")
    for path, image, said in (
        (tmp_path, False, "is a folder"),
        (tmp_path / "taken" / "a.json", False, "has no folder"),
        (tmp_path / "new" / "a.png", True, "has no folder"),
        (tmp_path / "a.doc", True, "is no image"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            require_writable(path, "--output", image=image)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize("lines", [1, 10_000])
def test_output_that_nobody_reads_any_more_ends_quietly(
    lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def prints(words: Sequence[str]) -> None:
        for word in words * lines:
            print(word)

    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as nobody, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", nobody)
        assert dispatch(["tell", "all"], "", lambda name: prints) == 128 + signal.SIGPIPE
    assert capsys.readouterr().err == ""


def test_a_broken_pipe_of_the_commands_own_is_an_error() -> None:
    def breaks(words: Sequence[str]) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        dispatch(["tell"], "", lambda name: breaks)


def test_a_command_without_standard_streams_is_given_some() -> None:
    pid = os.fork()
    if pid == 0:
        try:
            for descriptor in (0, 1, 2):
                os.close(descriptor)
            sys.stdin = sys.stdout = sys.stderr = None  # type: ignore[assignment]  # as Python starts then
            code = main(["--help"])
            print("to nobody", file=sys.stderr, flush=True)
            opened = os.open(os.devnull, os.O_RDONLY)
            os._exit(code if opened > 2 and os.get_inheritable(1) and sys.stdin.read() == "" else 3)
        finally:
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

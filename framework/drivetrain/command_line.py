"""What the commands share: the word that chooses one, and arguments and files of output whose mistakes are one
sentence, said before any work."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, TextIO

from drivetrain.errors import FULL, ConfigurationError, DrivetrainError, Interrupted, nearest

Command = Callable[[Sequence[str]], int | None]
Commands = Mapping[str, tuple[str, str]]  # by name: "module:function", and what it does

IMAGES = (".png", ".pdf", ".svg", ".jpg", ".jpeg", ".webp")


class Parser(argparse.ArgumentParser):
    """An argument parser that raises :class:`ConfigurationError` instead of leaving the process, and that suggests the
    option nearest to one that it does not know."""

    def parse_args(  # type: ignore[override]  # of the overloads only this one is used
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        found, rest = self.parse_known_args(args, namespace)
        if not rest:
            return found
        word = rest[0].partition("=")[0]
        if not word.startswith("-"):
            raise ConfigurationError(f"{self.prog} has no use for {word!r}: see {self.prog} --help")
        raise ConfigurationError(f"{self.prog} has no option {word!r}: {nearest(word, self._option_string_actions)}")

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}: see {self.prog} --help")


def positive(text: str) -> int:
    """A whole number of at least one, as the ``type`` of an argument."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def require_writable(path: Path, option: str, *, image: bool = False) -> None:
    """Raise where ``path`` cannot become a file, before the work whose result it is to hold.

    Missing folders are no obstacle unless it is an ``image``, whose folder must be there.

    Raises:
        ConfigurationError: it is a folder, may not be written, or an ``image`` has a suffix of none.
    """
    if image and path.suffix.lower() not in IMAGES:
        raise ConfigurationError(f"{option} {path} is no image: name a file that ends in {', '.join(IMAGES)}.")
    if path.is_dir():
        raise ConfigurationError(f"{option} {path} is a folder: name a file in it.")
    folder = path.parent
    while not image and not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise ConfigurationError(f"{option} {path} has no folder {folder}: make it, or name another file.")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigurationError(f"{option} {path} may not be written: name another file.")


def open_standard_streams() -> None:
    """Put the null device where this process has no standard input, output or error: else the next file that is opened
    would be taken for it, by this process and by those that it starts."""
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115  as long as the process


def dispatch(argv: Sequence[str] | None, usage: str, find: Callable[[str], Command]) -> int:
    """Run the command named first in ``argv`` (None: of this process) with the rest; returns the exit code.

    ``find`` gives the command of a name, or raises. What drivetrain raises on purpose is one sentence on standard
    error. Without a word, and for ``--help``, ``usage`` is printed. Output that nobody reads any more ends it quietly.
    """
    open_standard_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] in (["--help"], ["-h"]):
        print(usage)
        return 0
    if not words:
        say(usage)
        return 2
    try:
        code = int(find(words[0])(words[1:]) or 0)
        sys.stdout.flush()
        return code
    except (DrivetrainError, Interrupted) as error:
        say(f"error: {error}")
        return error.exit_code
    except BrokenPipeError:
        if not _reader_left():
            raise
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in FULL:
            raise
        where = "the output" if error.filename is None else error.filename
        say(f"error: {where} cannot be written: {error.strerror}; free space or choose another")
        return 1


def silence(stream: TextIO) -> None:
    """Let what ``stream`` still has to write, and gets to write, go nowhere: its device takes no more."""
    with contextlib.suppress(OSError, ValueError):  # it has no descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def say(text: str) -> None:
    """Print ``text`` on standard error. Where that takes nothing either, the exit code says what there is to say."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        silence(sys.stderr)


def _reader_left() -> bool:
    """Whether nobody reads standard output any more, as behind ``| head``; then nothing more is written there."""
    watched = select.poll()
    watched.register(sys.stdout.fileno(), 0)
    if not any(event & select.POLLERR for _, event in watched.poll(0)):
        return False
    silence(sys.stdout)  # Python would fail when it writes what is left at its end
    return True


def dispatch_listed(argv: Sequence[str] | None, program: str, commands: Commands) -> int:
    """:func:`dispatch` among ``commands``, each imported when it is chosen."""
    width = max(map(len, commands))
    head = f"usage: {program} COMMAND [ARGUMENTS ...]     (--help after COMMAND: its own)"
    usage = "\n".join([head, "", *(f"  {name:<{width}}  {what}" for name, (_, what) in commands.items())])

    def find(name: str) -> Command:
        if name not in commands:
            raise ConfigurationError(f"there is no command {name!r}: {nearest(name, commands)}")
        module, _, function = commands[name][0].partition(":")
        command: Command = getattr(import_module(module), function)
        return command

    return dispatch(argv, usage, find)

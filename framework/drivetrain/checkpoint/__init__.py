"""Checkpoints that are complete or absent: written aside, checked by checksums, portable across world sizes."""

from drivetrain.checkpoint.agreement import Communicator, SingleProcess
from drivetrain.checkpoint.convert import AttributeDict, from_safe, to_safe
from drivetrain.checkpoint.digest import weights_digest
from drivetrain.checkpoint.directory import Loaded, load, outline, save
from drivetrain.checkpoint.export import consolidate
from drivetrain.checkpoint.find import LAST, Verified, last, newest, ordered, point_last, remove, resolve

__all__ = [
    "LAST",
    "AttributeDict",
    "Communicator",
    "Loaded",
    "SingleProcess",
    "Verified",
    "consolidate",
    "from_safe",
    "last",
    "load",
    "newest",
    "ordered",
    "outline",
    "point_last",
    "remove",
    "resolve",
    "save",
    "to_safe",
    "weights_digest",
]

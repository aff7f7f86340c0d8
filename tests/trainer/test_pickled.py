"""A Trainer can be pickled (``torch.save(trainer)``, a library that sends it to a process): its configuration and
counters go along, a run does not."""

from __future__ import annotations

import pickle

from drivetrain import Trainer, registry
from drivetrain.comm.statistics import Statistics
from tests.runs import QUIET, Classifier, loader


def test_before_and_after_a_fit() -> None:
    trainer = Trainer(**QUIET, max_epochs=1, precision="64-true", gradient_clip_val=0.5)
    for copy in _again(trainer), trainer:
        copy.fit(Classifier(), loader())
        assert copy.global_step == 7
    copy = _again(trainer)
    assert (copy.global_step, copy.current_epoch) == (7, 1)
    copy.fit(Classifier(), loader())
    assert (copy.global_step, copy.gradient_clip_val) == (7, 0.5)


def test_declarations_of_all_strategies() -> None:
    for name in registry.names("strategies"):
        declaration = registry.load("strategies", name)
        copy = pickle.loads(pickle.dumps(declaration))
        assert (copy.name, copy.options) == (declaration.name, declaration.options)


def test_what_was_counted() -> None:
    whole = Statistics()
    part = Statistics(label="part")
    whole.children.add(part)
    whole.record("send", bytes_sent=3, messages=1)
    copy = pickle.loads(pickle.dumps(whole))
    assert copy.operations["send"].bytes_sent == 3
    assert not copy.children
    assert set(whole.children) == {part}


def _again(trainer: Trainer) -> Trainer:
    copy = pickle.loads(pickle.dumps(trainer))
    assert isinstance(copy, Trainer)
    return copy

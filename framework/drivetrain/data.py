"""DataModule: the data of a project in one object, with Lightning's LightningDataModule's names."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping, Sequence, Sized
from pathlib import Path
from typing import IO, Any, Self, cast

from torch.utils.data import DataLoader, Dataset, IterableDataset

from drivetrain import late_setup
from drivetrain.class_only import class_only
from drivetrain.data_hooks import DataHooks
from drivetrain.data_partition import DataPartitioner
from drivetrain.hyperparameters import HyperparametersMixin

__all__ = ["DataModule", "DataPartitioner"]


_LOADERS = {
    "Train": "train_dataloader",
    "Validation": "val_dataloader",
    "Test": "test_dataloader",
    "Predict": "predict_dataloader",
}


class DataModule(HyperparametersMixin, DataHooks):
    """Override ``prepare_data``, ``setup`` and the loaders you have.

    A loader's ``batch_size`` is the whole step's under ``Trainer(batch="global")``: each replica reads its part.
    """

    CHECKPOINT_HYPER_PARAMS_KEY = "datamodule_hyper_parameters"
    CHECKPOINT_HYPER_PARAMS_NAME = "datamodule_hparams_name"
    CHECKPOINT_HYPER_PARAMS_TYPE = "datamodule_hparams_type"
    name: str | None = None
    trainer: Any = None  # of the class, for projects that forget super().__init__()

    def __init__(self) -> None:
        self.trainer = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "trainer": None}

    def __getattribute__(self, name: str) -> Any:
        if name.endswith("_dataloader") and late_setup.owes(self):
            late_setup.pay(self)
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and late_setup.owes(self):
            late_setup.pay(self)
            return getattr(self, name)
        return object.__getattribute__(self, name)  # says what is missing, also where it is asked for in a property

    def __str__(self) -> str:
        """The sizes of the data sets, a line for each stage, as Lightning prints them; asks for the loaders."""
        return os.linesep.join(f"{{{stage} dataloader: {self._size_of(name)}}}" for stage, name in _LOADERS.items())

    def _size_of(self, name: str) -> str:
        try:
            loaders = getattr(self, name)()
        except Exception:  # of the project's own, before ``setup`` for one: there is no size to tell then
            return "None"
        if isinstance(loaders, DataLoader):
            return _size(loaders)
        several = loaders.values() if isinstance(loaders, Mapping) else loaders
        if not isinstance(several, Iterable):
            return "None"
        return " ; ".join(f"{number}. {_size(one)}" for number, one in enumerate(several, 1))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    def on_exception(self, exception: BaseException) -> None: ...

    @class_only
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path | IO[bytes],
        map_location: Any = None,
        hparams_file: str | Path | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Build the data module from a checkpoint's hyper-parameters and load its state; the arguments are those of
        :meth:`drivetrain.TrainModule.load_from_checkpoint`."""
        from drivetrain.restore import data_from_checkpoint

        return cast(Self, data_from_checkpoint(cls, checkpoint_path, hparams_file, weights_only, kwargs))

    @classmethod
    def from_datasets(
        cls,
        train_dataset: Dataset[Any] | Sequence[Dataset[Any]] | Mapping[str, Dataset[Any]] | None = None,
        val_dataset: Dataset[Any] | Sequence[Dataset[Any]] | None = None,
        test_dataset: Dataset[Any] | Sequence[Dataset[Any]] | None = None,
        predict_dataset: Dataset[Any] | Sequence[Dataset[Any]] | None = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **init_kwargs: Any,
    ) -> Self:
        """A data module made of data sets; only the training set is shuffled. Its ``__init__`` is given ``batch_size``
        and ``num_workers`` too, where it takes arguments of these names."""

        def loader(dataset: Any, shuffle: bool) -> Any:
            if isinstance(dataset, Mapping):
                return {key: loader(value, shuffle) for key, value in dataset.items()}
            if isinstance(dataset, Sequence) and not isinstance(dataset, Dataset):
                return [loader(value, shuffle) for value in dataset]
            shuffle = shuffle and not isinstance(dataset, IterableDataset)
            return DataLoader(dataset, batch_size=batch_size, shuffle=shuffle, num_workers=num_workers)

        taken = inspect.signature(cls.__init__).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
        reading = {"batch_size": batch_size, "num_workers": num_workers}
        module = cls(**init_kwargs, **{name: value for name, value in reading.items() if takes_any or name in taken})
        sets = {"train": train_dataset, "val": val_dataset, "test": test_dataset, "predict": predict_dataset}
        for name, dataset in sets.items():
            if dataset is not None:
                maker = lambda dataset=dataset, shuffle=name == "train": loader(dataset, shuffle)
                setattr(module, f"{name}_dataloader", maker)
        return module


def _size(loader: Any) -> str:
    """Of the data set that ``loader`` reads, where it has one that says it."""
    dataset = getattr(loader, "dataset", None)
    if dataset is None:
        return "None"
    return f"size={len(dataset) if isinstance(dataset, Sized) else 'NA'}"

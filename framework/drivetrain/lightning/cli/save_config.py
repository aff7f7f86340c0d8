"""The callback that leaves a run's configuration in its log folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.callback import Callback
from drivetrain.errors import ConfigurationError, ConflictError

if TYPE_CHECKING:
    from jsonargparse import Namespace

    from drivetrain.lightning.cli.parser import LightningArgumentParser


class SaveConfigCallback(Callback):
    """Writes the parsed configuration into ``trainer.log_dir`` as the first stage begins, on the first worker.

    Args:
        parser: what parsed it.
        config: what it parsed.
        config_filename: name of the file.
        overwrite: replace a file that is there.
        multifile: write each file that the configuration was read from by itself.
        save_to_log_dir: False where only :meth:`save_config` is to write.

    Raises:
        ConfigurationError: ``save_to_log_dir`` is False, and the class has no ``save_config`` of its own.
    """

    def __init__(
        self,
        parser: LightningArgumentParser,
        config: Namespace,
        config_filename: str = "config.yaml",
        overwrite: bool = False,
        multifile: bool = False,
        save_to_log_dir: bool = True,
    ) -> None:
        self.parser = parser
        self.config = config
        self.config_filename = config_filename
        self.overwrite = overwrite
        self.multifile = multifile
        self.save_to_log_dir = save_to_log_dir
        self.already_saved = False
        if not save_to_log_dir and type(self).save_config is SaveConfigCallback.save_config:
            raise ConfigurationError(
                f"{type(self).__name__}(save_to_log_dir=False) saves nothing: give it a save_config, leave"
                " save_to_log_dir out, or set LightningCLI(save_config_callback=None)."
            )

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """
        Raises:
            ConflictError: the file is there, from a run before, and ``overwrite`` is False.
        """
        if self.already_saved:
            return
        self.already_saved = True
        if not trainer.is_global_zero:  # what the first worker raises ends the others
            return
        if self.save_to_log_dir:
            self._write(Path(trainer.log_dir))
        self.save_config(trainer, pl_module, stage)

    def save_config(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """For a subclass: save the configuration elsewhere as well. Called on the first worker only, which the others
        do not wait for: no collective in it."""

    def _write(self, folder: Path) -> None:
        path = folder / self.config_filename
        if path.is_file() and not self.overwrite:
            raise ConflictError(
                f"{type(self).__name__}: {path} is there already, from a run before: log into another folder, give"
                " LightningCLI(save_config_kwargs={'overwrite': True}) to replace it, or save_config_callback=None"
                " to save none."
            )
        folder.mkdir(parents=True, exist_ok=True)
        self.parser.save(
            self.config, os.fspath(path), skip_unset=False, overwrite=self.overwrite, multifile=self.multifile
        )

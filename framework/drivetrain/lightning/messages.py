"""What a project says on its first process: under Lightning it is seen without anything being set up."""

from __future__ import annotations

import logging
import sys
from typing import Any

from drivetrain.rank_zero import rank_zero_only

log = logging.getLogger("drivetrain.lightning")


class _StandardError(logging.Handler):
    """Writes to the standard error of the moment."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(self.format(record) + "\n")  # at once: another worker may write, too


# What callbacks report (verbose=True) is under the plugins' name. Who takes the messages is settled here, as at
# Lightning's import: the root logger's handlers where it has some by now; those that a script or Hydra gives it later
# get none.
for each in (log, logging.getLogger("drivetrain_plugins")):
    each.setLevel(logging.INFO)
    if not logging.getLogger().hasHandlers():
        each.addHandler(_StandardError())
        each.propagate = False


@rank_zero_only
def rank_zero_info(*args: Any, stacklevel: int = 2, **kwargs: Any) -> None:
    """``logging``'s ``info``, on the first process."""
    log.info(*args, stacklevel=stacklevel + 1, **kwargs)


@rank_zero_only
def rank_zero_debug(*args: Any, stacklevel: int = 2, **kwargs: Any) -> None:
    """``logging``'s ``debug``, on the first process."""
    log.debug(*args, stacklevel=stacklevel + 1, **kwargs)

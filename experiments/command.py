"""What every script here does around its `main`."""

import os
import sys
from collections.abc import Callable

from absl import logging

from gatedattn.config import ConfigError


def run(main: Callable[[], None]) -> None:
    """What is wrong with what was typed is told in a line, and a reader that leaves (`| head`) gets no traceback."""
    logging.set_verbosity(logging.ERROR)  # Orbax warns of opening a checkpoint read-only, which is what we mean to do
    try:
        main()
        sys.stdout.flush()
    except ConfigError as error:
        sys.exit(f"error: {error}")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)

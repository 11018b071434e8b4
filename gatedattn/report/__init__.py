"""One self-contained HTML page for a run, or several side by side: `python -m gatedattn report DIR [DIR ...]`."""

from gatedattn.report.page import build

__all__ = ["build"]

"""What the paper shows of a model, for any model: `python -m gatedattn analyze MODEL --text=FILE --out=DIR`."""

from gatedattn.analysis.collect import Analysis, analyze_model
from gatedattn.analysis.write import analyze

__all__ = ["Analysis", "analyze", "analyze_model"]

"""RULER (arXiv 2404.06654): how much of a long context a model can use. `python -m gatedattn ruler MODEL --lengths=...`.

Where this differs from https://github.com/NVIDIA/RULER: the haystack is State of the Union speeches (or files given) rather than
Paul Graham's essays; each sample has its own generator, which also shuffles what RULER shuffles alike in every sample; contexts
fill the length to a unit rather than to a step, the tokens to generate always counted in.
"""

from gatedattn.evaluation.ruler.book import Book
from gatedattn.evaluation.ruler.material import Material
from gatedattn.evaluation.ruler.run import evaluate
from gatedattn.evaluation.ruler.samples import Sample, Suite, score
from gatedattn.evaluation.ruler.tasks import TASKS

__all__ = ["TASKS", "Book", "Material", "Sample", "Suite", "evaluate", "score"]

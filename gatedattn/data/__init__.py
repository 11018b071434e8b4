"""Data: sources, tokenizers, packing and batches by step number.

data = load(DataConfig(), seq_len=256, batch_size=8, seed=0)
data.train(step)["tokens"]          # i32[8, 256]; the same for the same seed and step, always
"""

from gatedattn.data.backcopy import Backcopy
from gatedattn.data.loader import Batches, Data, load
from gatedattn.data.packing import Packed, Stream
from gatedattn.data.prefetch import prefetch
from gatedattn.data.tokenizers import Tokenizer

__all__ = ["Backcopy", "Batches", "Data", "Packed", "Stream", "Tokenizer", "load", "prefetch"]

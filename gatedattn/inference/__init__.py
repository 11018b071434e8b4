"""What people do with a trained model's next-token distribution: generate with a cache, and score text."""

from gatedattn.inference.cache import CachePolicy
from gatedattn.inference.decode import Generator, generate
from gatedattn.inference.sample import continuation, stream_text
from gatedattn.inference.sampling import Sampling
from gatedattn.inference.scoring import score

__all__ = ["CachePolicy", "Generator", "Sampling", "continuation", "generate", "score", "stream_text"]

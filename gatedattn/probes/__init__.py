"""What happens inside the heads: arrays in, arrays out."""

from gatedattn.probes.heads import documents_start, measure

__all__ = ["documents_start", "measure"]

"""What happens inside the heads: arrays in, arrays out. Formulas and sources: docs/definitions.md."""

from gatedattn.probes.attention import attention_maps, documents_start
from gatedattn.probes.heads import inspect, measure, sink_rate

__all__ = ["attention_maps", "documents_start", "inspect", "measure", "sink_rate"]

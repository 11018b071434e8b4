"""The same shares from transformers' own attention maps: python -m experiments.pretrained.check FILE.gguf TEXT

Needs pip install -e ".[hf]". Prints the largest difference, over all layers and heads, between `bos_share` of our probe and the mean of the
maps that transformers returns, and between the largest residual activations of each layer, on one row of 128 tokens.
"""

import sys
from pathlib import Path

import jax
import numpy as np
import torch
from flax import nnx
from transformers import AutoModelForCausalLM

from gatedattn import probes
from gatedattn.analysis.collect import rows_of
from gatedattn.interop import models


def main(path: Path, text: Path) -> None:
    model, tokenizer = models.load_model(path)
    tokens = rows_of(text.read_text(), tokenizer, 1, 128)
    found, _ = jax.device_get(nnx.jit(probes.inspect)(model, tokens))
    theirs = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        out = theirs(torch.tensor(tokens, dtype=torch.long), output_attentions=True, output_hidden_states=True)
    share = np.stack([a[0, :, 1:, 0].numpy().mean(-1) for a in out.attentions])
    # The last hidden state of transformers is after the final norm: the layers before it are compared.
    largest = np.array([h.abs().max().item() for h in out.hidden_states[1:-1]])
    print("bos_share: largest difference", np.abs(share - found["bos_share"]).max(), "of", share.max())
    print("activation_max: largest relative difference", np.abs(largest / found["activation_max"][:-1] - 1).max())


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

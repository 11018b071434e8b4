"""Text from a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gatedattn.data import Tokenizer
from gatedattn.inference.cache import CachePolicy
from gatedattn.inference.decode import Generator
from gatedattn.inference.sampling import Sampling
from gatedattn.transformer import Transformer

INCOMPLETE = "\ufffd"  # what decoders put for bytes that are no character, or not one yet


def stream_text(
    model: Transformer,
    tokenizer: Tokenizer,
    prompt: str = "",
    *,
    max_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: Sequence[int] | None = None,
    policy: str | CachePolicy = "full",
) -> Iterator[str]:
    """Pieces of the text that follows BOS and the prompt, as it is made; the prompt is not repeated.

    A character whose last bytes are still to come is held back. `stop`: token ids that end the text; by default the tokenizer's
    EOS tokens, and BOS, which begins another document. For the other settings and what is raised (with the first piece) see
    `inference.generate`.
    """
    sampling = Sampling(temperature, top_k, top_p, seed)
    ids = [tokenizer.bos_id, *map(int, tokenizer.encode(prompt))]
    stop = [tokenizer.bos_id, *tokenizer.eos_ids] if stop is None else stop
    pieces = Generator(model, policy).stream([ids], max_tokens=max_tokens, sampling=sampling, stop=stop)
    # Decoded together with the prompt: SentencePiece drops the space before the first word of what it is given.
    shown = len(tokenizer.decode(ids))
    text = ""
    for piece in pieces:
        ids += [int(token) for token in piece[0] if token >= 0]
        text = tokenizer.decode(ids)
        ready = len(text.rstrip(INCOMPLETE))
        if ready > shown:
            yield text[shown:ready]
            shown = ready
    if len(text) > shown:
        yield text[shown:]


def continuation(tokenizer: Tokenizer, prompt: Sequence[int], new: Sequence[int]) -> str:
    """The text of new tokens, decoded with the prompt's last: SentencePiece drops the space before the first word of what it is given."""
    end = prompt[-16:]
    return tokenizer.decode([*end, *new])[len(tokenizer.decode(end)) :]


def text(
    model: Transformer, tokenizer: Tokenizer, prompt: str = "", *, tokens: int = 60, temperature: float = 0.0, seed: int = 0
) -> str:
    """Up to `tokens` new tokens after BOS and the prompt, as text; the prompt is not repeated."""
    return "".join(stream_text(model, tokenizer, prompt, max_tokens=tokens, temperature=temperature, seed=seed))

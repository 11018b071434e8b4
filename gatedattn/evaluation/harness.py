"""Our models in EleutherAI's lm-evaluation-harness (`pip install lm_eval`): every task it has, offline where its data is.

Log-likelihoods are computed in packed rows: many requests share a row, each a segment of its own, so that short ones cost no padding
and two or three shapes are compiled in all.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx
from tqdm import tqdm

from gatedattn.config import ConfigError
from gatedattn.data.tokenizers import Tokenizer
from gatedattn.evaluation.perplexity import token_losses
from gatedattn.inference import Generator, Sampling, continuation
from gatedattn.sharding import constrain
from gatedattn.transformer import Transformer

try:
    import lm_eval
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
except ImportError:
    raise ConfigError("the harness takes the lm_eval package: pip install -e '.[eval]'") from None

SHORT = 256  # tokens in a row of short requests; longer ones go into rows of 4, 16, ... times as many
Request = tuple[tuple[str, str], list[int], list[int]]  # (texts, context ids, continuation ids)


@functools.partial(jax.jit, static_argnames="graphdef")
def _score(params, batch, *, graphdef):
    """Of each target: its log-probability, and whether no token is likelier."""
    model = nnx.merge(graphdef, params)
    hidden, _ = model.hidden(batch["tokens"], batch["positions"], batch["segment_ids"])
    loss, least = token_losses(hidden, model.unembedding(), batch["targets"])
    return constrain(-loss, ".."), constrain(loss <= least, "..")  # whole on every process


class HarnessModel(TemplateLM):
    """A `Transformer` and its tokenizer as lm_eval's `LM`.

    Texts are conditioned on BOS when a task gives no context; contexts that are given get none (as lm_eval's Hugging Face backend
    does for tokenizers without `add_bos_token`). Contexts too long are cut from the left.

    Args:
        max_length: tokens the model may look at: its learned positions or `max_seq_len` by default.
        batch_tokens: tokens in a batch of log-likelihoods; batch_size: prompts in a batch of generation.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        *,
        max_length: int | None = None,
        batch_tokens: int = 4096,
        batch_size: int = 8,
    ):
        super().__init__()
        self.text, self.max_length = tokenizer, max_length or model.config.max_seq_len
        self.batch_tokens, self.batch_size = max(batch_tokens, SHORT), batch_size
        self.renew(model)

    def renew(self, model: Transformer) -> None:
        """Go on with other parameters of the same model: nothing is compiled anew."""
        self.model = model
        self.graphdef, params = nnx.split(model)
        self.params = nnx.as_pure(params)
        self._generator: Generator | None = None

    @property
    def eot_token_id(self) -> int:
        return (*self.text.eos_ids, self.text.bos_id)[0]

    @property
    def prefix_token_id(self) -> int:
        return self.text.bos_id

    @property
    def tokenizer_name(self) -> str:
        return self.text.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        return self.text.encode(string).tolist()

    def _loglikelihood_tokens(self, requests: Sequence[Request], disable_tqdm: bool = False, **_) -> list[tuple[float, bool]]:
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        sizes = [min(len(context) + len(continuation) - 1, self.max_length) for _, context, continuation in requests]
        with tqdm(total=len(requests), desc="log-likelihoods", disable=disable_tqdm or None, file=sys.stderr) as bar:
            for length in self._lengths(max(sizes, default=0)):
                mine = [i for i, size in enumerate(sizes) if size <= length and (length == SHORT or size > length // 4)]
                for rows, places in self._rows(requests, mine, length):
                    logp, greedy = map(np.asarray, _score(self.params, rows, graphdef=self.graphdef))
                    for i, row, here in places:
                        result = (float(logp[row, here].sum(dtype=np.float64)), bool(greedy[row, here].all()))
                        found[i] = result
                        if requests[i][0]:
                            self.cache_hook.add_partial("loglikelihood", requests[i][0], result)
                    bar.update(len(places))
        return found

    def _lengths(self, longest: int) -> list[int]:
        lengths = [SHORT]
        while lengths[-1] < longest:
            lengths.append(lengths[-1] * 4)
        return lengths

    def _rows(self, requests: Sequence[Request], mine: list[int], length: int):
        """Batches of rows, and where in them the continuation of each request stands: (request, row, columns)."""
        batch = max(self.batch_tokens // length, 1)
        names = ("tokens", "targets", "positions", "segment_ids")
        rows, places, row, used, segment = _empty(names, batch, length), [], 0, 0, 0
        for i in mine:
            _, context, continuation = requests[i]
            ids = np.array([*context, *continuation][-(self.max_length + 1) :])
            size, counted = len(ids) - 1, min(len(continuation), self.max_length)
            if used + size > length:
                row, used, segment = row + 1, 0, 0
            if row == batch:
                yield rows, places
                rows, places, row = _empty(names, batch, length), [], 0
            here, segment = slice(used, used + size), segment + 1
            for name, values in zip(names, (ids[:-1], ids[1:], np.arange(size), segment), strict=True):
                rows[name][row, here] = values
            used += size
            places.append((i, row, slice(used - counted, used)))
        if places:
            yield rows, places

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        windows, owner = [], []
        for i, request in enumerate(requests):
            for pair in utils.get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, context_len=1
            ):
                windows.append((None, *utils.make_disjoint_window(pair)))
                owner.append(i)
        found = [0.0] * len(requests)
        for i, (logp, _) in zip(owner, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            found[i] += logp
        for request, total in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return found

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        self._generator = self._generator or Generator(self.model)
        prompts = [self.tok_encode(request.args[0]) or [self.prefix_token_id] for request in requests]
        found = [""] * len(requests)
        # Alike settings together, and prompts of like length: a batch is as slow as its longest.
        order = sorted(range(len(requests)), key=lambda i: (repr(requests[i].args[1]), -len(prompts[i])))
        with tqdm(total=len(requests), desc="texts", disable=disable_tqdm or None, file=sys.stderr) as bar:
            while order:
                settings = requests[order[0]].args[1]
                batch = [i for i in order[: self.batch_size] if requests[i].args[1] == settings]
                order = order[len(batch) :]
                for i, text in zip(batch, self._texts([prompts[i] for i in batch], settings), strict=True):
                    found[i] = text
                    self.cache_hook.add_partial("generate_until", requests[i].args, text)
                bar.update(len(batch))
        return found

    def _texts(self, prompts: list[list[int]], settings: dict) -> list[str]:
        until = settings.get("until") or []
        until = [until] if isinstance(until, str) else until
        limit = int(settings.get("max_gen_toks", 256))
        sampling = Sampling(
            float(settings.get("temperature", 0.0)) if settings.get("do_sample") else 0.0,
            int(settings.get("top_k", 0)),
            float(settings.get("top_p", 1.0)),
        )
        prompts = [prompt[-max(self.max_length - limit, 1) :] for prompt in prompts]
        new: list[list[int]] = [[] for _ in prompts]
        stop = [self.eot_token_id]
        for piece in self._generator.stream(prompts, max_tokens=limit, sampling=sampling, stop=stop):
            for tokens, row in zip(new, piece.tolist(), strict=True):
                tokens += [token for token in row if token >= 0]
            texts = [continuation(self.text, p, n) for p, n in zip(prompts, new, strict=True)]
            if until and all(any(end in text for end in until) for text in texts):
                break
        return [_before(text, until) for text in texts]


def _empty(names: Sequence[str], batch: int, length: int) -> dict[str, np.ndarray]:
    return {name: np.zeros((batch, length), np.int32) for name in names}


def _before(text: str, ends: Sequence[str]) -> str:
    return text[: min((at for end in ends if end and (at := text.find(end)) >= 0), default=len(text))]


class Tasks:
    """Tasks by name, looked up once. `include_path`: a folder with task files of one's own. Raises `ConfigError` for tasks that there
    are not."""

    def __init__(self, names: Sequence[str], include_path: str | None = None):
        from lm_eval.tasks import TaskManager

        self.names, self.manager = list(names), TaskManager(include_path=include_path)
        if unknown := [task for task in self.names if not self.manager.match_tasks([task])]:
            raise ConfigError(f"tasks: lm_eval knows no {', '.join(unknown)}; `lm_eval ls tasks` lists them")

    def generating(self) -> list[str]:
        """Those that take text from the model, rather than log-likelihoods. Reads all the tasks' data."""
        from lm_eval.tasks import get_task_dict

        found, stack = [], [get_task_dict(self.names, self.manager)]
        while stack:
            for name, task in stack.pop().items():
                if isinstance(task, dict):
                    stack.append(task)
                elif task.OUTPUT_TYPE == "generate_until":
                    found.append(str(name))
        return found

    def evaluate(self, model: HarnessModel, **options) -> dict:
        """lm_eval's results."""
        return lm_eval.simple_evaluate(model, tasks=self.names, task_manager=self.manager, bootstrap_iters=0, **options)


def evaluate(model: HarnessModel, tasks: Sequence[str], *, include_path: str | None = None, **options) -> dict:
    """lm_eval's results of these tasks, see `Tasks`."""
    return Tasks(tasks, include_path).evaluate(model, **options)

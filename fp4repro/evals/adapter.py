"""Any `EvalModel` as an `LM` of lm-eval.

Requests with the same context are scored together, and of their continuations only what differs is
computed: ten letters of one token each are one forward pass, whose last logits hold them all.
"""

from collections.abc import Sequence

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from fp4repro.evals.model import EvalModel

ROLLING = 1024  # tokens of a window of running text at most: its logits take that times the vocabulary
GENERATED = 2048  # tokens at most where a task does not say


class Adapter(TemplateLM):
    """What lm-eval asks, answered by the model; log likelihoods are natural and in FP64."""

    def __init__(self, model: EvalModel) -> None:
        super().__init__()
        self.model = model

    @property
    def eot_token_id(self) -> int:
        return self.model.end

    @property
    def prefix_token_id(self) -> int:
        return self.model.begin

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        return self.model.encode(string)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple], disable_tqdm: bool = False, **_: object
    ) -> list[tuple[float, bool]]:
        """(log likelihood, whether greedy) of each (texts, context tokens, continuation tokens)."""
        groups: dict[tuple, list[int]] = {}
        for index, (_, context, _) in enumerate(requests):
            groups.setdefault(tuple(context), []).append(index)
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        for context, members in tqdm(
            groups.items(), desc=self.model.name, disable=disable_tqdm or None, leave=False
        ):
            tails = list(dict.fromkeys(tuple(requests[index][2][:-1]) for index in members))
            scored = [out.double().log_softmax(-1) for out in self.model.logits(context, tails)]
            of_tail = dict(zip(tails, scored, strict=True))
            for index in members:
                continuation = requests[index][2]
                given = of_tail[tuple(continuation[:-1])][: len(continuation)]
                wanted = torch.tensor(continuation, device=given.device)
                total = given.gather(1, wanted[:, None]).sum().item()
                answers[index] = total, bool((given.argmax(-1) == wanted).all())
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log likelihood of whole texts, in windows that do not overlap."""
        pieces, owners = [], []
        for owner, (text,) in enumerate(request.args for request in requests):
            length = min(self.model.context, ROLLING)
            windows = get_rolling_token_windows(self.model.encode(text), self.model.begin, length, 1)
            for window in map(make_disjoint_window, windows):
                pieces.append(("", *window))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (value, _) in zip(owners, self._loglikelihood_tokens(pieces, disable_tqdm), strict=True):
            totals[owner] += value
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy text up to the first stop string, the end of a text or the limit."""
        return [
            self._generate(*request.args)
            for request in tqdm(requests, desc=self.model.name, disable=disable_tqdm or None, leave=False)
        ]

    def _generate(self, prompt: str, settings: dict) -> str:
        until = settings.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        tokens: list[int] = []
        text = ""
        limit = settings.get("max_gen_toks", GENERATED)
        for token in self.model.greedy(self.model.encode(prompt), min(limit, self.model.context - 1)):
            if token == self.model.end:
                break
            tokens.append(token)
            text = self.model.decode(tokens)
            found = [text.index(stop) for stop in stops if stop in text]
            if found:
                return text[: min(found)]
        return text

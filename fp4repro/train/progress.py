"""Progress of a run on standard error: a bar on a terminal, otherwise a line every so often."""

import sys
import time

from tqdm import tqdm

_LINES = 10  # a run without a terminal


class Progress:
    """Loss, tokens a second and time left of a run that begins at step `start`."""

    def __init__(self, label: str, start: int, steps: int, tokens_per_step: int, every: int | None):
        self.label = label
        self.start = start
        self.steps = steps
        self.tokens_per_step = tokens_per_step
        self.every = every or -(-steps // _LINES)
        self.began = time.perf_counter()
        self.bar = tqdm(
            desc=label,
            total=steps * tokens_per_step,
            initial=start * tokens_per_step,
            unit=" tokens",
            unit_scale=True,
            disable=None,  # where standard error is no terminal
        )

    def update(self, step: int, loss: float) -> None:
        """Report that `step` steps are done, the last one with this loss."""
        self.bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
        self.bar.update(self.tokens_per_step)
        if self.bar.disable and (step % self.every == 0 or step == self.steps):
            rate = self.tokens_per_second(step)
            left = tqdm.format_interval((self.steps - step) * self.tokens_per_step / rate)
            self.say(f"step {step}/{self.steps}, loss {loss:.4f}, {rate:.0f} tokens/s, {left} left")

    def say(self, sentence: str) -> None:
        """One line, without tearing the bar."""
        self.bar.write(f"{self.label}: {sentence}", file=sys.stderr)

    def tokens_per_second(self, step: int) -> float:
        """Mean since this process began."""
        return (step - self.start) * self.tokens_per_step / (time.perf_counter() - self.began)

    def close(self) -> None:
        self.bar.close()

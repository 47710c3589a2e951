"""The training control of attention for a reader: losses of `fullstack.attention_control` by setting."""

from collections.abc import Sequence

from fp4repro.report.attention_tables import HIGH, LOSS, LOSS_GAP
from fp4repro.report.markdown import aligned
from fp4repro.report.schema import Row, split_setting
from fp4repro.report.stats import estimate
from fp4repro.report.tables import ONE_SEED, origin

READING = (
    "A tiny byte language model, all of it in float32 but attention's operands. In the control P of the "
    "backward is not the forward's, to which D belongs, so that rows of dS do not sum to zero, although the "
    "gradient of one step is nearer to the exact one than that of `full-stack`. Gaps are to the run in high "
    "precision of the same seed, in nats a byte: positive means worse."
)


def by_setting(rows: Sequence[Row]) -> dict[str, dict[str, dict[int, Row]]]:
    """setting -> metric -> seed -> row."""
    found: dict[str, dict[str, dict[int, Row]]] = {}
    for row in rows:
        setting, seed = split_setting(row.setting)
        found.setdefault(setting, {}).setdefault(row.metric, {})[seed] = row
    return found


def attention_control_markdown(rows: Sequence[Row]) -> str:
    scale, device, torch, commit = origin(rows)
    found = by_setting(rows)
    lines = [
        [
            setting,
            _over_seeds(of[LOSS], ".4f"),
            "" if setting == HIGH else _over_seeds(of.get(LOSS_GAP, {}), "+.4f"),
        ]
        for setting, of in found.items()
    ]
    sizes = dict.fromkeys(row.note for row in rows if row.metric == LOSS and row.value is not None)
    parts = [f"# Attention whose D is another P's, scale `{scale}`", READING]
    parts.append("\n".join(aligned(["attention", "validation loss", "gap"], lines)))
    parts.append(f"{'; '.join(sizes)}. Measured on {device}; torch {torch}; commit {commit}.")
    return "\n\n".join(parts) + "\n"


def _over_seeds(rows: dict[int, Row], form: str) -> str:
    values = [row.value for row in rows.values() if row.value is not None]
    lost = f"{len(rows) - len(values)} of {len(rows)} diverged" if len(values) < len(rows) else ""
    if not values:
        return lost or "not run"
    got = estimate(values)
    ends = f"({ONE_SEED})" if got.low is None else f"[{got.low:{form}}, {got.high:{form}}]"
    return ", ".join(filter(None, [f"{got.mean:{form}} {ends}", lost]))

"""Shards and mixtures of sources: real datasets from local files, without a network, against brute force."""

import dataclasses
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from fp4repro.config import Phase, load_scale
from fp4repro.data import shards as shards_module
from fp4repro.data.batches import Batches
from fp4repro.data.documents import held_out
from fp4repro.data.mixture import ROUND, Mixture, batches
from fp4repro.data.permutation import Permutation
from fp4repro.data.shards import Index, Shards, shard_path
from fp4repro.data.tokenizer import end_of_text, load_tokenizer, train_tokenizer
from fp4repro.data.tokens import open_tokens, prepare, settings
from fp4repro.errors import Fp4ReproError
from fp4repro.train.protocols import scale_of

pytest.importorskip("datasets")
SMOKE = Path(__file__).parents[1] / "configs" / "scales" / "smoke.yaml"
SIZE = 2048  # tokens of a shard
PHASES = (Phase(0.5, {"web": 0.6, "code": 0.4}), Phase(1.0, {"web": 0.25, "code": 0.75}))


def lines(seed: int, count: int, letters: str) -> list[str]:
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(list(letters), rng.integers(5, 400))) for _ in range(count)]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """`web` as JSON lines, `code` as parquet."""
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path_factory.mktemp("texts")
    web, code = lines(0, 300, "etaoin shrdlué\n"), lines(1, 200, "abc(){}=\n")
    (folder / "web.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in web), encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.table({"content": code, "stars": [1] * 200}), folder / "code.parquet")
    return folder, {"web": web, "code": code}


@pytest.fixture(scope="module")
def scale(texts):
    folder, _ = texts
    web = {"name": "json", "data_files": str(folder / "web.jsonl"), "split": "train", "text_column": "text"}
    code = {"name": "parquet", "data_files": str(folder / "code.parquet"), "split": "train"}
    smoke = load_scale(SMOKE)
    sources = {"web": web, "code": code | {"text_column": "content"}}
    training = dataclasses.replace(
        smoke.training, batch=4, context=64, validation_tokens=128, tokens=4 * 64 * 700, phases=PHASES
    )
    return dataclasses.replace(
        smoke,
        corpus={"sources": sources, "shard_tokens": SIZE},
        corpus_bytes=dataclasses.replace(smoke.corpus_bytes, train=None, validation=None),
        tokenizer=dataclasses.replace(smoke.tokenizer, vocabulary=384),
        training=training,
    )


@pytest.fixture(scope="module")
def made(scale, tmp_path_factory):
    out = tmp_path_factory.mktemp("made")
    prepare(scale, out)
    return out


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# Shards


def test_shards_hold_the_rows_in_order_each_once(scale, texts, made):
    data = open_tokens(made, scale)
    tokenizer = load_tokenizer(made / "tokenizer.json")
    for name, rows in texts[1].items():
        whole = data.train[name][slice(0, len(data.train[name]))]
        documents = np.split(whole, np.flatnonzero(whole == end_of_text(tokenizer)) + 1)[:-1]
        found = [tokenizer.decode(document[:-1].tolist()) for document in documents]
        assert found == [text for number, text in enumerate(rows) if not held_out(f"train/{number}")]
        sizes = [p.stat().st_size // 2 for p in sorted((made / "shards" / name).glob("*.bin"))]
        assert len(sizes) > 3 and set(sizes[:-1]) == {SIZE} and sizes[-1] <= SIZE
    summary = json.loads((made / "data.json").read_text())
    assert summary["settings"] == settings(scale)
    kept = [t for n, t in enumerate(texts[1]["web"]) if not held_out(f"train/{n}")]
    assert summary["train"]["sources"]["web"]["bytes"] == sum(len(t.encode()) for t in kept)
    # Held-out rows of both, and no others.
    held = [t for rows in texts[1].values() for n, t in enumerate(rows) if held_out(f"train/{n}")]
    assert summary["validation"]["documents"] == len(held)
    assert summary["validation"]["bytes"] == sum(len(t.encode()) for t in held)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("when", [1, 2, 4, 5, 7])
def test_a_killed_tokenisation_goes_on_and_gives_the_same_bytes(scale, made, tmp_path, monkeypatch, when):
    """Killed before the index has the shard, and with a line of the index cut short."""
    add, calls = Index.add, []

    def fatal(index, shard):
        calls.append(shard)
        if len(calls) == when:
            with open(index.path, "a") as file:
                file.write('{"tokens": 20')
            raise Killed
        add(index, shard)

    monkeypatch.setattr(Index, "add", fatal)
    with pytest.raises(Killed):
        prepare(scale, tmp_path)
    assert not (tmp_path / "data.json").exists()
    monkeypatch.setattr(Index, "add", add)
    written = []
    write = shards_module.atomic_write
    monkeypatch.setattr(shards_module, "atomic_write", lambda path: written.append(path.name) or write(path))
    prepare(scale, tmp_path)
    assert files_of(tmp_path) == files_of(made)
    whole = sum(len(list((made / "shards" / name).glob("*.bin"))) for name in ("web", "code"))
    assert sum(name.endswith(".bin") for name in written) == whole - (when - 1)  # finished ones stay


def test_nothing_is_written_twice_and_what_is_lost_is_made_again(scale, made, tmp_path):
    import shutil

    out = tmp_path / "out"
    shutil.copytree(made, out)
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*.bin") if p.parent.name == "web"}
    prepare(scale, out)
    assert {p: p.stat().st_mtime_ns for p in before} == before
    cut = shard_path(out / "shards" / "web", 4)
    cut.write_bytes(cut.read_bytes()[:-1])
    damaged, lost = shard_path(out / "shards" / "web", 2), shard_path(out / "shards" / "code", 1)
    good = damaged.read_bytes()
    damaged.write_bytes(bytes(reversed(good)))
    lost.unlink()
    with pytest.raises(Fp4ReproError, match=r"000004\.bin is missing or has not the \d+ bytes"):
        open_tokens(out, scale)
    prepare(scale, out)
    assert (
        lost.exists() and cut.stat().st_size > 1 and damaged.read_bytes() != good
    )  # sizes alone do not tell
    prepare(scale, out, verify=True)
    assert files_of(out) == files_of(made)


def test_shards_of_another_tokenizer_are_made_anew(scale, made, tmp_path):
    other = dataclasses.replace(scale, tokenizer=dataclasses.replace(scale.tokenizer, vocabulary=512))
    prepare(other, tmp_path)
    prepare(scale, tmp_path)
    assert files_of(tmp_path) == files_of(made)


def test_a_source_ends_at_its_bytes(scale, tmp_path):
    sources = {name: entry | {"bytes": 9000} for name, entry in scale.corpus["sources"].items()}
    short = dataclasses.replace(scale, corpus=scale.corpus | {"sources": sources})
    summary = prepare(short, tmp_path)
    for source in summary["train"]["sources"].values():
        assert 8000 < source["bytes"] <= 9000


def test_a_source_shorter_than_a_sequence_is_one_sentence(scale, tmp_path):
    sources = scale.corpus["sources"]
    short = scale.corpus | {"sources": sources | {"code": sources["code"] | {"bytes": 1}}}
    with pytest.raises(
        Fp4ReproError, match="its code text has 0 tokens, and scale smoke needs 65 for one seq"
    ):
        prepare(dataclasses.replace(scale, corpus=short), tmp_path)


def test_slices_cross_shards(tmp_path):
    tokens = np.arange(1000, dtype="<u2")
    for number, start in enumerate(range(0, 1000, 300)):
        tokens[start : start + 300].tofile(shard_path(tmp_path, number))
    row = Shards(tmp_path, [300, 300, 300, 100], np.dtype("<u2"))
    assert len(row) == 1000
    for start, stop in ((0, 1000), (299, 301), (299, 901), (600, 900), (950, 1000)):
        assert (row[start:stop] == tokens[start:stop]).all()


# Permutation


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 16, 17, 1000, 4097])
def test_a_permutation_has_each_place_once(n):
    order = Permutation(n, np.random.default_rng(0))[np.arange(n)]
    assert sorted(order.tolist()) == list(range(n))


def test_permutations_are_shuffles():
    """Of 1000: hardly a fixed point, no run kept, and no correlation with the identity; large n at once."""
    n, seeds = 1000, 40
    orders = np.stack([Permutation(n, np.random.default_rng(s))[np.arange(n)] for s in range(seeds)])
    fixed = (orders == np.arange(n)).sum() / seeds
    assert 0.3 < fixed < 2  # one expected
    neighbours = (np.diff(orders, axis=1) == 1).sum() / seeds
    assert 0.3 < neighbours < 2  # one expected
    correlations = [np.corrcoef(order, np.arange(n))[0, 1] for order in orders]
    assert abs(np.mean(correlations)) < 4 / np.sqrt(n * seeds) and np.std(correlations) < 2 / np.sqrt(n)
    assert not (orders[0] == orders[1]).mean() > 0.01
    large = 1_220_703_125  # windows of 8,192 in 10 T tokens
    some = Permutation(large, np.random.default_rng(0))[np.arange(10_000)]
    assert len(set(some.tolist())) == 10_000 and some.min() >= 0 and some.max() < large
    assert some.mean() / large == pytest.approx(0.5, abs=0.02)


# Mixtures


@pytest.fixture(scope="module")
def mixture(scale, made):
    return Mixture(open_tokens(made, scale).train, scale.training, seed=3)


def test_a_mixture_has_each_phases_shares(scale, mixture):
    steps, batch = scale.training.steps, scale.training.batch
    counts = [Counter(), Counter()]
    for step in range(steps):
        counts[step >= steps // 2].update(source for source, _ in mixture.sequences(step))
    half = steps // 2 * batch  # 1400 sequences: a thousand is exact, the rest is drawn
    for number, phase in enumerate(PHASES):
        share = phase.mixture["web"]
        assert abs(counts[number][0] - share * half) <= 4 * np.sqrt(400 * share * (1 - share))
    first = [s for step in range(ROUND // batch) for s, _ in mixture.sequences(step)]
    assert Counter(first) == {0: 600, 1: 400}
    assert Counter(first[:100]) != {0: 60, 1: 40} or Counter(first[100:200]) != {0: 60, 1: 40}


def test_every_sequence_is_the_next_of_its_source_over_the_whole_run(scale, mixture):
    """Counted one after the other, as a reader without arithmetic would."""
    seen = Counter()
    for step in range(scale.training.steps):
        for source, number in mixture.sequences(step):
            assert number == seen[source]
            seen[source] += 1
    # Each pass over a source sees each window once, whatever phase it is in.
    windows = mixture.windows[1]
    starts = [mixture._start(1, number) for number in range(windows)]
    assert len({start % 64 for start in starts}) == 1 and len(set(starts)) == windows
    assert seen[1] > 2 * windows  # so that there are several
    assert [mixture._start(1, windows + n) for n in range(windows)] != starts


def test_batches_are_windows_of_their_sources_and_a_function_of_seed_and_step(scale, made, mixture):
    rows = {name: row[slice(0, len(row))] for name, row in open_tokens(made, scale).train.items()}
    once = {step: mixture[step] for step in (0, 1, 349, 350, 699)}
    again = batches(open_tokens(made, scale).train, scale.training, seed=3)
    for step in (699, 0, 350, 1, 349):
        x, y = again[step]
        assert x.shape == (4, 64) and x.dtype == np.int64 and (x[:, 1:] == y[:, :-1]).all()
        assert all((a == b).all() for a, b in zip(once[step], (x, y), strict=True))
        for (source, _), tokens in zip(mixture.sequences(step), x, strict=True):
            name = ("web", "code")[source]
            assert tokens.astype("<u2").tobytes() in rows[name].tobytes()
    assert (Mixture(open_tokens(made, scale).train, scale.training, seed=4)[0][0] != once[0][0]).any()


def test_other_micro_batches_and_ranks_see_the_same_sequences(scale, made, mixture):
    data = open_tokens(made, scale).train
    other = Mixture(data, dataclasses.replace(scale.training, accumulate=4), seed=3)
    assert all((other[s][0] == mixture[s][0]).all() for s in (0, 5, 400))


def test_one_row_of_tokens_has_the_batches_that_it_had(scale):
    tokens = np.arange(5000, dtype=np.uint16)
    training = dataclasses.replace(scale.training, phases=())
    assert (batches(tokens, training, 1)[7][0] == Batches(tokens, 4, 64, 1)[7][0]).all()


def test_trunks_and_branches_are_in_the_phase_of_the_whole_run(scale):
    whole = dataclasses.replace(
        scale, ablations=dataclasses.replace(scale.ablations, branch_from=0.4, branch_steps=140)
    )
    trunk, branch = (scale_of(whole, name).training for name in ("trunk", "branches"))
    assert (trunk.steps, branch.steps) == (280, 420)
    assert trunk.phases == (Phase(1.0, PHASES[0].mixture),)
    assert [round(p.until * branch.steps) for p in branch.phases] == [350, 420]
    assert [p.mixture for p in branch.phases] == [p.mixture for p in PHASES]


# Tokenizers by name


def test_a_tokenizer_by_name_is_taken_as_it_is(scale, texts, tmp_path):
    trained = train_tokenizer(texts[1]["web"], 320)
    trained.save(str(tmp_path / "named.json"))
    named = dataclasses.replace(scale.tokenizer, vocabulary=384, name=str(tmp_path / "named.json"))
    summary = prepare(dataclasses.replace(scale, tokenizer=named), tmp_path / "out")
    data = open_tokens(tmp_path / "out", dataclasses.replace(scale, tokenizer=named))
    assert data.vocabulary == 384 and max(data.validation) < 320
    assert (data.token_bytes[320:] == 0).all()
    assert load_tokenizer(tmp_path / "out" / "tokenizer.json").get_vocab() == trained.get_vocab()
    assert data.token_bytes[data.validation].sum() == summary["validation"]["bytes"]


def test_tokenizers_that_cannot_serve_are_one_sentence(scale, texts, tmp_path):
    from tokenizers import Tokenizer, models, normalizers

    path = tmp_path / "named.json"
    settings = dataclasses.replace(scale.tokenizer, vocabulary=384, name=str(path))
    scale = dataclasses.replace(scale, tokenizer=settings)

    def said(tokenizer) -> str:
        tokenizer.save(str(path))
        with pytest.raises(Fp4ReproError) as caught:
            prepare(scale, tmp_path / "out")
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "has 512 entries: raise tokenizer.vocabulary, now 384" in said(
        train_tokenizer(texts[1]["web"], 512)
    )
    assert "is not byte-level" in said(Tokenizer(models.BPE({"▁a": 0, "</s>": 1}, [])))
    folding = train_tokenizer(texts[1]["web"], 320)
    folding.normalizer = normalizers.Lowercase()
    assert "is not byte-level or changes the text" in said(folding)
    endless = Tokenizer(models.BPE({"a": 0}, []))
    assert "has no entry that ends a text" in said(endless)

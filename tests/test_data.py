"""Corpora, tokenizer, token files and batches, against counts made by hand and brute force."""

import dataclasses
import json
import os
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from fp4repro.config import CorpusBytes, Tokenizer, load_scale
from fp4repro.data.__main__ import main
from fp4repro.data.batches import Batches, evenly
from fp4repro.data.corpus import load_corpus
from fp4repro.data.documents import Document, cut, held_out
from fp4repro.data.tokenizer import END_OF_TEXT, load_tokenizer, token_bytes, train_tokenizer
from fp4repro.data.tokens import open_tokens, prepare
from fp4repro.errors import Fp4ReproError, run_stage

SMOKE = Path(__file__).parents[1] / "configs" / "scales" / "smoke.yaml"
ALL = CorpusBytes(train=None, validation=None)

_letters = np.random.default_rng(0).choice(list("etaoin shrdlu\n,.éœ潮"), 4000)
PROSE = "".join(_letters) + "\n"


@pytest.fixture
def texts(tmp_path):
    """Three documents to train on and one to hold out."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text(f"{number} {PROSE}{END_OF_TEXT}\n", encoding="utf-8")
    (folder / "held.txt").write_text(PROSE + "held\r\n", encoding="utf-8", newline="")
    return folder


@pytest.fixture
def scale(texts):
    smoke = load_scale(SMOKE)
    return dataclasses.replace(
        smoke,
        corpus={"files": [str(texts / "*.txt")], "validation": [str(texts / "held.txt")]},
        corpus_bytes=ALL,
        tokenizer=dataclasses.replace(smoke.tokenizer, vocabulary=384),
        training=dataclasses.replace(smoke.training, batch=2, context=64, validation_tokens=128),
    )


# Corpora


def test_files_are_whole_documents_in_a_fixed_order(texts):
    corpus = load_corpus({"files": [str(texts / "*")], "validation": [str(texts / "h*")]}, ALL)
    assert [d.name for d in corpus.train] == ["0.txt", "1.txt", "2.txt"]
    assert [d.name for d in corpus.validation] == ["held.txt"]
    assert corpus.validation[0].text == (texts / "held.txt").read_bytes().decode()
    assert str(texts) not in corpus.description


def test_relative_paths_and_globs_are_of_the_working_folder(texts, monkeypatch):
    monkeypatch.chdir(texts.parent)
    corpus = load_corpus({"files": ["**/*.txt"], "validation": ["./texts/0.txt"]}, ALL)
    assert [d.name for d in corpus.train] == ["1.txt", "2.txt", "held.txt"]


def test_a_path_with_brackets_is_a_path(texts):
    (texts / "a[0].txt").write_text("x")
    entry = {"files": [str(texts / "a[0].txt")], "validation": [str(texts / "held.txt")]}
    assert [d.name for d in load_corpus(entry, ALL).train] == ["a[0].txt"]


@pytest.mark.parametrize(
    ("files", "validation", "expected"),
    [
        (["none-*.txt"], ["held.txt"], "none-*.txt' matches no file"),
        (["none.txt"], ["held.txt"], "none.txt' is no file"),
        (["*.txt"], ["none.txt"], "none.txt' is no file"),
        (["*.txt"], ["*.txt"], "all files of .* are held out"),
        (["empty"], ["held.txt"], "the corpus is empty: .* gives no train text"),
        (["0.txt"], ["empty"], "the corpus is empty: .* gives no validation text"),
        (["latin"], ["held.txt"], r"latin is not UTF-8 text \(byte 3 cannot be decoded\)"),
    ],
)
def test_bad_files_are_one_sentence(texts, files, validation, expected):
    (texts / "empty").write_text(" \n")
    (texts / "latin").write_bytes("caf\xe9 au lait".encode("latin-1"))
    entry = {
        "files": [str(texts / f) for f in files],
        "validation": [str(texts / f) for f in validation],
    }
    with pytest.raises(Fp4ReproError, match=expected.replace("*.txt'", r"\*.txt'")) as caught:
        load_corpus(entry, ALL)
    assert "\n" not in str(caught.value)


def test_the_books_of_the_variable(tmp_path, monkeypatch):
    books = tmp_path / "standard_ebooks"
    books.mkdir()
    for name in ("a_middlemarch", "b_emma", "c_the-voyage-of-the-beagle", "d_the-origin"):
        (books / f"{name}.txt").write_text(name)
    monkeypatch.setenv("FP4REPRO_DATA", str(tmp_path))
    corpus = load_corpus("default", ALL)
    assert [d.text for d in corpus.validation] == ["a_middlemarch", "c_the-voyage-of-the-beagle"]
    assert [d.text for d in corpus.train] == ["b_emma", "d_the-origin"]


def test_the_variable_without_texts_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("FP4REPRO_DATA", str(tmp_path))
    with pytest.raises(Fp4ReproError, match=r"FP4REPRO_DATA names .* no standard_ebooks/\*\.txt"):
        load_corpus("default", ALL)


def test_the_real_books():
    folder = os.environ.get("FP4REPRO_DATA")
    if not folder:
        pytest.skip("FP4REPRO_DATA is not set")
    corpus = load_corpus("default", CorpusBytes(train=100_000, validation=10_000))
    assert 80_000 < sum(d.nbytes for d in corpus.train) <= 100_000
    assert [d.name.partition("_")[2] for d in corpus.validation] == [
        "the-voyage-of-the-beagle.txt",
        "middlemarch.txt",
    ]


def test_standard_library_without_the_variable(monkeypatch):
    monkeypatch.delenv("FP4REPRO_DATA", raising=False)
    corpus = load_corpus("default", ALL)
    train = {d.name: d for d in corpus.train}
    held = {d.name: d for d in corpus.validation}
    assert not train.keys() & held.keys()
    both = train | held
    assert both["textwrap.py"].text == Path(__import__("textwrap").__file__).read_text()
    assert "json/decoder.py" in both and "builtins" in both
    assert "Return the absolute value of the argument." in both["builtins"].text
    assert not [name for name in both if "site-packages" in name or name.startswith("test/")]
    assert 0.02 < len(held) / len(both) < 0.12  # about one in 16
    assert all(held_out(name) for name in held)


def test_standard_library_is_the_same_each_time():
    assert load_corpus("python-stdlib", ALL) == load_corpus("python-stdlib", ALL)


def test_cut_takes_the_same_share_of_each_document():
    documents = (Document("a", "é\n" * 500), Document("b", "xyz\n" * 1000), Document("c", "é" * 50))
    total = 1500 + 4000 + 100
    short = cut(documents, 600)
    # Of 160, 428 and 10 bytes.
    assert [d.text for d in short] == ["é\n" * 53, "xyz\n" * 107, "é" * 5]
    assert sum(d.nbytes for d in short) <= 600
    assert cut(documents, total) == documents
    assert cut(documents, None) == documents


def dataset(monkeypatch, splits):
    """Puts a `datasets` module in place that serves rows; returns the calls that it gets."""
    calls = []

    def load_dataset(name, config, **options):
        calls.append((name, config, options))
        return iter_again(splits[options["split"]])

    class iter_again(list):
        pass

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    return calls


def test_dataset_with_its_own_validation_split(monkeypatch):
    rows = [{"text": f"row {n}\n", "url": "x"} for n in range(100)]
    calls = dataset(monkeypatch, {"train": rows, "test": rows[:3]})
    entry = {
        "name": "some/set",
        "config": "en",
        "revision": "abc",
        "split": "train",
        "validation_split": "test",
        "text_column": "text",
    }
    corpus = load_corpus({"huggingface": entry}, CorpusBytes(train=20, validation=None))
    assert [d.text for d in corpus.train] == ["row 0\n", "row 1\n", "row 2\n", "ro"]
    assert [d.text for d in corpus.validation] == ["row 0\n", "row 1\n", "row 2\n"]
    assert calls[0] == ("some/set", "en", {"split": "train", "streaming": True, "revision": "abc"})
    assert "some/set at abc" in corpus.description


def test_dataset_without_one_holds_rows_out(monkeypatch):
    dataset(monkeypatch, {"train": [{"body": f"{n:04}\n"} for n in range(1000)]})
    entry = {"name": "s", "split": "train", "text_column": "body"}
    corpus = load_corpus({"huggingface": entry}, ALL)
    train, held = ({d.text for d in part} for part in (corpus.train, corpus.validation))
    assert len(train | held) == 1000 and not train & held
    assert 30 < len(held) < 100


def test_dataset_errors_are_one_sentence(monkeypatch):
    entry = {"name": "s", "split": "train", "text_column": "text"}
    dataset(monkeypatch, {"train": [{"body": "x"}]})
    with pytest.raises(Fp4ReproError, match="no text in a column 'text'; its columns are body"):
        load_corpus({"huggingface": entry}, ALL)
    with pytest.raises(Fp4ReproError, match="split none, cannot be loaded: KeyError"):
        load_corpus({"huggingface": entry | {"split": "none"}}, ALL)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(Fp4ReproError, match=r"needs the package datasets: pip install 'fp4repro\["):
        load_corpus({"huggingface": entry}, ALL)


# Tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([PROSE, PROSE.upper()], 384)


def test_tokenizer_loses_nothing_and_counts_bytes(tokenizer):
    lengths = token_bytes(tokenizer)
    assert lengths.shape == (384,)
    for text in (PROSE, "\x00\ufeff\r\n\t  \N{PILE OF POO}", "", f"a{END_OF_TEXT}b"):
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert lengths[ids].sum() == len(text.encode("utf-8"))
        assert tokenizer.token_to_id(END_OF_TEXT) not in ids
    assert lengths[tokenizer.token_to_id(END_OF_TEXT)] == 0
    assert (lengths > 0).sum() == 383


def test_every_entry_is_as_long_as_the_bytes_that_it_decodes_to(tokenizer):
    from tokenizers import pre_tokenizers

    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    assert len(alphabet) == 256
    for entry in tokenizer.get_vocab():
        assert entry == END_OF_TEXT or set(entry) <= alphabet


def test_tokenizer_is_the_same_each_time_and_after_a_file(tokenizer, tmp_path):
    again = train_tokenizer(iter([PROSE, PROSE.upper()]), 384)
    assert again.to_str() == tokenizer.to_str()
    tokenizer.save(str(tmp_path / "t.json"))
    loaded = load_tokenizer(tmp_path / "t.json")
    text = f"{PROSE}{END_OF_TEXT}"
    assert loaded.encode(text).ids == tokenizer.encode(text).ids


def test_a_text_too_small_for_the_vocabulary():
    with pytest.raises(Fp4ReproError, match="too small for a vocabulary of 4096: it has"):
        train_tokenizer([PROSE], 4096)


# Token files


def test_token_files_hold_the_text(scale, texts, tmp_path):
    out = tmp_path / "out"
    summary = prepare(scale, out)
    assert json.loads((out / "data.json").read_text()) == summary
    data = open_tokens(out, scale)
    tokenizer = load_tokenizer(out / "tokenizer.json")
    end = tokenizer.token_to_id(END_OF_TEXT)
    assert data.train.dtype == np.uint16
    assert data.vocabulary == 384
    documents = np.split(data.train, np.flatnonzero(data.train == end) + 1)
    assert [len(d) > 0 for d in documents] == [True, True, True, False]
    for number, document in enumerate(documents[:3]):
        text = (texts / f"{number}.txt").read_bytes().decode()
        assert tokenizer.decode(document[:-1].tolist()) == text
    held = (texts / "held.txt").read_bytes()
    assert summary["validation"]["bytes"] == len(held) == data.token_bytes[data.validation].sum()
    assert summary["validation"]["tokens"] == len(data.validation)
    assert summary["train"]["documents"] == 3


def test_a_large_vocabulary_has_four_bytes(scale, tmp_path, monkeypatch):
    # The type follows from the vocabulary that the scale asks for, whatever was trained.
    small = train_tokenizer([PROSE], 384)
    monkeypatch.setattr("fp4repro.data.tokens.train_tokenizer", lambda texts, vocabulary: small)
    wide = dataclasses.replace(scale, tokenizer=Tokenizer(vocabulary=65664))
    prepare(wide, tmp_path)
    assert open_tokens(tmp_path, wide).train.dtype == np.uint32


def test_token_files_are_the_same_each_time(scale, tmp_path):
    for folder, threads in (("a", "true"), ("b", "false")):
        os.environ["TOKENIZERS_PARALLELISM"] = threads
        prepare(scale, tmp_path / folder)
    del os.environ["TOKENIZERS_PARALLELISM"]
    for name in ("train.bin", "validation.bin", "tokenizer.json", "data.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"batch": 2048}, "its train text has .* needs 131073 for one batch"),
        ({"validation_tokens": 12800}, "its validation text has .* needs 12801 for training"),
    ],
)
def test_a_corpus_shorter_than_a_batch(scale, tmp_path, changes, expected):
    long = dataclasses.replace(scale, training=dataclasses.replace(scale.training, **changes))
    with pytest.raises(Fp4ReproError, match=expected):
        prepare(long, tmp_path)
    assert not (tmp_path / "data.json").exists()


def test_token_files_of_other_settings_or_damaged_are_refused(scale, tmp_path):
    with pytest.raises(Fp4ReproError, match=r"has no data\.json, so no token files: run python -m"):
        open_tokens(tmp_path, scale)
    prepare(scale, tmp_path)
    other = dataclasses.replace(scale, corpus_bytes=CorpusBytes(train=5, validation=None))
    with pytest.raises(Fp4ReproError, match=r"settings: corpus_bytes\.train is 5 .* was None"):
        open_tokens(tmp_path, other)
    binary = tmp_path / "train.bin"
    whole = binary.read_bytes()
    binary.write_bytes(whole[:-2])
    with pytest.raises(Fp4ReproError, match=r"train\.bin is missing or not what data\.json says"):
        open_tokens(tmp_path, scale)
    binary.write_bytes(whole)
    open_tokens(tmp_path, scale)
    summary = tmp_path / "data.json"
    summary.write_text(summary.read_text()[:-20])
    with pytest.raises(Fp4ReproError, match=r"data\.json is damaged"):
        open_tokens(tmp_path, scale)


def test_the_command(scale, texts, tmp_path, monkeypatch, capsys):
    path = tmp_path / "smoke.yaml"
    corpus = json.dumps({"files": [f"{texts}/?.txt"], "validation": [f"{texts}/held.txt"]})
    path.write_text(SMOKE.read_text().replace("corpus: default", f"corpus: {corpus}"))
    monkeypatch.setattr(sys, "argv", ["data", f"--scale={path}", f"--out={tmp_path / 'out'}"])
    with pytest.raises(SystemExit) as ended:
        run_stage("fp4repro.data", main)
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert line.startswith("fp4repro.data: error: the corpus is too short")
    for document in texts.iterdir():
        document.write_text(document.read_text() * 8)
    run_stage("fp4repro.data", main)
    said = capsys.readouterr()
    assert said.err == "" and "train: 3 documents" in said.out


# Batches


def test_a_pass_sees_each_window_once():
    tokens = np.arange(1000, dtype=np.uint16)
    batches = Batches(tokens, batch=3, context=10, seed=5)
    assert batches.windows == 98
    seen = np.concatenate([batches[step][0] for step in range(98)])  # three passes
    for number in range(3):
        starts = seen[number * 98 : (number + 1) * 98, 0]
        offset = starts.min()
        assert 0 <= offset <= 10
        assert sorted(starts) == list(range(offset, offset + 980, 10))
    assert (seen == seen[:, :1] + np.arange(10)).all()


def test_targets_are_the_next_tokens():
    tokens = np.random.default_rng(0).integers(0, 512, 777).astype(np.uint16)
    x, y = Batches(tokens, batch=4, context=32, seed=0)[7]
    assert x.shape == y.shape == (4, 32) and x.dtype == y.dtype == np.int64
    assert (x[:, 1:] == y[:, :-1]).all()
    for window in np.concatenate([x, y[:, -1:]], axis=1).astype(np.uint16):
        assert window.tobytes() in tokens.tobytes()


def test_batches_are_a_function_of_seed_and_step_alone():
    tokens = np.arange(5000, dtype=np.uint16)
    forward = Batches(tokens, 4, 64, seed=1)
    once = [forward[step][0].tobytes() for step in range(60)]
    jumping = Batches(tokens, 4, 64, seed=1)
    for step in (59, 0, 30, 31, 2):
        assert jumping[step][0].tobytes() == once[step]
    assert len(set(once)) == 60
    assert Batches(tokens, 4, 64, seed=2)[0][0].tobytes() != once[0]


def test_the_shortest_text_gives_a_batch():
    tokens = np.arange(33, dtype=np.uint16)
    x, y = Batches(tokens, 2, 16, seed=0)[0]
    assert y.max() <= 32 and (y == x + 1).all()
    x, _ = Batches(tokens[:17], 2, 16, seed=0)[3]
    assert (x == np.arange(16)).all()


def test_even_windows_do_not_overlap_and_span_the_text():
    tokens = np.arange(1001, dtype=np.uint32)
    x, y = evenly(tokens, 7, 128)
    assert x[0, 0] == 0 and len(np.unique(y)) == 7 * 128
    assert x[-1, 0] >= 1000 - 1000 // 7 - 7
    x, y = evenly(tokens[:897], 7, 128)
    assert y.max() == 896

"""Scale files: the ones that ship are sound, and every kind of mistake is one clear sentence."""

import math
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import yaml

from fp4repro.config import SCHEMAS, check, load_scale, read_yaml
from fp4repro.errors import Fp4ReproError

SCALES = sorted((Path(__file__).parents[1] / "configs" / "scales").glob("*.yaml"))
SMOKE = Path(__file__).parents[1] / "configs" / "scales" / "smoke.yaml"


def changed(tmp_path, **changes):
    """A copy of the smoke scale with keys changed (dots lead into it); None takes a key out."""
    document = yaml.safe_load(SMOKE.read_text())
    for key, value in changes.items():
        *path, last = key.split("__")
        part = document
        for name in path:
            part = part[name]
        part[last] = value
        if value is None:
            del part[last]
    path = tmp_path / "smoke.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def sentence(path):
    with pytest.raises(Fp4ReproError) as caught:
        load_scale(path)
    return str(caught.value)


@pytest.mark.parametrize("path", SCALES, ids=lambda path: path.stem)
def test_scales_that_ship_are_sound(path):
    scale = load_scale(path)
    assert scale.scale == path.stem
    assert scale.model_path.is_file()
    assert scale.training.steps * scale.training.tokens_per_step <= scale.training.tokens
    recipes = set(scale.pretrain.recipes)
    assert "nvfp4" in recipes and recipes & {"bf16", "fp8"}, "no gap without both"


def test_all_planned_scales_are_there():
    names = {"smoke", "laptop", "evening", "overnight", "gpu", "node", "cluster", "paper"}
    assert {path.stem for path in SCALES} == names


def test_the_paper_scale_is_the_paper():
    training = load_scale(SMOKE.with_name("paper.yaml")).training
    assert training.tokens_per_step == 6_029_312  # 6.03 M, arXiv 2509.25149 appendix A
    assert math.isclose(training.steps, 1.659e6, rel_tol=1e-3)
    assert training.learning_rate == 4.5e-4
    assert math.isclose(training.learning_rate * training.final_learning_rate_ratio, 4.5e-6)
    assert (training.betas, training.weight_decay) == ((0.9, 0.95), 0.1)
    assert training.decay_fraction == 0.2
    assert [phase.until for phase in training.phases] == [0.7, 0.9, 1.0]


def test_defaults_come_from_the_schema(tmp_path):
    scale = load_scale(changed(tmp_path, threads=None, device=None, corpus_bytes=None))
    schema = yaml.safe_load((SCHEMAS / "scale.schema.yaml").read_text())["properties"]
    assert scale.threads == schema["threads"]["default"] == 1
    assert scale.device == schema["device"]["default"] == "auto"
    training = schema["training"]["properties"]
    assert scale.training.eps == training["eps"]["default"]
    assert scale.training.betas == tuple(training["betas"]["default"])
    assert (scale.corpus_bytes.train, scale.log_every) == (None, None)


def test_defaults_reach_a_dataset_entry(tmp_path):
    path = changed(tmp_path, corpus={"huggingface": {"name": "x", "split": "first"}})
    entry = load_scale(path).corpus["huggingface"]
    assert entry == {"name": "x", "split": "first", "text_column": "text"}


def test_every_key_of_the_schema_is_described():
    def undescribed(schema, where):
        for key, part in schema.get("properties", {}).items():
            if "description" not in part:
                yield f"{where}.{key}"
            yield from undescribed(part, f"{where}.{key}")
        for name, part in schema.get("$defs", {}).items():
            yield from undescribed(part, f"{where}.$defs.{name}")
        if schema.get("type") == "object" and "properties" in schema:
            assert schema["additionalProperties"] is False, where
        yield from undescribed(schema["else"], where) if "else" in schema else ()

    assert not list(undescribed(read_yaml(SCHEMAS / "scale.schema.yaml"), ""))


def test_a_scale_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        load_scale(SMOKE).threads = 2


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"training__learning_rte": 1},
            "unknown key 'learning_rte' in training; did you mean 'learning_rate'?",
        ),
        ({"zzz": 1}, "unknown key 'zzz' in the file; known keys: scale, description"),
        (
            {"corpus": {"files": ["a"], "validation": ["b"], "split": 1}},
            "unknown key 'split' in corpus; known keys: files, validation, huggingface, sources",
        ),
        ({"training__batch": "8"}, "training.batch is '8', which is not of type integer"),
        ({"training__batch": True}, "training.batch is True, which is not of type integer"),
        ({"training__tokens": None}, "training lacks the key 'tokens'"),
        ({"training__clip": -1}, "training.clip: -1 is less than or equal to the minimum of 0"),
        ({"training__betas": [0.9]}, "training.betas: [0.9] is too short"),
        ({"tokenizer__vocabulary": 500}, "vocabulary is 500, which is not a multiple of 128"),
        ({"device": "tpu"}, "device is 'tpu', not one of auto, cpu, cuda"),
        ({"corpus": "wikipedia"}, "corpus is 'wikipedia', not one of default, python-stdlib"),
        ({"corpus": {"files": ["a"]}}, "must have files and validation, or else huggingface"),
        ({"pretrain__recipes": ["nvfp5"]}, "pretrain.recipes: no recipe is named 'nvfp5'"),
        ({"pretrain__seeds": [0, 0]}, "pretrain.seeds: [0, 0] has non-unique elements"),
        ({"pretrain__seeds": [-1]}, "pretrain.seeds.0: -1 is less than the minimum of 0"),
        ({"scale": "laptop"}, "scale is 'laptop', but a scale has its file's name, 'smoke'"),
        ({"model": "tyni"}, "there is no model 'tyni' in configs/models, which has: "),
        ({"training__accumulate": 3}, "training.batch of 8 sequences cannot be split into"),
        (
            {"training__context": 100, "training__validation_tokens": 3200},
            "8 sequences of 100 tokens, and 800 is not a multiple of 128",
        ),
        ({"training__accumulate": 8, "training__context": 64}, "and 64 is not a multiple of 128"),
        (
            {"cluster": {"nodes": 2, "ranks": 4}, "training__accumulate": 4},
            "training.accumulate is 4, which the 8 ranks of cluster cannot share evenly: set it",
        ),
        ({"training__tokens": 1000}, "training.tokens = 1000 is less than one batch"),
        ({"training__validation_tokens": 1000}, "validation_tokens = 1000 must be a multiple of"),
        ({"training__warmup_fraction": 0.9}, "add up to 1.1, more than the whole run"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, changes, expected):
    path = changed(tmp_path, **changes)
    message = sentence(path)
    assert expected in message
    assert message.startswith(str(path))
    assert "\n" not in message


def of_sources(tmp_path, phases, **changes):
    corpus = {"sources": {"web": {"name": "w"}, "code": {"name": "c", "split": "s"}}}
    return changed(tmp_path, corpus=corpus, training__phases=phases, **changes)


def test_sources_and_phases(tmp_path):
    mixtures = [{"web": 0.6, "code": 0.4}, {"web": 0.333, "code": 0.667}]
    path = of_sources(
        tmp_path, [{"until": u, "mixture": m} for u, m in zip((0.7, 1.0), mixtures, strict=True)]
    )
    scale = load_scale(path)
    assert [(p.until, p.mixture) for p in scale.training.phases] == [(0.7, mixtures[0]), (1.0, mixtures[1])]
    sources = scale.corpus["sources"]
    assert sources["web"] == {"name": "w", "split": "train", "text_column": "text"}  # of the schema
    assert sources["code"]["split"] == "s"


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        (
            [{"until": 1.0, "mixture": {"web": 0.6, "code": 0.3}}],
            "the weights add up to 0.9, but must add up",
        ),
        (
            [{"until": 1.0, "mixture": {"web": 0.6, "cod": 0.2, "code": 0.2}}],
            "corpus.sources has no 'cod'; it has code, web",
        ),
        (
            [
                {"until": 0.8, "mixture": {"web": 1.0}},
                {"until": 0.8, "mixture": {"code": 1.0}},
                {"until": 1.0, "mixture": {"code": 1.0}},
            ],
            "training.phases end at [0.8, 0.8, 1.0], but their `until` must ascend and end with 1.0",
        ),
        (
            [{"until": 0.9, "mixture": {"web": 0.5, "code": 0.5}}],
            "end at [0.9], but their `until` must ascend",
        ),
        (
            [{"until": 1.0, "mixture": {"web": 0.5005, "code": 0.4995}}],
            "code is 0.4995, but weights are whole",
        ),
        ([{"until": 1.0, "mixture": {"web": 1.0}}], "corpus.sources: code is in no mixture"),
        (
            [{"until": 1.0, "mixture": {"web": 1.5, "code": -0.5}}],
            "mixture.code: -0.5 is less than or equal to the minimum",
        ),
        ([{"until": 1.0}], "training.phases.0 lacks the key 'mixture'"),
        ([], "corpus.sources and training.phases belong together"),
    ],
)
def test_a_mistake_in_phases_is_told(tmp_path, phases, expected):
    assert expected in sentence(of_sources(tmp_path, phases)).splitlines()[0]


def test_phases_without_sources_and_bytes_without_them(tmp_path):
    phases = [{"until": 1.0, "mixture": {"web": 1.0}}]
    assert "belong together: give both or neither" in sentence(changed(tmp_path, training__phases=phases))
    corpus = {"huggingface": {"name": "x", "bytes": 5}}
    assert "set corpus_bytes.train in its place" in sentence(changed(tmp_path, corpus=corpus))


def test_two_mistakes_are_both_told(tmp_path):
    message = sentence(changed(tmp_path, training__batch="8", device="tpu"))
    assert len(message.splitlines()) == 2
    assert "training.batch" in message and "device" in message


def test_several_missing_keys_are_told_once_each(tmp_path):
    message = sentence(changed(tmp_path, training__tokens=None, training__batch=None))
    assert sorted(line.rpartition(" ")[2] for line in message.splitlines()) == [
        "'batch'",
        "'tokens'",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("scale: [smoke", "line 2: not valid YAML"),
        ("scale: a\nscale: b\n", "line 2: not valid YAML: the key 'scale' is given twice"),
        ("[a]: 1", "line 1: not valid YAML: found unhashable key"),
        ("", "the file is None, which is not of type object"),
        ("- a\n", "which is not of type object"),
    ],
)
def test_bad_yaml_is_one_sentence(tmp_path, text, expected):
    path = tmp_path / "smoke.yaml"
    path.write_text(text + "\n")
    message = sentence(path)
    assert expected in message and "\n" not in message


def test_a_missing_file_names_its_neighbour(tmp_path):
    (tmp_path / "smoke.yaml").write_text(SMOKE.read_text())
    assert "smok.yaml does not exist; did you mean smoke.yaml?" in sentence(tmp_path / "smok.yaml")
    assert sentence(tmp_path / "none" / "x.yaml").endswith("does not exist")


def test_a_file_that_is_not_text(tmp_path):
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read as UTF-8 text" in sentence(tmp_path / "x.yaml")
    assert "cannot be read" in sentence(tmp_path)


@pytest.mark.parametrize("written", ["1e-3", "1.0e-3", "1E-03", "0.001", "1e-3 # comment"])
def test_numbers_with_exponents_are_numbers(tmp_path, written):
    path = tmp_path / "x.yaml"
    path.write_text(f"a: {written}\nb: 1e-3x\nc: 2024-01\n")
    document = read_yaml(path)
    assert document["a"] == 0.001
    assert document["b"] == "1e-3x" and document["c"] == "2024-01"


def test_check_says_where_in_a_list(tmp_path):
    schema = {"items": {"properties": {"a": {"type": "integer"}}}}
    with pytest.raises(Fp4ReproError, match=r"x\.yaml: 1\.a is 'b', which is not of type integer"):
        check([{"a": 1}, {"a": "b"}], schema, Path("x.yaml"))


@pytest.mark.parametrize("number", [".nan", ".inf", "-.inf"])
def test_numbers_that_are_none(tmp_path, number):
    text = SMOKE.read_text().replace("learning_rate: 3.0e-3", f"learning_rate: {number}")
    path = tmp_path / "smoke.yaml"
    path.write_text(text)
    with pytest.raises(Fp4ReproError, match=r"training\.learning_rate is -?(nan|inf), which is not a number"):
        load_scale(path)


def test_files_beside_a_dataset(tmp_path):
    text = SMOKE.read_text().replace("corpus: default", "corpus: {files: [a.txt], huggingface: {name: a}}")
    path = tmp_path / "smoke.yaml"
    path.write_text(text)
    with pytest.raises(Fp4ReproError, match="corpus must have files and validation, or else huggingface"):
        load_scale(path)


def test_the_vocabulary_is_the_tokenizers(tmp_path):
    path = tmp_path / "smoke.yaml"
    path.write_text(SMOKE.read_text() + "model_overrides: {vocabulary: 512}\n")
    with pytest.raises(Fp4ReproError, match=r"change tokenizer\.vocabulary"):
        load_scale(path)

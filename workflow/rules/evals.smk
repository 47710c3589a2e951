"""Evaluations: one job a model, since importing lm-eval and loading a model take longer than an arithmetic."""


def evaluated_run(name):
    """An input function: the file of that name of the run that a model's name means, if it is one."""

    def file(wildcards):
        run = re.fullmatch(r"[^/]+/seed-\d+", wildcards.model)
        folder = f"results/{wildcards.scale}/pretrain/{wildcards.model}"
        return [f"{folder}/{name}"] if run else []

    return file


def evaluated_model(wildcards, input):
    """How the model is named to the stage: a run by its folder, with its token files."""
    if not input.about:
        return f"--model {wildcards.model}"
    return (
        f"--run {os.path.dirname(input.about[0])} --data {os.path.dirname(input.data)}"
    )


def evals_settings(wildcards):
    """What the answers depend on beside the model, with the folder that `local` stands for here."""
    settings = asdict(SCALES[wildcards.scale].evals)
    del settings["models"]
    data = os.environ.get(VARIABLE)
    if settings["mmlu_pro"] == "local":
        settings["mmlu_pro"] = os.path.abspath(data) if data else None
    return json.dumps(settings, sort_keys=True)


def evals_of(scale, name):
    """The file of that name of every model that the scale evaluates."""
    models = SCALES[scale].evals.models
    return [f"results/{scale}/evals/{model}/{name}" for model in models]


def evals_results(scale):
    """The tables and the figure; nothing where the scale evaluates nothing."""
    if not SCALES[scale].evals.models:
        return []
    paired = [
        f"results/{scale}/tables/evals_paired.{suffix}" for suffix in ("csv", "md")
    ]
    return [*results_of("evals", scale), *paired]


rule evaluate:
    input:
        about=evaluated_run("run.json"),
        weights=evaluated_run("model.safetensors"),
        data=rules.data.output.about,
    output:
        questions="results/{scale}/evals/{model}/questions.csv",
        about="results/{scale}/evals/{model}/evals.json",
        theirs=directory("results/{scale}/evals/{model}/lm_eval"),
    log:
        "results/{scale}/logs/evals/{model}.log",
    benchmark:
        "results/{scale}/benchmarks/evals/{model}.tsv"
    wildcard_constraints:
        model=".+",
    conda:
        "../../environment.yml"
    threads: lambda wildcards: SCALES[wildcards.scale].threads
    resources:
        gpu=lambda wildcards: int(SCALES[wildcards.scale].device == "cuda"),
    params:
        model=evaluated_model,
        out=subpath(output.about, parent=True),
        settings=evals_settings,
    message:
        "Evaluate {wildcards.model} at scale {wildcards.scale}"
    shell:
        "python -m fp4repro.evals --scale configs/scales/{wildcards.scale}.yaml"
        " {params.model} --out {params.out} > {log} 2>&1"


rule evals_tables:
    input:
        abouts=lambda wildcards: evals_of(wildcards.scale, "evals.json"),
        questions=lambda wildcards: evals_of(wildcards.scale, "questions.csv"),
        published="configs/published.yaml",
        benchmarks="configs/benchmarks.yaml",
    output:
        table=report(
            "results/{scale}/tables/evals.csv",
            caption="../report/evals_table.rst",
            category="Evaluations",
            labels={"scale": "{scale}", "result": "table (CSV)"},
        ),
        markdown=report(
            "results/{scale}/tables/evals.md",
            caption="../report/evals_table.rst",
            category="Evaluations",
            labels={"scale": "{scale}", "result": "table (Markdown)"},
        ),
        paired=report(
            "results/{scale}/tables/evals_paired.csv",
            caption="../report/evals_paired_table.rst",
            category="Evaluations",
            labels={"scale": "{scale}", "result": "paired (CSV)"},
        ),
        paired_markdown=report(
            "results/{scale}/tables/evals_paired.md",
            caption="../report/evals_paired_table.rst",
            category="Evaluations",
            labels={"scale": "{scale}", "result": "paired (Markdown)"},
        ),
        png=report(
            "results/{scale}/figures/evals.png",
            caption="../report/evals_figure.rst",
            category="Evaluations",
            labels={"scale": "{scale}", "result": "figure (PNG)"},
        ),
        svg=report(
            "results/{scale}/figures/evals.svg",
            caption="../report/evals_figure.rst",
            category="Evaluations",
            labels={"scale": "{scale}", "result": "figure (SVG)"},
        ),
    log:
        "results/{scale}/logs/evals_tables.log",
    benchmark:
        "results/{scale}/benchmarks/evals_tables.tsv"
    conda:
        "../../environment.yml"
    threads: 1
    params:
        evals=lambda wildcards, input: [os.path.dirname(path) for path in input.abouts],
        tables=subpath(output.table, parent=True),
        figures=subpath(output.png, parent=True),
    message:
        "Tables and figure of evaluations of scale {wildcards.scale}"
    shell:
        "python -m fp4repro.report evals --scale configs/scales/{wildcards.scale}.yaml"
        " --evals {params.evals} --published {input.published}"
        " --tables {params.tables} --figures {params.figures} > {log} 2>&1"


rule evals:
    input:
        evals_results(config["scale"]),

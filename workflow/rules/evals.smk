"""Evaluations: one job a model, since importing lm-eval and loading a model take longer than an arithmetic."""


rule evaluate:
    input:
        about=evaluated_run("run.json"),
        weights=evaluated_run("model.safetensors"),
        data=tokens_of_run,
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
        pdf="results/{scale}/figures/evals.pdf",
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

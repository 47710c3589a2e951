# The gradient study and the sensitivity of blocks: a job a model, then a table and figure of each.
# A model's name may hold slashes (a folder, a name on the hub); its files bear it with `--` for them.


def studied_models(scale):
    """File name of each model of a scale's studies -> the model's name."""
    return {name.replace("/", "--"): name for name in SCALES[scale].fidelity.models}


def studied_model(wildcards):
    """The model of a file, which may be one that the scale does not name."""
    subject = wildcards.subject
    return studied_models(wildcards.scale).get(subject, subject.replace("--", "/"))


def is_ours(wildcards):
    return studied_model(wildcards) == "hybrid"


def studied_files(name):
    """An input function: our run's file of that name where the subject is our own model."""

    def file(wildcards):
        return studied_run(name)(wildcards) if is_ours(wildcards) else []

    return file


def run_and_data(wildcards, input):
    """The arguments that name our run and its token files; a pretrained model needs neither."""
    if not is_ours(wildcards):
        return ""
    return (
        f"--run {os.path.dirname(input.about)} --data {os.path.dirname(input.data[0])}"
    )


def sensitivity_of(wildcards, input):
    """The same for the sensitivity study, which is told the model first of all."""
    if not is_ours(wildcards):
        return studied_model(wildcards)
    return f"{os.path.dirname(input.about)} --data {os.path.dirname(input.data[0])}"


def token_files(wildcards):
    return rules.data.output if is_ours(wildcards) else []


def fidelity_settings(*keys):
    """A params function: those settings of the studies, and the text of a pretrained model."""

    def settings(wildcards):
        plan = asdict(SCALES[wildcards.scale].fidelity)
        of_text = "" if is_ours(wildcards) else data_settings(wildcards)
        return json.dumps([{key: plan[key] for key in keys}, of_text])

    return settings


def studied_rows(experiment):
    """An input function: the rows of every model of the scale."""

    def files(wildcards):
        return [
            f"results/{wildcards.scale}/{experiment}/{subject}.csv"
            for subject in studied_models(wildcards.scale)
        ]

    return files


rule gradients:
    input:
        about=studied_files("run.json"),
        weights=studied_files("model.safetensors"),
        data=token_files,
    output:
        rows="results/{scale}/fidelity/{subject}.csv",
    log:
        "results/{scale}/logs/fidelity/{subject}.log",
    benchmark:
        "results/{scale}/benchmarks/fidelity/{subject}.tsv"
    conda:
        "../../environment.yml"
    threads: lambda wildcards: SCALES[wildcards.scale].threads
    params:
        model=studied_model,
        run=run_and_data,
        settings=fidelity_settings("tokens", "draws", "blocks", "recipes", "whole"),
    message:
        "Gradient fidelity of {params.model} at scale {wildcards.scale}"
    shell:
        "python -m fp4repro.fidelity gradients --model {params.model} --if-available"
        " --scale configs/scales/{wildcards.scale}.yaml {params.run}"
        " --out {output.rows} > {log} 2>&1"


rule sensitivity:
    input:
        about=studied_files("run.json"),
        weights=studied_files("model.safetensors"),
        data=token_files,
    output:
        rows="results/{scale}/sensitivity/{subject}.csv",
    log:
        "results/{scale}/logs/sensitivity/{subject}.log",
    benchmark:
        "results/{scale}/benchmarks/sensitivity/{subject}.tsv"
    conda:
        "../../environment.yml"
    threads: lambda wildcards: SCALES[wildcards.scale].threads
    params:
        model=sensitivity_of,
        settings=fidelity_settings("tokens", "share"),
    message:
        "Sensitivity of the blocks of {wildcards.subject} at scale {wildcards.scale}"
    shell:
        "python -m fp4repro.sensitivity {params.model} --if-available"
        " --scale configs/scales/{wildcards.scale}.yaml --out {output.rows} > {log} 2>&1"


rule fidelity_table:
    input:
        rows=studied_rows("fidelity"),
    output:
        table=report(
            "results/{scale}/tables/fidelity.csv",
            caption="../report/fidelity_table.rst",
            category="Gradient fidelity",
            labels={"scale": "{scale}", "result": "table (CSV)"},
        ),
        markdown=report(
            "results/{scale}/tables/fidelity.md",
            caption="../report/fidelity_table.rst",
            category="Gradient fidelity",
            labels={"scale": "{scale}", "result": "table (Markdown)"},
        ),
        png=report(
            "results/{scale}/figures/fidelity.png",
            caption="../report/fidelity_figure.rst",
            category="Gradient fidelity",
            labels={"scale": "{scale}", "result": "figure (PNG)"},
        ),
        svg=report(
            "results/{scale}/figures/fidelity.svg",
            caption="../report/fidelity_figure.rst",
            category="Gradient fidelity",
            labels={"scale": "{scale}", "result": "figure (SVG)"},
        ),
    log:
        "results/{scale}/logs/fidelity_table.log",
    benchmark:
        "results/{scale}/benchmarks/fidelity_table.tsv"
    conda:
        "../../environment.yml"
    threads: 1
    message:
        "Table and figure of gradient fidelity of scale {wildcards.scale}"
    shell:
        "python -m fp4repro.report fidelity --scale configs/scales/{wildcards.scale}.yaml"
        " --rows {input.rows} --table {output.table} --markdown {output.markdown}"
        " --png {output.png} --svg {output.svg} > {log} 2>&1"


rule sensitivity_table:
    input:
        rows=studied_rows("sensitivity"),
    output:
        table=report(
            "results/{scale}/tables/sensitivity.csv",
            caption="../report/sensitivity_table.rst",
            category="Gradient fidelity",
            labels={"scale": "{scale}", "result": "sensitivity (CSV)"},
        ),
        markdown=report(
            "results/{scale}/tables/sensitivity.md",
            caption="../report/sensitivity_table.rst",
            category="Gradient fidelity",
            labels={"scale": "{scale}", "result": "sensitivity (Markdown)"},
        ),
        png=report(
            "results/{scale}/figures/sensitivity.png",
            caption="../report/sensitivity_figure.rst",
            category="Gradient fidelity",
            labels={"scale": "{scale}", "result": "sensitivity (PNG)"},
        ),
        svg=report(
            "results/{scale}/figures/sensitivity.svg",
            caption="../report/sensitivity_figure.rst",
            category="Gradient fidelity",
            labels={"scale": "{scale}", "result": "sensitivity (SVG)"},
        ),
    log:
        "results/{scale}/logs/sensitivity_table.log",
    benchmark:
        "results/{scale}/benchmarks/sensitivity_table.tsv"
    conda:
        "../../environment.yml"
    threads: 1
    message:
        "Table and figure of the sensitivity of blocks of scale {wildcards.scale}"
    shell:
        "python -m fp4repro.report sensitivity --scale configs/scales/{wildcards.scale}.yaml"
        " --rows {input.rows} --table {output.table} --markdown {output.markdown}"
        " --png {output.png} --svg {output.svg} > {log} 2>&1"


rule fidelity:
    input:
        results_of("fidelity", config["scale"]),
        results_of("sensitivity", config["scale"]),

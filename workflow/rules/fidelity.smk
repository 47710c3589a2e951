# The gradient study and the sensitivity of blocks: a job a model, then a table and figure of each.
# A model's name may hold slashes (a folder, a name on the hub); its files bear it with `--` for them.


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
        pdf="results/{scale}/figures/fidelity.pdf",
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
        pdf="results/{scale}/figures/sensitivity.pdf",
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

rule attention_sensitivity_table:
    input:
        about=studied_run("run.json"),
        weights=studied_run("model.safetensors"),
        data=rules.data.output.about,
    output:
        table=report(
            "results/{scale}/tables/attention_sensitivity.csv",
            caption="../report/attention_table.rst",
            category="Full stack",
            labels={"scale": "{scale}", "result": "table (CSV)"},
        ),
    log:
        "results/{scale}/logs/attention_sensitivity_table.log",
    benchmark:
        "results/{scale}/benchmarks/attention_sensitivity_table.tsv"
    conda:
        "../../environment.yml"
    threads: lambda wildcards: SCALES[wildcards.scale].threads
    resources:
        gpu=lambda wildcards: int(SCALES[wildcards.scale].device == "cuda"),
    params:
        run=subpath(input.about, parent=True),
        data=subpath(input.data, parent=True),
    message:
        "Sensitivity of attention's products on drawn data and on {params.run}"
    shell:
        "python -m fp4repro.fullstack attention_sensitivity"
        " --scale configs/scales/{wildcards.scale}.yaml --run {params.run}"
        " --data {params.data} --out {output.table} > {log} 2>&1"


rule attention_sensitivity_figure:
    input:
        table=rules.attention_sensitivity_table.output.table,
    output:
        markdown=report(
            "results/{scale}/tables/attention_sensitivity.md",
            caption="../report/attention_table.rst",
            category="Full stack",
            labels={"scale": "{scale}", "result": "table (Markdown)"},
        ),
        png=report(
            "results/{scale}/figures/attention_sensitivity.png",
            caption="../report/attention_figure.rst",
            category="Full stack",
            labels={"scale": "{scale}", "result": "figure (PNG)"},
        ),
        svg=report(
            "results/{scale}/figures/attention_sensitivity.svg",
            caption="../report/attention_figure.rst",
            category="Full stack",
            labels={"scale": "{scale}", "result": "figure (SVG)"},
        ),
        pdf="results/{scale}/figures/attention_sensitivity.pdf",
    log:
        "results/{scale}/logs/attention_sensitivity_figure.log",
    benchmark:
        "results/{scale}/benchmarks/attention_sensitivity_figure.tsv"
    conda:
        "../../environment.yml"
    threads: 1
    message:
        "Table and figure of attention's sensitivity of scale {wildcards.scale}"
    shell:
        "python -m fp4repro.report attention_sensitivity --scale configs/scales/{wildcards.scale}.yaml"
        " --table {input.table} --markdown {output.markdown}"
        " --png {output.png} --svg {output.svg} > {log} 2>&1"


rule attention_sensitivity:
    input:
        results_of("attention_sensitivity", config["scale"]),

rule formats_table:
    input:
        about=studied_run("run.json"),
        weights=studied_run("model.safetensors"),
        data=rules.data.output.about,
    output:
        table=report(
            "results/{scale}/tables/formats.csv",
            caption="../report/formats_table.rst",
            category="Number formats",
            labels={"scale": "{scale}", "result": "table (CSV)"},
        ),
    log:
        "results/{scale}/logs/formats_table.log",
    benchmark:
        "results/{scale}/benchmarks/formats_table.tsv"
    conda:
        "../../environment.yml"
    threads: lambda wildcards: SCALES[wildcards.scale].threads
    resources:
        gpu=lambda wildcards: int(SCALES[wildcards.scale].device == "cuda"),
    params:
        run=subpath(input.about, parent=True),
        data=subpath(input.data, parent=True),
        models=lambda wildcards: [
            f"--model {name}"
            for name in SCALES[wildcards.scale].fidelity.models
            if name != "hybrid"
        ],
    message:
        "Number formats on synthetic data and on {params.run}"
    shell:
        "python -m fp4repro.fidelity formats"
        " --scale configs/scales/{wildcards.scale}.yaml --run {params.run}"
        " --data {params.data} {params.models} --if-available"
        " --out {output.table} > {log} 2>&1"


rule formats_figure:
    input:
        table=rules.formats_table.output.table,
    output:
        markdown=report(
            "results/{scale}/tables/formats.md",
            caption="../report/formats_table.rst",
            category="Number formats",
            labels={"scale": "{scale}", "result": "table (Markdown)"},
        ),
        png=report(
            "results/{scale}/figures/formats.png",
            caption="../report/formats_figure.rst",
            category="Number formats",
            labels={"scale": "{scale}", "result": "figure (PNG)"},
        ),
        svg=report(
            "results/{scale}/figures/formats.svg",
            caption="../report/formats_figure.rst",
            category="Number formats",
            labels={"scale": "{scale}", "result": "figure (SVG)"},
        ),
        pdf="results/{scale}/figures/formats.pdf",
    log:
        "results/{scale}/logs/formats_figure.log",
    benchmark:
        "results/{scale}/benchmarks/formats_figure.tsv"
    conda:
        "../../environment.yml"
    threads: 1
    message:
        "Table and figure of number formats of scale {wildcards.scale}"
    shell:
        "python -m fp4repro.report formats --scale configs/scales/{wildcards.scale}.yaml"
        " --table {input.table} --markdown {output.markdown}"
        " --png {output.png} --svg {output.svg} > {log} 2>&1"


rule formats:
    input:
        results_of("formats", config["scale"]),

rule fullstack_projections_table:
    input:
        about=studied_run("run.json"),
        weights=studied_run("model.safetensors"),
        data=rules.data.output.about,
    output:
        table=report(
            "results/{scale}/tables/projections.csv",
            caption="../report/projections_table.rst",
            category="Full-Stack FP4",
            labels={"scale": "{scale}", "result": "table (CSV)"},
        ),
    log:
        "results/{scale}/logs/fullstack_projections_table.log",
    benchmark:
        "results/{scale}/benchmarks/fullstack_projections_table.tsv"
    conda:
        "../../environment.yml"
    threads: lambda wildcards: SCALES[wildcards.scale].threads
    resources:
        gpu=lambda wildcards: int(SCALES[wildcards.scale].device == "cuda"),
    params:
        run=subpath(input.about, parent=True),
        data=subpath(input.data, parent=True),
    message:
        "LoRA-SVD projections on synthetic data and on {params.run}"
    shell:
        "python -m fp4repro.fullstack projections"
        " --scale configs/scales/{wildcards.scale}.yaml --run {params.run}"
        " --data {params.data} --out {output.table} > {log} 2>&1"


rule fullstack_projections_figure:
    input:
        table=rules.fullstack_projections_table.output.table,
    output:
        markdown=report(
            "results/{scale}/tables/projections.md",
            caption="../report/projections_table.rst",
            category="Full-Stack FP4",
            labels={"scale": "{scale}", "result": "table (Markdown)"},
        ),
        png=report(
            "results/{scale}/figures/projections.png",
            caption="../report/projections_figure.rst",
            category="Full-Stack FP4",
            labels={"scale": "{scale}", "result": "figure (PNG)"},
        ),
        svg=report(
            "results/{scale}/figures/projections.svg",
            caption="../report/projections_figure.rst",
            category="Full-Stack FP4",
            labels={"scale": "{scale}", "result": "figure (SVG)"},
        ),
        pdf="results/{scale}/figures/projections.pdf",
    log:
        "results/{scale}/logs/fullstack_projections_figure.log",
    benchmark:
        "results/{scale}/benchmarks/fullstack_projections_figure.tsv"
    conda:
        "../../environment.yml"
    threads: 1
    message:
        "Table and figure of projections of scale {wildcards.scale}"
    shell:
        "python -m fp4repro.report projections --scale configs/scales/{wildcards.scale}.yaml"
        " --table {input.table} --markdown {output.markdown}"
        " --png {output.png} --svg {output.svg} > {log} 2>&1"


rule fullstack_projections:
    input:
        results_of("projections", config["scale"]),

rule fullstack_optim_table:
    output:
        table=report(
            "results/{scale}/tables/{study}.csv",
            caption="../report/fullstack_optim.rst",
            category="Full stack",
            labels={"study": "{study}", "scale": "{scale}", "result": "table (CSV)"},
        ),
    log:
        "results/{scale}/logs/{study}_table.log",
    benchmark:
        "results/{scale}/benchmarks/{study}_table.tsv"
    wildcard_constraints:
        study="|".join(OPTIM_STUDIES),
    conda:
        "../../environment.yml"
    threads: lambda wildcards: SCALES[wildcards.scale].threads
    params:
        settings=section_settings("fullstack_optim"),
    message:
        "Study {wildcards.study} of scale {wildcards.scale}"
    shell:
        "python -m fp4repro.fullstack {wildcards.study}"
        " --scale configs/scales/{wildcards.scale}.yaml --out {output.table} > {log} 2>&1"


rule fullstack_optim_figure:
    input:
        table=rules.fullstack_optim_table.output.table,
    output:
        markdown=report(
            "results/{scale}/tables/{study}.md",
            caption="../report/fullstack_optim.rst",
            category="Full stack",
            labels={
                "study": "{study}",
                "scale": "{scale}",
                "result": "table (Markdown)",
            },
        ),
        png=report(
            "results/{scale}/figures/{study}.png",
            caption="../report/fullstack_optim.rst",
            category="Full stack",
            labels={"study": "{study}", "scale": "{scale}", "result": "figure (PNG)"},
        ),
        svg=report(
            "results/{scale}/figures/{study}.svg",
            caption="../report/fullstack_optim.rst",
            category="Full stack",
            labels={"study": "{study}", "scale": "{scale}", "result": "figure (SVG)"},
        ),
        pdf="results/{scale}/figures/{study}.pdf",
    log:
        "results/{scale}/logs/{study}_figure.log",
    benchmark:
        "results/{scale}/benchmarks/{study}_figure.tsv"
    wildcard_constraints:
        study="|".join(OPTIM_STUDIES),
    conda:
        "../../environment.yml"
    threads: 1
    message:
        "Table and figure of {wildcards.study} of scale {wildcards.scale}"
    shell:
        "python -m fp4repro.report {wildcards.study} --scale configs/scales/{wildcards.scale}.yaml"
        " --table {input.table} --markdown {output.markdown}"
        " --png {output.png} --svg {output.svg} > {log} 2>&1"


rule fullstack_optim:
    input:
        [path for study in OPTIM_STUDIES for path in results_of(study, config["scale"])],

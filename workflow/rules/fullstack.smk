# Full-Stack FP4 module by module: runs from scratch, beside the branches of ablations.smk, one table and one
# figure of both; the training control of attention; and the target that makes every full-stack table.


use rule train as fullstack_run with:
    output:
        metrics="results/{scale}/fullstack/{recipe}/seed-{seed}/metrics.csv",
        curve="results/{scale}/fullstack/{recipe}/seed-{seed}/curve.csv",
        layers="results/{scale}/fullstack/{recipe}/seed-{seed}/layers.csv",
        about="results/{scale}/fullstack/{recipe}/seed-{seed}/run.json",
    log:
        "results/{scale}/logs/fullstack/{recipe}/seed-{seed}.log",
    benchmark:
        "results/{scale}/benchmarks/fullstack/{recipe}/seed-{seed}.tsv"
    params:
        data=subpath(input[0], parent=True),
        out=subpath(output.metrics, parent=True),
        recipe="{recipe}",
        protocol="fullstack",
        settings=run_settings("fullstack"),
    message:
        "Full stack: {wildcards.recipe} from scratch, seed {wildcards.seed}, at scale {wildcards.scale}"


rule fullstack_table:
    input:
        metrics=entry_runs("metrics.csv", "fullstack"),
        curves=entry_runs("curve.csv", "fullstack"),
        entries="configs/fullstack.yaml",
        published="configs/published.yaml",
    output:
        table=report(
            "results/{scale}/tables/fullstack.csv",
            caption="../report/fullstack_table.rst",
            category="Full stack",
            labels={"scale": "{scale}", "result": "table (CSV)"},
        ),
        markdown=report(
            "results/{scale}/tables/fullstack.md",
            caption="../report/fullstack_table.rst",
            category="Full stack",
            labels={"scale": "{scale}", "result": "table (Markdown)"},
        ),
        png=report(
            "results/{scale}/figures/fullstack.png",
            caption="../report/fullstack_figure.rst",
            category="Full stack",
            labels={"scale": "{scale}", "result": "figure (PNG)"},
        ),
        svg=report(
            "results/{scale}/figures/fullstack.svg",
            caption="../report/fullstack_figure.rst",
            category="Full stack",
            labels={"scale": "{scale}", "result": "figure (SVG)"},
        ),
    log:
        "results/{scale}/logs/fullstack_table.log",
    benchmark:
        "results/{scale}/benchmarks/fullstack_table.tsv"
    conda:
        "../../environment.yml"
    threads: 1
    message:
        "Table and figure of the full stack's modules at scale {wildcards.scale}"
    shell:
        "python -m fp4repro.report fullstack --scale configs/scales/{wildcards.scale}.yaml"
        " --results results/{wildcards.scale} --published {input.published}"
        " --table {output.table} --markdown {output.markdown}"
        " --png {output.png} --svg {output.svg} > {log} 2>&1"


rule attention_control_table:
    output:
        table=report(
            "results/{scale}/tables/attention_control.csv",
            caption="../report/attention_control.rst",
            category="Full stack",
            labels={"scale": "{scale}", "result": "table (CSV)"},
        ),
    log:
        "results/{scale}/logs/attention_control_table.log",
    benchmark:
        "results/{scale}/benchmarks/attention_control_table.tsv"
    conda:
        "../../environment.yml"
    threads: lambda wildcards: SCALES[wildcards.scale].threads
    params:
        settings=section_settings("attention_control"),
    message:
        "Training with attention whose row term is another one's, at scale {wildcards.scale}"
    shell:
        "python -m fp4repro.fullstack attention_control"
        " --scale configs/scales/{wildcards.scale}.yaml --out {output.table} > {log} 2>&1"


rule attention_control_figure:
    input:
        table=rules.attention_control_table.output.table,
    output:
        markdown=report(
            "results/{scale}/tables/attention_control.md",
            caption="../report/attention_control.rst",
            category="Full stack",
            labels={"scale": "{scale}", "result": "table (Markdown)"},
        ),
        png=report(
            "results/{scale}/figures/attention_control.png",
            caption="../report/attention_control.rst",
            category="Full stack",
            labels={"scale": "{scale}", "result": "figure (PNG)"},
        ),
        svg=report(
            "results/{scale}/figures/attention_control.svg",
            caption="../report/attention_control.rst",
            category="Full stack",
            labels={"scale": "{scale}", "result": "figure (SVG)"},
        ),
    log:
        "results/{scale}/logs/attention_control_figure.log",
    benchmark:
        "results/{scale}/benchmarks/attention_control_figure.tsv"
    conda:
        "../../environment.yml"
    threads: 1
    message:
        "Table and figure of attention's training control at scale {wildcards.scale}"
    shell:
        "python -m fp4repro.report attention_control --scale configs/scales/{wildcards.scale}.yaml"
        " --table {input.table} --markdown {output.markdown}"
        " --png {output.png} --svg {output.svg} > {log} 2>&1"


rule fullstack:
    input:
        fullstack_results(config["scale"]),
        results_of("attention_control", config["scale"]),
        rules.fullstack_projections.input,
        rules.fullstack_optim.input,
        rules.attention_sensitivity.input,

rule train:
    input:
        rules.data.output,
    output:
        metrics="results/{scale}/pretrain/{recipe}/seed-{seed}/metrics.csv",
        curve="results/{scale}/pretrain/{recipe}/seed-{seed}/curve.csv",
        layers="results/{scale}/pretrain/{recipe}/seed-{seed}/layers.csv",
        weights="results/{scale}/pretrain/{recipe}/seed-{seed}/model.safetensors",
        about="results/{scale}/pretrain/{recipe}/seed-{seed}/run.json",
    log:
        "results/{scale}/logs/pretrain/{recipe}/seed-{seed}.log",
    benchmark:
        "results/{scale}/benchmarks/pretrain/{recipe}/seed-{seed}.tsv"
    conda:
        "../../environment.yml"
    threads: threads_of_node
    resources:
        gpu=gpus_of_training,
        mem_mb=memory_of_node,
        runtime=minutes_of_job,
        nodes=on_several_nodes("nodes"),
        tasks=on_several_nodes("nodes"),
        tasks_per_gpu=on_several_nodes("no"),
        mpi=on_several_nodes("mpi"),
        launcher=launcher_of,
    params:
        data=subpath(input[0], parent=True),
        out=subpath(output.metrics, parent=True),
        recipe="{recipe}",
        protocol="pretrain",
        settings=run_settings("pretrain"),
    message:
        "Train {wildcards.recipe}, seed {wildcards.seed}, at scale {wildcards.scale}"
    shell:
        "{resources.launcher} -m fp4repro.train --scale configs/scales/{wildcards.scale}.yaml"
        " --protocol {params.protocol} --recipe {params.recipe} --seed {wildcards.seed} --data {params.data}"
        " --out {params.out} 2>&1 | tee {log}"


rule pretrain_table:
    input:
        metrics=lambda wildcards: pretrain_runs(wildcards.scale, "metrics.csv"),
        published="configs/published.yaml",
    output:
        table=report(
            "results/{scale}/tables/pretrain.csv",
            caption="../report/pretrain_table.rst",
            category="Pretraining",
            labels={"scale": "{scale}", "result": "table (CSV)"},
        ),
        markdown=report(
            "results/{scale}/tables/pretrain.md",
            caption="../report/pretrain_table.rst",
            category="Pretraining",
            labels={"scale": "{scale}", "result": "table (Markdown)"},
        ),
    log:
        "results/{scale}/logs/pretrain_table.log",
    benchmark:
        "results/{scale}/benchmarks/pretrain_table.tsv"
    conda:
        "../../environment.yml"
    threads: 1
    params:
        runs=folders,
    message:
        "Pretraining table of scale {wildcards.scale}"
    shell:
        "python -m fp4repro.report pretrain --scale configs/scales/{wildcards.scale}.yaml"
        " --runs {params.runs} --published {input.published}"
        " --table {output.table} --markdown {output.markdown} > {log} 2>&1"


rule pretrain_figure:
    input:
        metrics=lambda wildcards: pretrain_runs(wildcards.scale, "metrics.csv"),
        curves=lambda wildcards: pretrain_runs(wildcards.scale, "curve.csv"),
        table=rules.pretrain_table.output.table,
    output:
        png=report(
            "results/{scale}/figures/pretrain.png",
            caption="../report/pretrain_figure.rst",
            category="Pretraining",
            labels={"scale": "{scale}", "result": "figure (PNG)"},
        ),
        svg=report(
            "results/{scale}/figures/pretrain.svg",
            caption="../report/pretrain_figure.rst",
            category="Pretraining",
            labels={"scale": "{scale}", "result": "figure (SVG)"},
        ),
        pdf="results/{scale}/figures/pretrain.pdf",
    log:
        "results/{scale}/logs/pretrain_figure.log",
    benchmark:
        "results/{scale}/benchmarks/pretrain_figure.tsv"
    conda:
        "../../environment.yml"
    threads: 1
    params:
        runs=folders,
    message:
        "Pretraining figure of scale {wildcards.scale}"
    shell:
        "python -m fp4repro.report figure --scale configs/scales/{wildcards.scale}.yaml"
        " --runs {params.runs} --table {input.table}"
        " --png {output.png} --svg {output.svg} > {log} 2>&1"


rule pretrain:
    input:
        pretrain_results(config["scale"]),

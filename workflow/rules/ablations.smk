use rule train as ablation with:
    output:
        metrics="results/{scale}/ablations/{recipe}/seed-{seed}/metrics.csv",
        curve="results/{scale}/ablations/{recipe}/seed-{seed}/curve.csv",
        layers="results/{scale}/ablations/{recipe}/seed-{seed}/layers.csv",
        about="results/{scale}/ablations/{recipe}/seed-{seed}/run.json",
    log:
        "results/{scale}/logs/ablations/{recipe}/seed-{seed}.log",
    benchmark:
        "results/{scale}/benchmarks/ablations/{recipe}/seed-{seed}.tsv"
    params:
        data=subpath(input[0], parent=True),
        out=subpath(output.metrics, parent=True),
        recipe="{recipe}",
        protocol="ablations",
        settings=run_settings("ablations"),
    message:
        "Ablation {wildcards.recipe} from scratch, seed {wildcards.seed}, at scale {wildcards.scale}"


use rule train as trunk with:
    output:
        metrics="results/{scale}/branches/trunk/seed-{seed}/metrics.csv",
        curve="results/{scale}/branches/trunk/seed-{seed}/curve.csv",
        layers="results/{scale}/branches/trunk/seed-{seed}/layers.csv",
        weights="results/{scale}/branches/trunk/seed-{seed}/model.safetensors",
        about="results/{scale}/branches/trunk/seed-{seed}/run.json",
        checkpoint="results/{scale}/branches/trunk/seed-{seed}/trunk.pt",
    log:
        "results/{scale}/logs/branches/trunk/seed-{seed}.log",
    benchmark:
        "results/{scale}/benchmarks/branches/trunk/seed-{seed}.tsv"
    params:
        data=subpath(input[0], parent=True),
        out=subpath(output.metrics, parent=True),
        recipe="bf16",
        protocol="trunk",
        settings=run_settings("trunk"),
    message:
        "BF16 trunk of the branches, seed {wildcards.seed}, at scale {wildcards.scale}"


use rule train as branch with:
    input:
        rules.data.output,
        trunk="results/{scale}/branches/trunk/seed-{seed}/trunk.pt",
    output:
        metrics="results/{scale}/branches/{recipe}/seed-{seed}/metrics.csv",
        curve="results/{scale}/branches/{recipe}/seed-{seed}/curve.csv",
        layers="results/{scale}/branches/{recipe}/seed-{seed}/layers.csv",
        about="results/{scale}/branches/{recipe}/seed-{seed}/run.json",
    log:
        "results/{scale}/logs/branches/{recipe}/seed-{seed}.log",
    benchmark:
        "results/{scale}/benchmarks/branches/{recipe}/seed-{seed}.tsv"
    params:
        data=subpath(input[0], parent=True),
        out=subpath(output.metrics, parent=True),
        recipe="{recipe}",
        protocol=lambda wildcards, input: f"branches --trunk {input.trunk}",
        settings=run_settings("branches"),
    message:
        "Branch {wildcards.recipe}, seed {wildcards.seed}, at scale {wildcards.scale}"


ruleorder: trunk > branch


rule ablations_table:
    input:
        metrics=entry_runs("metrics.csv", "ablations"),
        curves=entry_runs("curve.csv", "ablations"),
        entries="configs/ablations.yaml",
        published="configs/published.yaml",
    output:
        table=report(
            "results/{scale}/tables/ablations.csv",
            caption="../report/ablations_table.rst",
            category="Ablations",
            labels={"scale": "{scale}", "result": "table (CSV)"},
        ),
        markdown=report(
            "results/{scale}/tables/ablations.md",
            caption="../report/ablations_table.rst",
            category="Ablations",
            labels={"scale": "{scale}", "result": "table (Markdown)"},
        ),
    log:
        "results/{scale}/logs/ablations_table.log",
    benchmark:
        "results/{scale}/benchmarks/ablations_table.tsv"
    conda:
        "../../environment.yml"
    threads: 1
    message:
        "Ablation table of scale {wildcards.scale}"
    shell:
        "python -m fp4repro.report ablations --scale configs/scales/{wildcards.scale}.yaml"
        " --results results/{wildcards.scale} --published {input.published}"
        " --table {output.table} --markdown {output.markdown} > {log} 2>&1"


rule ablations_figure:
    input:
        metrics=entry_runs("metrics.csv", "ablations"),
        curves=entry_runs("curve.csv", "ablations"),
        table=rules.ablations_table.output.table,
    output:
        png=report(
            "results/{scale}/figures/ablations_{protocol}.png",
            caption="../report/ablations_figure.rst",
            category="Ablations",
            labels={"scale": "{scale}", "result": "{protocol} (PNG)"},
        ),
        svg=report(
            "results/{scale}/figures/ablations_{protocol}.svg",
            caption="../report/ablations_figure.rst",
            category="Ablations",
            labels={"scale": "{scale}", "result": "{protocol} (SVG)"},
        ),
        pdf="results/{scale}/figures/ablations_{protocol}.pdf",
    log:
        "results/{scale}/logs/ablations_{protocol}_figure.log",
    benchmark:
        "results/{scale}/benchmarks/ablations_{protocol}_figure.tsv"
    conda:
        "../../environment.yml"
    threads: 1
    message:
        "Ablation figure ({wildcards.protocol}) of scale {wildcards.scale}"
    shell:
        "python -m fp4repro.report ablations-figure"
        " --scale configs/scales/{wildcards.scale}.yaml --protocol {wildcards.protocol}"
        " --results results/{wildcards.scale} --table {input.table}"
        " --png {output.png} --svg {output.svg} > {log} 2>&1"


rule ablations:
    input:
        ablation_results(config["scale"]),

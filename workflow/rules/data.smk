rule data:
    output:
        tokenizer="results/{scale}/data/tokenizer.json",
        train="results/{scale}/data/train.bin",
        validation="results/{scale}/data/validation.bin",
        about="results/{scale}/data/data.json",
    log:
        "results/{scale}/logs/data.log",
    benchmark:
        "results/{scale}/benchmarks/data.tsv"
    conda:
        "../../environment.yml"
    threads: lambda wildcards: SCALES[wildcards.scale].threads
    params:
        out=subpath(output.about, parent=True),
        settings=data_settings,
    message:
        "Token files of scale {wildcards.scale}"
    shell:
        "python -m fp4repro.data --scale configs/scales/{wildcards.scale}.yaml"
        " --out {params.out} 2>&1 | tee {log}"

# The tokens to train on, train.bin or shards/, are no output here: Snakemake would take the finished shards of a
# job that was killed away. data.json, the last file written, has their checksums.
rule data:
    output:
        tokenizer="results/{scale}/data/tokenizer.json",
        validation="results/{scale}/data/validation.bin",
        about="results/{scale}/data/data.json",
    log:
        "results/{scale}/logs/data.log",
    benchmark:
        "results/{scale}/benchmarks/data.tsv"
    conda:
        "../../environment.yml"
    threads: lambda wildcards: SCALES[wildcards.scale].threads
    resources:
        mem_mb=memory_of_node,
        runtime=minutes_of_job,
    params:
        out=subpath(output.about, parent=True),
        settings=data_settings,
    message:
        "Token files of scale {wildcards.scale}"
    shell:
        "python -m fp4repro.data --scale configs/scales/{wildcards.scale}.yaml"
        " --out {params.out} 2>&1 | tee {log}"

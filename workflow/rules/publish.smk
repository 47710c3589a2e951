rule published_folder:
    input:
        pretrain=lambda wildcards: pretrain_results(wildcards.scale),
        formats=lambda wildcards: results_of("formats", wildcards.scale),
        evals=lambda wildcards: evals_results(wildcards.scale),
        published="configs/published.yaml",
        benchmarks="configs/benchmarks.yaml",
    output:
        "results/{scale}/published.txt",
    log:
        "results/{scale}/logs/publish.log",
    benchmark:
        "results/{scale}/benchmarks/publish.tsv"
    conda:
        "../../environment.yml"
    threads: 1
    message:
        "Publish the results of scale {wildcards.scale}"
    shell:
        "python -m fp4repro.publish --scale configs/scales/{wildcards.scale}.yaml"
        " --published {input.published} --receipt {output} 2>&1 | tee {log}"


rule publish:
    input:
        f"results/{config['scale']}/published.txt",

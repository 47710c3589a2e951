rule published_folder:
    input:
        publication,
        published="configs/published.yaml",
        benchmarks="configs/benchmarks.yaml",
        ablations="configs/ablations.yaml",
    output:
        f"results/{config['scale']}/published.txt",
    log:
        f"results/{config['scale']}/logs/publish.log",
    benchmark:
        f"results/{config['scale']}/benchmarks/publish.tsv"
    conda:
        "../../environment.yml"
    threads: 1
    params:
        scale=config["scale"],
    message:
        "Publish the results of scale {params.scale}"
    shell:
        "python -m fp4repro.publish --scale configs/scales/{params.scale}.yaml"
        " --published {input.published} --receipt {output} 2>&1 | tee {log}"


rule publish:
    input:
        rules.published_folder.output,

rule gemm_benchmark:
    output:
        table="results/{scale}/tables/kernels.csv",
    log:
        "results/{scale}/logs/gemm_benchmark.log",
    benchmark:
        "results/{scale}/benchmarks/gemm_benchmark.tsv"
    conda:
        "../../environment.yml"
    threads: cores_of_benchmark
    resources:
        gpu=gpus_of_benchmark,
    params:
        model=lambda wildcards: SCALES[wildcards.scale].model,
        device=lambda wildcards: SCALES[wildcards.scale].device,
    message:
        "Products of the linears of {params.model} in every format"
    shell:
        "python -m fp4repro.bench gemm --model {params.model} --device {params.device}"
        " --out {output.table} > {log} 2>&1"


rule cast_benchmark:
    output:
        table="results/{scale}/tables/casts.csv",
    log:
        "results/{scale}/logs/cast_benchmark.log",
    benchmark:
        "results/{scale}/benchmarks/cast_benchmark.tsv"
    conda:
        "../../environment.yml"
    threads: cores_of_benchmark
    resources:
        gpu=gpus_of_benchmark,
    params:
        device=lambda wildcards: SCALES[wildcards.scale].device,
    message:
        "Quantising operands beside a copy"
    shell:
        "python -m fp4repro.bench casts --device {params.device}"
        " --out {output.table} > {log} 2>&1"


rule roofline_table:
    input:
        published="configs/published.yaml",
        devices="configs/devices.yaml",
    output:
        table="results/{scale}/tables/roofline.csv",
    log:
        "results/{scale}/logs/roofline_table.log",
    benchmark:
        "results/{scale}/benchmarks/roofline_table.tsv"
    conda:
        "../../environment.yml"
    threads: 1
    message:
        "The roofline model beside published measurements"
    shell:
        "python -m fp4repro.roofline --table {output.table} > {log} 2>&1"


rule memory_table:
    input:
        published="configs/published.yaml",
    output:
        table="results/{scale}/tables/memory.csv",
    log:
        "results/{scale}/logs/memory_table.log",
    benchmark:
        "results/{scale}/benchmarks/memory_table.tsv"
    conda:
        "../../environment.yml"
    threads: 1
    message:
        "Memory of operands, small models and the 12B"
    shell:
        "python -m fp4repro.memory --table {output.table} > {log} 2>&1"


# What a GPU that may be lent one day is to be compared with: written before it is measured.
rule predictions:
    input:
        published="configs/published.yaml",
        devices="configs/devices.yaml",
    output:
        table="results/predictions/{device}-{model}.csv",
    log:
        "results/predictions/logs/{device}-{model}.log",
    benchmark:
        "results/predictions/benchmarks/{device}-{model}.tsv"
    conda:
        "../../environment.yml"
    threads: 1
    message:
        "Predicted times of the products of {wildcards.model} on {wildcards.device}"
    shell:
        "python -m fp4repro.roofline --model {wildcards.model} --device {wildcards.device}"
        " --sequence 8192 --microbatch 1 --predict {output.table} > {log} 2>&1"


rule kernels_report:
    input:
        kernels=rules.gemm_benchmark.output.table,
        casts=rules.cast_benchmark.output.table,
        roofline=rules.roofline_table.output.table,
        memory=rules.memory_table.output.table,
    output:
        markdown=report(
            expand(
                "results/{{scale}}/tables/{name}.md",
                name=["kernels", "casts", "roofline", "memory"],
            ),
            caption="../report/kernels_table.rst",
            category="Kernels and memory",
            labels={"scale": "{scale}", "result": "table (Markdown)"},
        ),
        png=report(
            "results/{scale}/figures/kernels.png",
            caption="../report/kernels_figure.rst",
            category="Kernels and memory",
            labels={"scale": "{scale}", "result": "figure (PNG)"},
        ),
        svg=report(
            "results/{scale}/figures/kernels.svg",
            caption="../report/kernels_figure.rst",
            category="Kernels and memory",
            labels={"scale": "{scale}", "result": "figure (SVG)"},
        ),
        pdf="results/{scale}/figures/kernels.pdf",
    log:
        "results/{scale}/logs/kernels_report.log",
    benchmark:
        "results/{scale}/benchmarks/kernels_report.tsv"
    conda:
        "../../environment.yml"
    threads: 1
    message:
        "Tables and figure of kernels and memory of scale {wildcards.scale}"
    shell:
        "python -m fp4repro.report kernels --scale configs/scales/{wildcards.scale}.yaml"
        " --kernels {input.kernels} --casts {input.casts} --roofline {input.roofline}"
        " --memory {input.memory} --png {output.png} --svg {output.svg} > {log} 2>&1"


rule kernels:
    input:
        f"results/{config['scale']}/figures/kernels.svg",
        "results/predictions/H200-nemotron-12b.csv",

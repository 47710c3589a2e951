from snakemake.utils import min_version

min_version("9.27")


configfile: "configs/default.yaml"


report: "workflow/report/workflow.rst"


include: "workflow/rules/common.smk"
include: "workflow/rules/studies.smk"
include: "workflow/rules/data.smk"
include: "workflow/rules/pretrain.smk"
include: "workflow/rules/formats.smk"
include: "workflow/rules/ablations.smk"
include: "workflow/rules/fidelity.smk"
include: "workflow/rules/fullstack_projections.smk"
include: "workflow/rules/fullstack_optim.smk"
include: "workflow/rules/fullstack_attention.smk"
include: "workflow/rules/fullstack.smk"
include: "workflow/rules/kernels.smk"
include: "workflow/rules/evals.smk"
include: "workflow/rules/publish.smk"


rule all:
    default_target: True
    input:
        pretrain_results(config["scale"]),
        ablation_results(config["scale"]),
        rules.formats.input,
        rules.fidelity.input,
        rules.fullstack.input,
        rules.kernels.input,
        evals_results(config["scale"]),
    message:
        f"Results of scale {config['scale']}: tables and figures in results/{config['scale']}"

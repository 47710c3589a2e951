"""Input and params functions of the studies: which files and settings each of their rules depends on."""


def studied_models(scale):
    """File name of each model of a scale's studies -> the model's name."""
    return {name.replace(os.sep, "--"): name for name in SCALES[scale].fidelity.models}


def studied_model(wildcards):
    """The model of a file, which may be one that the scale does not name."""
    subject = wildcards.subject
    return studied_models(wildcards.scale).get(subject, subject.replace("--", os.sep))


def is_ours(wildcards):
    return studied_model(wildcards) == "hybrid"


def studied_files(name):
    """An input function: our run's file of that name where the subject is our own model."""

    def file(wildcards):
        return studied_run(name)(wildcards) if is_ours(wildcards) else []

    return file


def run_and_data(wildcards, input):
    """The arguments that name our run and its token files; a pretrained model needs neither."""
    if not is_ours(wildcards):
        return ""
    return (
        f"--run {os.path.dirname(input.about)} --data {os.path.dirname(input.data[0])}"
    )


def sensitivity_of(wildcards, input):
    """The same for the sensitivity study, which is told the model first of all."""
    if not is_ours(wildcards):
        return studied_model(wildcards)
    return f"{os.path.dirname(input.about)} --data {os.path.dirname(input.data[0])}"


def token_files(wildcards):
    return rules.data.output if is_ours(wildcards) else []


def fidelity_settings(*keys):
    """A params function: those settings of the studies, and the text of a pretrained model."""

    def settings(wildcards):
        plan = asdict(SCALES[wildcards.scale].fidelity)
        of_text = "" if is_ours(wildcards) else data_settings(wildcards)
        return json.dumps([{key: plan[key] for key in keys}, of_text])

    return settings


def studied_rows(experiment):
    """An input function: the rows of every model of the scale."""

    def files(wildcards):
        return [
            f"results/{wildcards.scale}/{experiment}/{subject}.csv"
            for subject in studied_models(wildcards.scale)
        ]

    return files


OPTIM_STUDIES = ["optimizer_states", "newton_schulz", "error_growth"]


def section_settings(name):
    """A params function: a section of the scale, which is what a study's figures depend on."""

    def settings(wildcards):
        return json.dumps(
            asdict(getattr(SCALES[wildcards.scale], name)), sort_keys=True
        )

    return settings


def cores_of_benchmark(wildcards):
    """All of them on a CPU, so that nothing runs beside a benchmark; on a GPU that is `gpu`'s to do."""
    return workflow.cores


def gpus_of_benchmark(wildcards):
    """All GPUs of this run, where the scale uses one."""
    if SCALES[wildcards.scale].device != "cuda":
        return 0
    given = workflow.global_resources.get("gpu").value
    return 1 if given is None else given


def evaluated_run(name):
    """An input function: the file of that name of the run that a model's name means, if it is one."""

    def file(wildcards):
        run = re.fullmatch(r"[^/]+/seed-\d+", wildcards.model)
        folder = f"results/{wildcards.scale}/pretrain/{wildcards.model}"
        return [f"{folder}/{name}"] if run else []

    return file


def evaluated_model(wildcards, input):
    """How the model is named to the stage: a run by its folder, with its token files."""
    if not input.about:
        return f"{wildcards.model} --if-available"
    return f"{os.path.dirname(input.about[0])} --data {os.path.dirname(input.data[0])}"


def evals_settings(wildcards):
    """What the answers depend on beside the model: its group's settings, the folder that `local` stands
    for here, and the text of a pretrained model."""
    plan = SCALES[wildcards.scale].evals
    run = evaluated_run("run.json")(wildcards)
    settings = asdict(plan.runs if run else plan.pretrained)
    del settings["models"]
    data = os.environ.get(VARIABLE)
    local = os.path.abspath(data) if data else None
    settings["mmlu_pro"] = local if plan.mmlu_pro == "local" else plan.mmlu_pro
    settings["text"] = "" if run else data_settings(wildcards)
    return json.dumps(settings, sort_keys=True)


def tokens_of_run(wildcards):
    """A pretrained model brings its own tokenizer and needs no token files."""
    return [rules.data.output.about] if evaluated_run("run.json")(wildcards) else []


def evals_of(scale, name):
    """The file of that name of every model that the scale evaluates."""
    models = SCALES[scale].evals.models
    return [f"results/{scale}/evals/{model}/{name}" for model in models]


def evals_results(scale):
    """The tables and the figure; nothing where the scale evaluates nothing."""
    if not SCALES[scale].evals.models:
        return []
    paired = [
        f"results/{scale}/tables/evals_paired.{suffix}" for suffix in ("csv", "md")
    ]
    return [*results_of("evals", scale), *paired]


def publication(wildcards):
    """What is published: all that `all` makes, or what the targets named by `studies` make."""
    targets = config.get("studies", ["all"])
    targets = [targets] if isinstance(targets, str) else targets
    return [path for name in targets for path in getattr(rules, name).input]

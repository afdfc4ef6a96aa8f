"""Model, prompts and plan: everything that is decided before a pass runs."""


rule prepare_model:
    output:
        "results/{sweep}/model.json",
    log:
        "logs/{sweep}/prepare_model.log",
    retries: 0
    localrule: True
    conda:
        "../../envs/local.yaml"
    params:
        model=SPEC.model.model_dump_json(),
        shape=f"shape {SHAPE_VERSION}",
    message:
        "Preparing the model (fetched and converted once)"
    script:
        "../../scripts/prepare_model.py"


rule prepare_prompts:
    input:
        model="results/{sweep}/model.json",
        prompts=SPEC.prompts.file,
    output:
        "results/{sweep}/prompts.parquet",
    log:
        "logs/{sweep}/prepare_prompts.log",
    retries: 0
    localrule: True
    conda:
        "../../envs/local.yaml"
    params:
        sweep=SPEC_PARAM,
    message:
        "Tokenizing {input.prompts}"
    script:
        "../../scripts/prepare_prompts.py"


checkpoint expand_sweep:
    input:
        model="results/{sweep}/model.json",
        prompts="results/{sweep}/prompts.parquet",
        vectors=VECTOR_FILES,
    output:
        # The earlier plan is read before it is replaced, and a plan that fails replaces nothing.
        sweep=kept("results/{sweep}/sweep.json"),
        points=kept("results/{sweep}/points.parquet"),
        plan=kept("results/{sweep}/plan.json"),
        # Finished chunks stay chunks, whatever the sweep asks for now.
        chunks=kept(directory("results/{sweep}/chunks")),
    log:
        "logs/{sweep}/expand_sweep.log",
    retries: 0
    localrule: True
    conda:
        "../../envs/local.yaml"
    params:
        sweep=SPEC_PARAM,
        settings=SETTINGS_PARAM,
        semantics=f"semantics {SEMANTICS}",
    message:
        "Expanding the axes of {wildcards.sweep} into points, passes and chunks"
    script:
        "../../scripts/expand_sweep.py"

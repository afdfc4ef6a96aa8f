"""Parts become the published tables."""


rule merge_chunks:
    input:
        unpack(engine_parts),
        plan="results/{sweep}/plan.json",
        sweep="results/{sweep}/sweep.json",
        points="results/{sweep}/points.parquet",
        prompts="results/{sweep}/prompts.parquet",
    output:
        values="results/{sweep}/{engine}/values.parquet",
        sessions="results/{sweep}/{engine}/sessions.parquet",
        run="results/{sweep}/{engine}/run.json",
    log:
        "logs/{sweep}/merge_chunks/{engine}.log",
    wildcard_constraints:
        engine="local|ndif|reference",
    retries: 0
    localrule: True
    conda:
        "../../envs/local.yaml"
    params:
        sweep=SPEC_PARAM,
    message:
        "Merging the chunks of {wildcards.engine}"
    script:
        "../../scripts/merge_chunks.py"


rule summarize:
    input:
        "results/{sweep}/{engine}/values.parquet",
    output:
        "results/{sweep}/{engine}/summary.parquet",
    log:
        "logs/{sweep}/summarize/{engine}.log",
    retries: 0
    localrule: True
    conda:
        "../../envs/local.yaml"
    params:
        sweep=SPEC_PARAM,
        bootstrap=CONFIG.bootstrap.model_dump_json(),
    message:
        "Means and intervals of {input}"
    script:
        "../../scripts/summarize.py"

"""Engine `mixed`: both sides agree on a few points, then their parts become one table."""


checkpoint calibrate:
    input:
        unpack(calibration_parts),
        plan="results/{sweep}/plan.json",
        points="results/{sweep}/points.parquet",
        prompts="results/{sweep}/prompts.parquet",
    output:
        verdict="results/{sweep}/mixed/calibration.json",
        table="results/{sweep}/mixed/calibration.parquet",
        figure=report(
            "results/{sweep}/mixed/calibration.svg",
            caption="../report/calibrate.rst",
            category="Parity",
            subcategory="{sweep}",
            labels={"figure": "calibration"},
        ),
    log:
        "logs/{sweep}/calibrate.log",
    retries: 0
    localrule: True
    conda:
        "../../envs/local.yaml"
    params:
        sweep=SPEC_PARAM,
    message:
        "Comparing both sides on the calibration points"
    script:
        "../../scripts/calibrate.py"


rule merge_mixed:
    input:
        unpack(mixed_parts),
        calibration="results/{sweep}/mixed/calibration.json",
        plan="results/{sweep}/plan.json",
        sweep="results/{sweep}/sweep.json",
        points="results/{sweep}/points.parquet",
        prompts="results/{sweep}/prompts.parquet",
    output:
        values="results/{sweep}/mixed/values.parquet",
        engines="results/{sweep}/mixed/engines.parquet",
        sessions="results/{sweep}/mixed/sessions.parquet",
        run="results/{sweep}/mixed/run.json",
    log:
        "logs/{sweep}/merge_mixed.log",
    retries: 0
    localrule: True
    conda:
        "../../envs/local.yaml"
    params:
        sweep=SPEC_PARAM,
    message:
        "Merging the chunks of both sides"
    script:
        "../../scripts/merge_mixed.py"

"""Two engines, value by value; the workflow fails when they do not agree."""


rule check_parity:
    input:
        unpack(parity_inputs),
    output:
        verdict="results/{sweep}/parity/{a}-vs-{b}.json",
        table="results/{sweep}/parity/{a}-vs-{b}.parquet",
        figure=report(
            "results/{sweep}/parity/{a}-vs-{b}.svg",
            caption="../report/check_parity.rst",
            category="Parity",
            subcategory="{sweep}",
            labels={"figure": "{a} against {b}"},
        ),
    log:
        "logs/{sweep}/check_parity/{a}-vs-{b}.log",
    retries: 0
    localrule: True
    conda:
        "../../envs/local.yaml"
    params:
        sweep=SPEC_PARAM,
        points=str(CONFIG.parity.points),
    message:
        "Comparing {wildcards.a} and {wildcards.b}, value by value"
    script:
        "../../scripts/check_parity.py"

"""Pictures and the page that says where the numbers come from; both go into the report."""


rule plot_measures:
    input:
        summary="results/{sweep}/{engine}/summary.parquet",
        values="results/{sweep}/{engine}/values.parquet",
    output:
        report(
            "results/{sweep}/{engine}/figures/{measure}.svg",
            caption="../report/plot_measures.rst",
            category="Figures",
            subcategory="{sweep}",
            labels={"measure": "{measure}", "engine": "{engine}"},
        ),
    log:
        "logs/{sweep}/plot_measures/{engine}/{measure}.log",
    retries: 0
    localrule: True
    conda:
        "../../envs/local.yaml"
    params:
        sweep=SPEC_PARAM,
    message:
        "Plotting {wildcards.measure}"
    script:
        "../../scripts/plot_measures.py"


rule write_overview:
    input:
        run="results/{sweep}/{engine}/run.json",
        summary="results/{sweep}/{engine}/summary.parquet",
    output:
        report(
            "results/{sweep}/{engine}/overview.html",
            caption="../report/write_overview.rst",
            category="Run",
            subcategory="{sweep}",
            labels={"page": "provenance and null controls", "engine": "{engine}"},
        ),
    log:
        "logs/{sweep}/write_overview/{engine}.log",
    retries: 0
    localrule: True
    conda:
        "../../envs/local.yaml"
    params:
        sweep=SPEC_PARAM,
    message:
        "Writing {output}"
    script:
        "../../scripts/write_overview.py"

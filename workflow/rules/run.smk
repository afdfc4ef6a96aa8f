"""The one rule that opens a model and runs passes: one job a chunk."""


rule run_chunk:
    input:
        # The name of a chunk is a digest of its contents: its age says nothing.
        chunk=ancient("results/{sweep}/chunks/{chunk}.json"),
    output:
        facts="results/{sweep}/{engine}/chunks/{chunk}.json",
        part="results/{sweep}/{engine}/chunks/{chunk}.parquet",
    log:
        "logs/{sweep}/run_chunk/{engine}/{chunk}.log",
    benchmark:
        "benchmarks/{sweep}/run_chunk/{engine}/{chunk}.tsv"
    conda:
        "../../envs/local.yaml"
    threads: CONFIG.threads
    resources:
        mem_mb=4000,
    params:
        # Not Snakemake's threads, which follow -c: the last bits follow the thread count.
        threads=CONFIG.threads,
        device=CONFIG.device,
    message:
        "Running chunk {wildcards.chunk} on engine {wildcards.engine} (progress: {log})"
    script:
        "../../scripts/run_chunk.py"

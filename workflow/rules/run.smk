"""The rules that open a model: one check of server or device a run, one job a chunk."""


checkpoint check_ndif:
    input:
        model=ancient("results/{sweep}/model.json"),
    output:
        preflight="results/{sweep}/ndif/preflight.json",
    log:
        "logs/{sweep}/check_ndif.log",
    retries: 0
    localrule: True
    conda:
        "../../envs/local.yaml"
    params:
        sweep=SPEC_PARAM,
        # A server that was right yesterday may serve something else today.
        run=f"run {uuid4()}",
    message:
        "Asking the NDIF server what it serves"
    script:
        "../../scripts/check_ndif.py"


checkpoint check_device:
    output:
        device="results/{sweep}/device.json",
    log:
        "logs/{sweep}/check_device.log",
    retries: 0
    localrule: True
    conda:
        "../../envs/local.yaml"
    params:
        # Asked for in every run, before a chunk begins; on a cluster only its nodes can tell.
        run=f"run {uuid4()}",
    message:
        "Looking for the GPUs that device=cuda asks for"
    script:
        "../../scripts/check_device.py"


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
    retries: CHUNK_RETRIES
    conda:
        "../../envs/local.yaml"
    threads: chunk_threads
    resources:
        mem_mb=chunk_memory,
        runtime=chunk_runtime,
        gpu=chunk_gpus,
        ndif_sessions=ndif_sessions,
        side=side,
    message:
        "Running chunk {wildcards.chunk} on engine {resources.side} (progress: {log})"
    script:
        "../../scripts/run_chunk.py"

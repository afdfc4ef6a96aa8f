#!/bin/sh
# The default sweep on a local, real NDIF server, compared value by value with this machine's own.
set -eu
trap 'nnsweep ndif stop' EXIT INT TERM
host=$(nnsweep ndif serve --model smollm2-135m --threads 2 | grep '^NDIF_HOST=')
echo "$host"
export "${host?}" NO_PROXY=127.0.0.1
for sweep in capitals_layers ioi_heads; do
	snakemake --cores 2 --config engine=ndif sweep=$sweep
	nnsweep show results/$sweep/ndif
	nnsweep parity results/$sweep/local results/$sweep/ndif
	cmp results/$sweep/local/values.parquet results/$sweep/ndif/values.parquet
	echo "  local/values.parquet and ndif/values.parquet are the same bytes"
done

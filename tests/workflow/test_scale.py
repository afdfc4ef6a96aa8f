"""Thousands of points: planned and dry-run in seconds, in a few hundred jobs, in little memory."""

import re
import sys

import yaml

from tiny import save_tiny
from workflow.project import ROOT, command, copy_workflow

NAME_LIMIT = 255


def test_ten_thousand_points_are_few_jobs(tokenizer, tmp_path):
    shape = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
    model = save_tiny("llama", tmp_path / "weights", tokenizer, hidden_size=36, **shape)
    project = copy_workflow(tmp_path / "project", model)
    project.write_sweep(
        prompts={
            "file": "config/prompts/capitals.csv",
            "text": "base",
            "answers": {"target": "source_capital", "foil": "capital"},
        },
        positions={},
        axes={"layer": "all", "head": "all", "value": [step / 10 for step in range(38)]},
        writes=[
            {"site": "z", "layer": "$layer", "head": "$head", "position": "last", "set": "$value"}
        ],
    )
    written = yaml.safe_load((ROOT / "config/config.yaml").read_text())
    default = {name: written[name] for name in ("batch_rows", "chunk_passes")}
    done = project.run("results/tiny/plan.json", **default)
    assert done.code == 0, done.out
    assert project.plan()["points"] == 30 * 9 * 38
    assert "10260 points" in (project / "logs/tiny/expand_sweep.log").read_text()

    dry = project.run("-n", **default)
    assert dry.code == 0, dry.out
    assert "tiny: 10260 points, engine local" in dry.out
    assert 20 <= dry.jobs("run_chunk") <= 400
    names = [word.strip(",") for word in dry.out.split() if "results/" in word or "logs/" in word]
    assert len(names) > 40
    assert max(len(part) for name in names for part in name.split("/")) < NAME_LIMIT
    assert max(map(len, names)) < NAME_LIMIT


MERGE_MB = 120 + 2 * 116
"""What the imports take, and twice what merging 2,000 points on 50 rows was seen to take."""


def test_merging_a_hundred_thousand_values_stays_in_little_memory(real_model):
    asked = ["--points", "2000", "--jobs-of", "0", "--steps", "merge"]
    done = command(sys.executable, "bench/scale.py", *asked, cwd=ROOT)
    assert done.code == 0, done.out
    (peak,) = re.findall(r"^\| merge \| [\d.]+ \| (\d+) MB \|$", done.out, re.MULTILINE)
    assert int(peak) < MERGE_MB

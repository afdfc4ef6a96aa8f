"""How tests are dealt out to workers."""

from groups import APART, FAMILIES, TOGETHER, group_of


def test_groups_name_files_that_exist(repository):
    for path in (FAMILIES, *TOGETHER, *APART):
        assert (repository / path).exists(), path


def test_a_file_is_a_group_unless_something_else_is_said():
    assert group_of("tests/workflow/test_slurm.py::test_a") == "tests/workflow/test_slurm.py"
    assert group_of("tests/ndif/test_engine.py::test_a") == group_of(
        "tests/ndif/test_server.py::test_b[x]"
    )
    kills = ["tests/workflow/test_kills.py::test_a[1]", "tests/workflow/test_kills.py::test_a[2]"]
    assert len(set(map(group_of, kills))) == 2
    assert group_of(f"{FAMILIES}::test_a[gpt2-set]") == group_of(f"{FAMILIES}::test_b[gpt2]")
    assert group_of(f"{FAMILIES}::test_a[gpt2]") != group_of(f"{FAMILIES}::test_a[opt]")

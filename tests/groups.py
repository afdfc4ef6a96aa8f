"""Which tests stay together in one worker when pytest runs with `--numprocesses`.

Tests of a file share what its fixtures have made, so a file is one group, with these exceptions.
Groups are begun in the order in which their first tests are collected: long ones come first.
"""

from xdist.scheduler import LoadScopeScheduling

TOGETHER = {
    "tests/ndif/test_engine.py": "one NDIF server",
    "tests/ndif/test_kills.py": "one NDIF server",
    "tests/ndif/test_mixed.py": "one NDIF server",
    "tests/ndif/test_server.py": "one NDIF server",
}
"""Files that share a server, or whose servers, of some GB each, should not all run at once."""

FAMILIES = "tests/numeric/test_families.py"
"""Here a model family is a group: its model is made and opened once."""

APART = (
    "tests/workflow/test_kills.py",
    "tests/workflow/test_faults.py",
    "tests/workflow/test_growth.py",
    "tests/workflow/test_run.py",
    "tests/workflow/test_commands.py",
    "tests/workflow/test_engines.py",
    "tests/workflow/test_status.py",
    "tests/workflow/test_offline.py",
    "tests/workflow/test_scale.py",
    "tests/unit",
)
"""Here every test is a group of its own: what they share is shared by all workers, or cheap."""


class Groups(LoadScopeScheduling):
    """Hands out whole groups of tests."""

    def __init__(self, config, log=None):
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def group_of(nodeid: str) -> str:
    """The group of a test by its node id."""
    file, _, test = nodeid.partition("::")
    if file == FAMILIES and "[" in test:
        return f"family {test.partition('[')[2].rstrip(']').partition('-')[0]}"
    if file.startswith(APART):
        return nodeid
    return TOGETHER.get(file, file)

"""One name for a rule, its script and its logs; generated files and pins are in step."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from nnsweep.generated import generated
from workflow.project import ROOT

RULE = re.compile(r"^(?:rule|checkpoint) (\w+):\n((?:\n|    .*\n)+)", re.MULTILINE)
LOCAL = ROOT / "envs" / "local.yaml"
ENVIRONMENTS = sorted((ROOT / "envs").glob("*.yaml"))
LOCKS = sorted([*ROOT.glob("requirements*.lock"), *ROOT.glob("envs/*.lock")])


def rules() -> dict[str, str]:
    """Rule -> its text, rule `all` left out."""
    files = [ROOT / "workflow" / "Snakefile", *(ROOT / "workflow" / "rules").glob("*.smk")]
    found = dict(pair for path in files for pair in RULE.findall(path.read_text()))
    assert "all" in found
    return {name: text for name, text in found.items() if name != "all"}


def pins(path: Path) -> dict[str, str]:
    """Package -> version of a lock file."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    found = {}
    for line in lines:
        requirement = Requirement(line)
        (pin,) = requirement.specifier
        assert pin.operator == "==", line
        found[canonicalize_name(requirement.name)] = pin.version
    return found


def test_every_rule_has_one_script_and_every_script_one_rule():
    scripts = {path.stem for path in (ROOT / "scripts").glob("*.py")}
    assert set(rules()) == scripts
    for name, text in rules().items():
        assert f'"../../scripts/{name}.py"' in text, name


@pytest.mark.parametrize(("name", "text"), rules().items())
def test_every_rule_says_what_it_does_and_where_it_logs(name, text):
    for directive in ("log", "conda", "message"):
        assert re.search(rf"^    {directive}:", text, re.MULTILINE), f"{name} has no {directive}"
    (log,) = re.findall(r'"(logs/[^"]+)"', text)
    assert log.split("/")[2].removesuffix(".log") == name


def test_generated_files_are_those_in_the_repository():
    for path, text in generated(ROOT).items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run `make schemas`"


def test_schemas_hold_no_references():
    for path in (ROOT / "workflow" / "schemas").glob("*.yaml"):
        assert "$ref" not in path.read_text()


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_locks_are_exact_and_name_no_place(path):
    assert pins(path)
    for line in path.read_text().splitlines():
        assert "://" not in line, line
        assert not line.startswith(("-", "@")), line
        assert " @ " not in line, line


def listed(path: Path) -> tuple[list[str], list[Requirement]]:
    """What an environment file takes from conda, and what it takes from pip (`..` left out)."""
    entries = yaml.safe_load(path.read_text())["dependencies"]
    (pip,) = [entry["pip"] for entry in entries if isinstance(entry, dict)]
    plain = [entry for entry in entries if isinstance(entry, str)]
    return plain, [Requirement(line) for line in pip if line != ".."]


@pytest.mark.parametrize("path", ENVIRONMENTS, ids=lambda path: path.name)
def test_environments_have_exactly_the_locked_versions(path):
    plain, pip = listed(path)
    locked = pins(ROOT / "requirements.lock")
    for requirement in pip:
        assert str(requirement.specifier) == f"=={locked[canonicalize_name(requirement.name)]}"
        assert not requirement.url
    versions = dict(entry.split(" =") for entry in plain)
    assert set(versions) == {"python", "pip"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert SpecifierSet(project["requires-python"]).contains(f"{versions['python']}.0")


@pytest.mark.parametrize("name", rules())
def test_every_rule_has_an_environment_that_is_there(name):
    (path,) = re.findall(r'conda:\n\s+"../../(envs/[^"]+)"', rules()[name])
    assert ROOT / path in ENVIRONMENTS


def test_the_environment_of_rules_has_every_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {canonicalize_name(requirement.name) for requirement in listed(LOCAL)[1]}
    assert {canonicalize_name(Requirement(d).name) for d in project["dependencies"]} == names


def test_locks_satisfy_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked = pins(ROOT / "requirements.lock")
    for requirement in map(Requirement, project["dependencies"]):
        version = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version, prereleases=True), requirement

"""Every command, target, path and key that the pages name exists."""

import re
import shlex
from pathlib import Path

import pytest
import typer.main

from nnsweep.cli import app
from nnsweep.config import Config
from workflow.project import ROOT

PAGES = [
    path
    for path in (ROOT / "README.md", ROOT / "config" / "README.md", *(ROOT / "docs").glob("*.md"))
    if path.exists()
]
BLOCK = re.compile(r"^```(?:sh|bash|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
KNOWN = {"cd", "git", "make", "nnsweep", "snakemake", "pip", "python", "python3", "export"}


def lines(page: Path) -> list[str]:
    """The command lines of a page's shell blocks, continuations joined."""
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    joined = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ").strip() for line in joined if line.strip()]


def commands(page: Path) -> list[list[str]]:
    """The words of every command of a page, settings in front left out."""
    found = []
    for line in lines(page):
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set("|&;"):
                found.append(words)
                words = []
            elif words or not re.match(r"^[A-Z_]+=", word):
                words.append(word)
    return [words for words in found if words]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_exist(page):
    for words in commands(page):
        assert words[0] in KNOWN, f"unknown command: {' '.join(words)}"
        if words[0] == "make":
            for target in [word for word in words[1:] if "=" not in word and word[0] != "-"]:
                assert target in TARGETS, f"make {target}"
        if words[0] == "nnsweep":
            known_command(words[1:])
        if words[0] == "snakemake":
            known_keys(words[1:])


def known_command(words: list[str]) -> None:
    """Walk down the command line's groups; every option must be one of the command's."""
    command, path = typer.main.get_command(app), []
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        assert words[0] in command.commands, f"nnsweep {' '.join([*path, words[0]])}"
        command = command.commands[words[0]]
        path.append(words[0])
        words = words[1:]
    options = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    for word in words:
        if word.startswith("--") and word != "--help":
            assert word.split("=")[0] in options, f"nnsweep {' '.join(path)} {word}"


def known_keys(words: list[str]) -> None:
    """KEY=VALUE after --config must be keys of the configuration, with values that fit."""
    if "--config" not in words:
        return
    for word in words[words.index("--config") + 1 :]:
        if word.startswith("-"):
            break
        key, _, value = word.partition("=")
        assert key in Config.model_fields, word
        if key == "engine":
            Config.model_validate({key: value})
        if key == "sweep" and value.islower():
            assert (ROOT / "config" / "sweeps" / f"{value}.yaml").exists(), word


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target and not target.startswith("mailto:"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_exist(page):
    """Paths into the repository that stand in code marks (patterns and results left out)."""
    folders = "config|workflow|scripts|envs|profiles|src|tests|docs|bench"
    text = page.read_text(encoding="utf-8")
    for path in re.findall(rf"`((?:{folders})/[\w./-]+)`", text):
        if "NAME" not in path:
            assert (ROOT / path).exists(), path


def test_messages_name_existing_pages():
    """Pages that error messages and comments of the package send a reader to."""
    for path in (ROOT / "src").rglob("*.py"):
        for page in re.findall(r"docs/[\w-]+\.md", path.read_text(encoding="utf-8")):
            assert (ROOT / page).exists(), f"{path.name} names {page}"


def test_the_manual_names_only_keys_that_exist():
    text = (ROOT / "config" / "README.md").read_text(encoding="utf-8")
    shipped = (ROOT / "config" / "config.yaml").read_text(encoding="utf-8")
    for key in re.findall(r"--config (\w+)=", text) + re.findall(r"^(\w+):", shipped, re.MULTILINE):
        assert key in Config.model_fields, key

"""Dockerfile.trtllm fits its page of the documentation, its build context, and the package that it installs."""

from __future__ import annotations

import json
import re
import shlex
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reference" / "images.md").read_text(encoding="utf-8")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TRITON = "nvcr.io/nvidia/tritonserver"
ROW = re.compile(
    r"^\| `(\d\d\.\d\d)-trtllm-python-py3` \| (\S+) \| ([\d.]*) ?\| ([\d.]*) ?\| ([\d.]*) ?\|$", re.MULTILINE
)
ROWS = ROW.findall(PAGE)


def instructions() -> list[tuple[str, str]]:
    """Name and arguments of each instruction, continued lines joined, comments left out."""
    text = (ROOT / "Dockerfile.trtllm").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


def all_of(name: str) -> list[str]:
    return [arguments for each, arguments in instructions() if each == name]


def copied() -> list[str]:
    return [source for arguments in all_of("COPY") for source in shlex.split(arguments)[:-1]]


def default(argument: str) -> str:
    return next(
        value for name, _, value in (each.partition("=") for each in all_of("ARG")) if name == argument and value
    )


def in_context(path: str) -> bool:
    """Whether .dockerignore lets a path of the repository into the build context; the last rule that fits decides."""
    inside = True
    for rule in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        pattern = rule.removeprefix("!")
        if (
            rule
            and not rule.startswith("#")
            and any(
                fnmatchcase(part, pattern.removeprefix("**/"))
                if pattern.startswith("**/")
                else fnmatchcase(path, pattern)
                for part in path.split("/")
            )
        ):
            inside = rule.startswith("!")
    return inside


def test_the_base_image_is_a_tag_of_the_table() -> None:
    image, _, tag = default("BASE_IMAGE").partition(":")
    assert all_of("FROM") == ["${BASE_IMAGE}@${BASE_DIGEST}"], "a tag can be moved"
    assert "BASE_DIGEST" in all_of("ARG"), "without a default: nobody has checked one"
    assert image == TRITON
    assert tag == f"{ROWS[-1][0]}-trtllm-python-py3", "the newest of the table"
    assert f"`{ROWS[-1][0]}` is the default" in PAGE


def test_the_table_of_tags_is_in_order_and_complete() -> None:
    tags = [row[0] for row in ROWS]
    releases = [Version(row[1]) for row in ROWS]
    assert len(ROWS) == PAGE.count("-trtllm-python-py3` |")
    assert tags == sorted(set(tags))
    assert releases == sorted(releases)
    supported = SpecifierSet(PROJECT["project"]["requires-python"])
    assert all(python in supported for _, _, python, _, _ in ROWS if python)
    minors = {f"{release.major}.{release.minor}" for release in releases}
    assert minors == {*(f"0.{minor}" for minor in range(8, 22)), "1.0", "1.1", "1.2"}, "every release the lanes know"
    for column in (3, 4):
        numbers = [tuple(map(int, row[column].split("."))) for row in ROWS if row[column]]
        assert numbers == sorted(numbers), "CUDA and driver only rise"


def test_what_is_copied_exists_and_reaches_the_build() -> None:
    assert copied()
    for source in copied():
        assert (ROOT / source).exists(), source
        assert in_context(source), f"{source} is kept out by .dockerignore"
    for outside in ("tests", "docs", ".git", ".venv", ".pipeline", "trtllm_pipeline/__pycache__"):
        assert not in_context(outside), outside


def test_all_that_the_package_is_built_from_is_copied() -> None:
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {"pyproject.toml", *PROJECT["project"]["license-files"], *wheel["packages"], *wheel["force-include"]}
    if "readme" in PROJECT["project"]:
        needed.add(PROJECT["project"]["readme"])
    assert needed <= set(copied())


def test_what_is_installed_is_what_was_copied_and_locked_nothing_else() -> None:
    installs = re.findall(r"pip install ([^&]+?) +&&", " ".join(all_of("RUN")))
    folder = next(arguments for arguments in all_of("WORKDIR"))
    assert installs == [
        "--require-hashes --requirement requirements/image.txt",
        f"--no-deps --no-build-isolation {folder}",
    ]
    assert all(shlex.split(arguments)[-1].startswith(f"{folder}/") for arguments in all_of("COPY"))


LOCK = (ROOT / "requirements" / "image.txt").read_text(encoding="utf-8").replace("\\\n", " ")
LOCKED = [Requirement(line.partition(" --hash")[0]) for line in LOCK.splitlines() if re.match(r"\w", line)]


def test_every_locked_package_has_one_version_and_its_hashes() -> None:
    assert len(LOCKED) > 30
    for line in LOCK.splitlines():
        if re.match(r"\w", line):
            assert re.fullmatch(r"[\w.-]+==[\w.]+( ; [^-]+?)?( +--hash=sha256:[0-9a-f]{64})+ *", line), line[:80]


@pytest.mark.parametrize("python", ["3.10", "3.12"])
def test_the_lock_file_has_all_that_the_package_needs(python: str) -> None:
    """In a range that pyproject.toml allows; after a change there, run the command in the lock file's first lines."""
    environment = {
        **default_environment(),
        "python_version": python,
        "python_full_version": f"{python}.0",
        "platform_machine": "x86_64",
    }
    versions = {
        canonicalize_name(each.name): str(each.specifier).removeprefix("==")
        for each in LOCKED
        if each.marker is None or each.marker.evaluate(environment)
    }
    project = PROJECT["project"]
    build = PROJECT["build-system"]["requires"]
    for text in (*project["dependencies"], *build):
        wanted = Requirement(text)
        assert versions[canonicalize_name(wanted.name)] in wanted.specifier, text


def test_every_variable_is_declared_and_every_argument_is_used() -> None:
    declared: set[str] = set()
    used: set[str] = set()
    for name, arguments in instructions():
        names = set(re.findall(r"\$\{(\w+)\}", arguments))
        assert names <= declared, f"{name} {arguments}"
        used |= names
        if name == "FROM":
            declared = set()  # arguments from before a FROM are not known after it, unless they are named again
        if name in {"ARG", "ENV"}:
            declared.add(arguments.partition("=")[0])
    assert {arguments.partition("=")[0] for arguments in all_of("ARG")} == used


def test_no_variable_is_one_that_bash_sets_itself() -> None:
    """bash ignores what it is given for these: `ARG UID=1000` would be 0 in RUN."""
    assert "/bin/bash" in all_of("SHELL")[-1]
    assert not {"UID", "EUID", "GROUPS", "HOSTNAME", "PWD", "SECONDS"} & {
        each.partition("=")[0] for name in ("ARG", "ENV") for each in all_of(name)
    }


def test_it_runs_the_pipeline_not_as_root_in_its_volume() -> None:
    assert all_of("USER")[-1] == "${USER_ID}"
    assert int(default("USER_ID")) >= 1000
    (entry,) = json.loads(all_of("ENTRYPOINT")[-1])
    assert entry in PROJECT["project"]["scripts"]
    assert f"ln -s /opt/trtllm-pipeline/bin/{entry} /usr/local/bin/{entry}" in " ".join(all_of("RUN"))
    (volume,) = json.loads(all_of("VOLUME")[-1])
    assert all_of("WORKDIR")[-1] == volume
    (cache,) = all_of("ENV")
    assert cache.startswith(f"HF_HOME={volume}/")


def test_the_documented_service_fits_the_image() -> None:
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    service = yaml.safe_load(block)["services"]["pipeline"]
    assert (ROOT / service["build"]["dockerfile"]).exists()
    arguments = service["build"]["args"]
    assert set(arguments) <= {each.partition("=")[0] for each in all_of("ARG")}
    comment = re.search(r"BASE_IMAGE: (\S+):(\S+)-trtllm-python-py3 # TensorRT-LLM (\S+)", block)
    assert comment is not None
    assert comment[1] == TRITON
    assert dict(row[:2] for row in ROWS)[comment[2]] == comment[3]
    assert [volume.partition(":")[2] for volume in service["volumes"]] == json.loads(all_of("VOLUME")[-1])
    places = re.findall(r"/usr/src/trtllm-pipeline/(\S+?)`", PAGE)
    assert places
    assert all((ROOT / place).exists() for place in places)

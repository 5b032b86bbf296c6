"""Names: DNS labels from whatever a cell is called, and images by release."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from trtllm_pipeline.base.errors import UsageError
from trtllm_pipeline.serve.export import container_images, kubernetes_names

PAGE = (Path(__file__).parents[4] / "docs" / "reference" / "images.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(\d\d\.\d\d)-trtllm-python-py3` \| (\S+) \|", re.MULTILINE)


@given(st.text())
def test_any_text_becomes_a_dns_label(text: str) -> None:
    label = kubernetes_names.dns_label(text)
    assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", label)
    assert len(label) <= kubernetes_names.LONGEST
    assert kubernetes_names.dns_label(label) == label
    assert kubernetes_names.checked_name("--name", label) == label


def test_labels_of_cells() -> None:
    assert kubernetes_names.dns_label("Qwen2.5_0.5B/fp8") == "qwen2-5-0-5b-fp8"
    assert kubernetes_names.dns_label("70b") == "m-70b"
    long = "llama-3.1-70b-instruct/int4_awq/tp4pp1/bs8/isl1024-osl"
    assert kubernetes_names.dns_label(f"{long}128") != kubernetes_names.dns_label(f"{long}256")


@pytest.mark.parametrize("name", ["", "A", "a_b", "-a", "a-", "1a", "a" * 41, "a\n"])
def test_other_names_are_refused_with_one_that_works(name: str) -> None:
    with pytest.raises(UsageError) as error:
        kubernetes_names.checked_name("--name", name)
    kubernetes_names.checked_name("--name", str(error.value.hint).removeprefix("--name "))


@given(st.text())
def test_label_values(text: str) -> None:
    assert re.fullmatch(r"|[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", kubernetes_names.label_value(text))


def test_tags_are_the_newest_of_the_page() -> None:
    assert {release: tag for tag, release in ROW.findall(PAGE)} == container_images.TAGS


@pytest.mark.parametrize(
    ("image", "parts"),
    [
        ("triton", ("triton", None, None)),
        ("localhost:5000/a/b__c:24.12-py3", ("localhost:5000/a/b__c", "24.12-py3", None)),
        (f"r.example/x:1@sha256:{'0' * 64}", ("r.example/x", "1", f"sha256:{'0' * 64}")),
        *(
            (image, tuple(container_images.parts(image)))
            for image in (container_images.CPU, container_images.image_for("1.1.0", triton=False))
        ),
    ],
)
def test_images_have_parts(image: str, parts: tuple[str | None, ...]) -> None:
    assert tuple(container_images.parts(image)) == parts


ODD = ("", " ", "a b", 'a"b', "a\nb", "a\x01b", "a: b", "$(id)", "x${HOME}", "{{x}}", "-x", "../x", "ünï", "a/", "x\n")


@pytest.mark.parametrize("text", [*ODD, "A_B", "a:", "a@sha256:0"])
def test_what_is_no_image_is_refused_in_words(text: str) -> None:
    with pytest.raises(UsageError, match=r"--image .*: expected") as error:
        container_images.parts(text)
    assert error.value.message.isprintable()


@pytest.mark.parametrize("text", [*ODD, "A", "a_b", "a..b", "a" * 254])
def test_what_is_no_storage_class_is_refused_in_words(text: str) -> None:
    with pytest.raises(UsageError, match="--storage-class") as error:
        kubernetes_names.checked_storage_class(text)
    assert error.value.message.isprintable()
    assert kubernetes_names.checked_storage_class("fast.ssd-1") == "fast.ssd-1"


def test_an_engine_gets_the_image_with_its_release_and_no_other() -> None:
    assert container_images.image_for("0.16.0", triton=True) == "nvcr.io/nvidia/tritonserver:24.12-trtllm-python-py3"
    assert container_images.image_for("1.1.0", triton=False) == "nvcr.io/nvidia/tensorrt-llm/release:1.1.0"
    assert container_images.image_for("0.16.0", triton=False).startswith(container_images.TRITON), (
        "before there were images of its own"
    )
    with pytest.raises(UsageError, match=r"1\.3\.0rc3 is known"):
        container_images.image_for("1.3.0rc3", triton=True)
    assert all(Version(release) for release in container_images.TAGS)
